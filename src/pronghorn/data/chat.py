"""Rows to documents: the chat template, token ids, and which tokens are trained.

Labels are exact or refused. A conversation is rendered once whole and once up to each assistant turn, with
`add_generation_prompt=True`; where the second is not the beginning of the first, or the assistant's text does not
follow it as written, the model would be trained on something that it never sees when it answers, and the row is an
error. The whole text is then tokenised once and the characters of a turn become tokens through the tokenizer's offsets;
a token that lies on both sides of a boundary is an error too. A turn ends with its end-of-turn token: that is trained
(or generation never stops), and what a template writes after it (ChatML's newline) is not. In the first rows of a data
set the text before each turn is tokenised once more by itself, as generation will do it: other tokens are an error.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pronghorn.data.control_tokens import ControlTokens, Pieces, Rule
from pronghorn.data.labels import Edges, Rendered, token_ranges, verify
from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.data.rows import Conversation, Message, OnBad, PromptCompletion, Row, in_chunks, unless_bad
from pronghorn.data.template import Turn, clip, turns, writer
from pronghorn.errors import ConfigError, DataError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["completion", "last", "all"]
Overflow = Literal["error", "drop", "truncate", "split"]

ROWS_PER_CALL = 1000
CHARACTERS_PER_CALL = 1_000_000
"""Fast tokenizers encode a list in parallel; the encodings of one list are held in memory at a time, and take some 100
bytes a character."""

VERIFIED_ROWS = 50
"""How many rows' prefixes are tokenised a second time: a template or tokenizer that is off is off in every row."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """Documents in the order of their rows; `dropped_unlabelled` counts the rows left out for having no label,
    `conversations` those that went through the chat template, `control_rows` those that hold control tokens in what the
    assistant doesn't say."""

    documents: list[Document]
    dropped_unlabelled: int
    conversations: int
    control_rows: int


@dataclass(frozen=True, slots=True)
class Fitted:
    """Documents of at most `max_seq_length` tokens; of those given, how many were dropped, cut at the end (truncated)
    and cut into pieces (split), and how many pieces were dropped for having no label."""

    documents: list[Document]
    dropped: int
    truncated: int
    split: int = 0
    dropped_pieces: int = 0


