"""Control tokens in what a user says: found, refused, or tokenised as the ordinary text that they are.

A tokenizer makes `<|im_end|>` the end of a turn wherever it stands, in a user's question about chat templates as well.
To escape one, its text is put between two marks before the template renders the row. The marks tell the template's own
tokens from the row's; the text is tokenised in pieces and the marks are left out. The tokens are those that
transformers gives with `apply_chat_template(..., sanitize_control_tokens=True)`; this also knows where each stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pronghorn.data.rows import Conversation, texts_of
from pronghorn.data.template import clip, special_tokens
from pronghorn.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rule = Literal["escape", "error", "allow"]

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters: Unicode keeps them for a program's own use, so no text has them."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tokens of a text that was tokenised in pieces, as far as labels need an `Encoding`."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.ids)

    def token_to_chars(self, token: int) -> tuple[int, int]:
        """Return where a token begins and ends."""
        return self.offsets[token]

    def char_to_token(self, character: int) -> None:
        """Return None, as it isn't known: `Edges` then searches the ends."""


class ControlTokens:
    """The control tokens of a tokenizer: its special ones, and other added tokens that its chat template names."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._usual: Any = tokenizer.backend_tokenizer
        template = str(tokenizer.chat_template or "")
        named = {
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if token.content.strip() and token.content in template
        }
        self._tokens = (special_tokens(tokenizer) | (named - {tokenizer.unk_token})) - {""}
        longest_first = sorted(self._tokens, key=lambda token: (-len(token), token))
        self._find = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._marked = re.compile(f"{_BEGIN}({self._find.pattern}){_END}")

    def held(self, row: Conversation) -> tuple[str, str] | None:
        """Find the first control token in what others than the assistant say and in the tools: (where, token)."""
        for number, message in enumerate(row.messages, 1):
            if message.role != "assistant":
                texts = (message.content, *(str(each) for each in message.extra.values()))
                for token in (found[0] for found in map(self._find.search, texts) if found):
                    return f"message {number} ({message.role})", token
        found = next(filter(None, map(self._find.search, texts_of(row.tools))), None)
        return None if found is None else ("the tools", found[0])

    def escape(self, row: Conversation) -> Conversation:
        """Put marks around the control tokens that `held` finds.

        Raises:
            DataError: the row holds marks already.
        """
        own = json.dumps([[m.as_dict() for m in row.messages], row.tools], ensure_ascii=False, default=str)
        if _BEGIN in own or _END in own:
            raise DataError(f"{row.source}: the noncharacter U+FDD0 or U+FDD1 beside a control token", "delete it")

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                return self._find.sub(f"{_BEGIN}\\g<0>{_END}", value)
            if isinstance(value, Mapping):
                return {mark(name): mark(each) for name, each in value.items()}
            return [mark(each) for each in value] if isinstance(value, list | tuple) else value

        messages = tuple(
            message
            if message.role == "assistant"
            else replace(message, content=mark(message.content), extra=mark(message.extra))
            for message in row.messages
        )
        return replace(row, messages=messages, tools=tuple(mark(row.tools)))

    def encode(self, text: str, source: str) -> Pieces:
        """Tokenise a text with marks, what stands between them as ordinary text. Offsets are those of the text.

        Raises:
            DataError: the template took the marks apart, or the tokenizer makes control tokens of ordinary text.
        """
        rest = self._marked.sub("", text)
        if _BEGIN in rest or _END in rest:
            raise DataError(
                f"{source}: the chat template takes a control token of the user's text apart",
                "delete the token there, or set data.control_tokens to allow",
            )
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for number, piece in enumerate(self._marked.split(text)):
            escaped = number % 2  # every second piece stands between marks
            start += escaped
            tokens, spans = self._encode_piece(piece, start, self._plain if escaped else self._usual)
            if escaped and not self._ids.isdisjoint(tokens):
                raise DataError(
                    f"{source}: the tokenizer makes a control token of the ordinary text {clip(piece)}",
                    "delete it, or set data.control_tokens to allow",
                )
            start += len(piece) + escaped
            if tokens:
                spans[-1] = (spans[-1][0], start)  # the mark behind belongs to the last token
            ids += tokens
            offsets += spans
        return Pieces(ids, offsets)

    def _encode_piece(self, piece: str, start: int, backend: Any) -> tuple[list[int], list[Any]]:
        """Tokenise a piece; behind a line's end, where it isn't the first, since some tokenizers begin a text with a
        space."""
        lead = self._line_end if start else []
        encoding = backend.encode("\n" + piece if lead else piece, add_special_tokens=False)
        if encoding.ids[: len(lead)] != lead:
            encoding, lead = backend.encode(piece, add_special_tokens=False), []
        first = start - bool(lead)
        return encoding.ids[len(lead) :], [(first + a, first + b) for a, b in encoding.offsets[len(lead) :]]

    @cached_property
    def _plain(self) -> Any:
        """A copy of the tokenizer that knows no control tokens: it keeps special ones as text, so all are special."""
        from tokenizers import Tokenizer

        table = json.loads(self._usual.to_str())
        for token in table["added_tokens"]:
            token["special"] = token["content"] in self._tokens
        plain: Any = Tokenizer.from_str(json.dumps(table))
        plain.encode_special_tokens = True
        plain.no_truncation()
        plain.no_padding()
        return plain

    @cached_property
    def _ids(self) -> frozenset[int]:
        known = self._tokenizer.added_tokens_encoder
        return frozenset(known[token] for token in self._tokens if token in known)

    @cached_property
    def _line_end(self) -> list[int]:
        return list(self._usual.encode("\n", add_special_tokens=False).ids)