@dataclass(frozen=True, slots=True)
class _Specials:
    """`control`: ids of special tokens (the unknown token aside), which may end a turn and not stand inside one;
    `bos`: what the tokenizer begins plain text with, [bos] or []; `eos`: what a bare text ends with."""

    control: frozenset[int]
    bos: list[int]
    eos: int | None

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "_Specials":
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        control = added.union(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        bos = [index for index in tokenizer("")["input_ids"] if index == tokenizer.bos_token_id]
        return cls(frozenset(control), bos, tokenizer.eos_token_id)


def label_rows(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    loss_on: LossOn = "completion",
    system_prompt: str | None = None,
    verify_rows: int = VERIFIED_ROWS,
    on_bad: OnBad | None = None,
    control_tokens: Rule = "escape",
) -> Tokenised:
    """Tokenises some rows of a set and labels them.

    Conversations go through the tokenizer's chat template, and so do prompt and completion, as a user's and an
    assistant's message, where there is one; else they are [bos] + prompt + completion + eos. Texts are [bos] + text +
    eos. bos is there where the tokenizer adds it to plain text; a template writes its own. Neither is written twice: a
    text may begin and end with its own.

    loss_on="completion" trains every assistant turn (or the completion) with its end-of-turn token, and texts whole;
    "last" only the last of a conversation's assistant turns; "all" trains every token. The first token is never
    trained.

    `system_prompt` begins the conversations (prompt and completion through a template are one) that have no system
    message. In the first `verify_rows` rows every trained range is checked against the tokens of the text before it and
    of the text up to its end, tokenised by themselves.

    `control_tokens` says what becomes of control tokens (special ones, and other added tokens that the template writes)
    in what others than the assistant say and in tools: "escape" tokenises them as ordinary text, "error" refuses the
    row, "allow" lets them end turns. The assistant's own text may never hold special tokens; only a bare completion may
    end with eos.

    Raises DataError, naming file and line, for a template or a boundary that would give wrong labels (see above) and
    for control tokens inside an assistant's text; where `on_bad` is given it is called with the error instead, and the
    row left out. What the check finds is always raised: rows that aren't checked have it, too. ConfigError for another
    `loss_on` or `control_tokens`; UnsupportedError for a tokenizer without offsets.
    """
    if loss_on not in ("completion", "last", "all"):
        raise ConfigError(f"data.loss_on is {loss_on!r}", "set it to completion, last or all")
    if control_tokens not in ("escape", "error", "allow"):
        raise ConfigError(f"data.control_tokens is {control_tokens!r}", "set it to escape, error or allow")
    if not tokenizer.is_fast:
        raise UnsupportedError(f"{type(tokenizer).__name__} gives no character offsets", "use a fast tokenizer")
    specials, control = _Specials.of(tokenizer), ControlTokens(tokenizer)
    documents: list[Document] = []
    held = 0
    for some in in_chunks(rows, ROWS_PER_CALL, CHARACTERS_PER_CALL):
        rendered = _render(some, tokenizer, loss_on, system_prompt, on_bad, control, control_tokens)
        whole = iter(_encode([each.text for each in rendered if not each.escaped], tokenizer))
        for each in rendered:
            encoding = None if each.escaped else next(whole)
            for document, ranges, found in unless_bad(partial(_document, each, encoding, specials, control), on_bad):
                if each.turns is not None and len(documents) < verify_rows:
                    verify(each, found.ids, ranges, Edges(found), partial(_ids, each, tokenizer, control))
                documents.append(document)
                held += each.control
    labelled = [document for document in documents if any(label != IGNORE_INDEX for label in reversed(document.labels))]
    spoken = sum(map(_speaks, rows)) if tokenizer.chat_template else 0
    return Tokenised(labelled, len(documents) - len(labelled), spoken, held)


def fit(documents: Iterable[Document], max_seq_length: int, overflow: Overflow = "error", others: int = 0) -> Fitted:
    """Applies the overflow rule to documents of more than `max_seq_length` tokens: refuse, leave out, cut the end, or
    split into documents of at most that length that have all the labels.

    A document that loses its last label by the cut is dropped, and so is a piece without one. Raises DataError at the
    first overlong document ("error"), and where nothing is left of these and the `others` documents of the set, which
    are known to fit; ConfigError for another `overflow`.
    """
    if overflow not in ("error", "drop", "truncate", "split"):
        raise ConfigError(f"data.overflow is {overflow!r}", "set it to error, drop, truncate or split")
    if overflow == "split" and max_seq_length < 2:
        raise ConfigError(f"max_seq_length {max_seq_length} < 2 with data.overflow: split", "raise max_seq_length")
    kept: list[Document] = []
    dropped = truncated = split = dropped_pieces = number = 0
    for number, document in enumerate(documents, 1):
        if len(document) <= max_seq_length:
            kept.append(document)
        elif overflow == "error":
            raise DataError(
                f"{document.source or f'document {number}'} has {len(document)} tokens > max_seq_length "
                f"{max_seq_length}",
                "raise max_seq_length or set data.overflow to drop, truncate or split",
            )
        elif overflow == "split":
            pieces = _pieces(document, max_seq_length)
            labelled = [piece for piece in pieces if piece.labelled]
            kept += labelled
            split += 1
            dropped_pieces += len(pieces) - len(labelled)
        else:
            cut = Document(document.input_ids[:max_seq_length], document.labels[:max_seq_length], document.source)
            if overflow == "truncate" and cut.labelled:
                kept.append(cut)
                truncated += 1
            else:
                dropped += 1
    if not kept and not others:
        raise DataError(
            f"none of {number} documents is left at max_seq_length {max_seq_length} with data.overflow: {overflow}",
            "raise max_seq_length",
        )
    return Fitted(kept, dropped, truncated, split, dropped_pieces)


def _pieces(document: Document, length: int) -> list[Document]:
    """Consecutive pieces of at most `length` tokens. A first token can't be trained, so each piece begins with the last
    token of the one before, where it has its label."""
    pieces: list[Document] = []
    for start in range(0, len(document) - 1, length - 1):
        ids, labels = document.input_ids[start : start + length], document.labels[start : start + length]
        source = f"{document.source} piece {len(pieces) + 1}".lstrip()
        pieces.append(Document(ids, [IGNORE_INDEX, *labels[1:]], source))
    return pieces


def _speaks(row: Row) -> bool:
    return isinstance(row, Conversation | PromptCompletion)


def _render(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    loss_on: LossOn,
    system_prompt: str | None,
    on_bad: OnBad | None,
    control: ControlTokens,
    rule: Rule,
) -> list[Rendered]:
    """The rows' texts and the ranges of their characters to train."""
    write = writer(tokenizer)

    def rendered(given: Row) -> Rendered:
        row = _bare_or_chat(given, tokenizer, loss_on, system_prompt)
        if isinstance(row, Rendered):
            return row
        held = control.held(row)
        if held is not None and rule == "error":
            raise DataError(
                f"{row.source} {held[0]} holds the control token {clip(held[1])}",
                "delete it there, or set data.control_tokens to escape, which makes it ordinary text",
            )
        escaped = held is not None and rule == "escape"
        if escaped:
            row = control.escape(row)
        text, ranges = write(row, None), None
        if loss_on == "all":
            _check_said(row, text)
        else:
            ranges = turns(row, text, write, tokenizer, last=loss_on == "last")
        return Rendered(text, ranges, bare=False, source=row.source, control=held is not None, escaped=escaped)

    return [text for row in rows for text in unless_bad(partial(rendered, row), on_bad)]


def _bare_or_chat(
    row: Row, tokenizer: "PreTrainedTokenizerBase", loss_on: LossOn, system_prompt: str | None
) -> Rendered | Conversation:
    """What no chat template renders, as it is; else the conversation to render."""
    if isinstance(row, PromptCompletion) and tokenizer.chat_template:
        messages = (Message("user", row.prompt), Message("assistant", row.completion))
        row = Conversation(messages, path=row.path, line=row.line)
    if isinstance(row, PromptCompletion):
        text = row.prompt + row.completion
        spans = None if loss_on == "all" else [Turn(len(row.prompt), len(text), len(row.prompt))]
        return Rendered(text, spans, bare=True, source=row.source)
    if not isinstance(row, Conversation):
        return Rendered(row.text, None, bare=True, source=row.source)
    if not tokenizer.chat_template:
        raise DataError(
            f"{row.source}: a conversation, but the tokenizer has no chat template",
            "use the model's instruct version or set data.chat_template",
        )
    if system_prompt is not None and all(message.role != "system" for message in row.messages):
        return replace(row, messages=(Message("system", system_prompt), *row.messages))
    return row


def _check_said(row: Conversation, text: str) -> None:
    said = [message.content.strip() for message in row.messages if message.role == "assistant"]
    if any(said) and not any(content and content in text for content in said):
        raise DataError(
            f"{row.source}: the chat template leaves the assistant's text out: only its own tokens would be trained",
            "set data.chat_template to one that renders every message's content",
        )


def _encode(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> "list[Encoding]":
    """As `tokenizer(texts, add_special_tokens=False)`, without its conversion of every offset to Python objects."""
    backend: Any = tokenizer.backend_tokenizer
    backend.no_truncation()  # what transformers, too, sets before each call
    backend.no_padding()
    return backend.encode_batch(texts, add_special_tokens=False)


def _ids(
    rendered: Rendered, tokenizer: "PreTrainedTokenizerBase", control: ControlTokens, texts: list[str]
) -> list[list[int]]:
    """The tokens of parts of the row's text, by themselves."""
    if rendered.escaped:
        return [control.encode(text, rendered.source).ids for text in texts]
    return [encoding.ids for encoding in _encode(texts, tokenizer)]


def _document(
    rendered: Rendered, whole: "Encoding | None", specials: "_Specials", control: ControlTokens
) -> tuple[Document, list[tuple[int, int]], "Encoding | Pieces"]:
    """The row's tokens and labels, the token ranges of its turns before bos, and its encoding: the `whole` text's, or
    that of its pieces."""
    encoding = control.encode(rendered.text, rendered.source) if whole is None else whole
    ids, ranges = encoding.ids, list[tuple[int, int]]()
    if rendered.turns is None:
        labels = list(ids)
    else:
        labels = [IGNORE_INDEX] * len(ids)
        ranges = token_ranges(rendered, ids, Edges(encoding), specials.control, specials.eos)
        for first, end in ranges:
            labels[first:end] = ids[first:end]
    if rendered.bare:
        if specials.eos is None:
            raise DataError(f"{rendered.source}: the tokenizer has no token to end it with", "set tokenizer.eos_token")
        bos = specials.bos if specials.bos != ids[:1] else []
        eos = [specials.eos] if ids[-1:] != [specials.eos] else []
        ids, labels = [*bos, *ids, *eos], [*[IGNORE_INDEX] * len(bos), *labels, *eos]
    labels[:1] = [IGNORE_INDEX] * len(labels[:1])
    return Document(ids, labels, rendered.source), ranges, encoding
