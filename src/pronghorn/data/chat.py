"""Rows to documents: the chat template, token ids, and which tokens are trained.

Labels are exact or refused. A conversation is rendered once whole and once up to each assistant turn, with
`add_generation_prompt=True`; where the second is not the beginning of the first, or the assistant's text does not
follow it as written, the model would be trained on something that it never sees when it answers, and the row is an
error. The whole text is then tokenised once and the characters of a turn become tokens through the tokenizer's offsets;
a token that lies on both sides of a boundary is an error too. A turn ends with its end-of-turn token: that is trained
(or generation never stops), and what a template writes after it (ChatML's newline) is not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.data.rows import Conversation, Message, PromptCompletion, Row
from pronghorn.errors import ConfigError, DataError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["completion", "all"]
Overflow = Literal["error", "drop", "truncate"]
Progress = Callable[[int], None]

ROWS_PER_CALL = 1000
"""Fast tokenizers encode a list in parallel; the offsets of one list are held in memory at a time."""

LEADS = ("", " ", "<think>\n\n</think>\n\n")
"""What a template may write between its generation prompt and the assistant's text, for the model to generate: nothing
(ChatML, Llama 3, Gemma), a space (Llama 2, Mistral), an empty reasoning block (Qwen3, last turn)."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """Documents in the order of their rows; `dropped_unlabelled` counts the rows left out for having no label."""

    documents: list[Document]
    dropped_unlabelled: int


@dataclass(frozen=True, slots=True)
class Fitted:
    """Documents of at most `max_seq_length` tokens, with how many were dropped and how many of these were cut."""

    documents: list[Document]
    dropped: int
    truncated: int


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A row's text. `turns` are the character ranges [start, end) to train (None: all of it), each without the
    end-of-turn token that the template writes. `bare` text has no template: it needs bos and eos around it."""

    text: str
    turns: list[tuple[int, int]] | None
    bare: bool
    source: str


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


def tokenize(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    loss_on: LossOn = "completion",
    progress: Progress | None = None,
) -> Tokenised:
    """Tokenises `rows` and labels them; `progress(n)` is called after every n more rows.

    Conversations go through the tokenizer's chat template, and so do prompt and completion, as a user's and an
    assistant's message, where there is one; else they are [bos] + prompt + completion + eos. Texts are [bos] + text +
    eos. bos is there where the tokenizer adds it to plain text; a template writes its own.

    loss_on="completion" trains every assistant turn (or the completion) with its end-of-turn token, and texts whole;
    "all" trains every token. The first token is never trained.

    Raises DataError, naming file and line, for a template or a boundary that would give wrong labels (see above), for
    control tokens inside an assistant's text, and where no row has a label; ConfigError for another `loss_on`;
    UnsupportedError for a tokenizer without offsets.
    """
    if loss_on not in ("completion", "all"):
        raise ConfigError(f"data.loss_on is {loss_on!r}", "set it to completion or all")
    if not tokenizer.is_fast:
        raise UnsupportedError(f"{type(tokenizer).__name__} gives no character offsets", "use a fast tokenizer")
    specials = _Specials.of(tokenizer)
    documents: list[Document] = []
    for first in range(0, len(rows), ROWS_PER_CALL):
        rendered = [_render(row, tokenizer, loss_on) for row in rows[first : first + ROWS_PER_CALL]]
        encoded = tokenizer(
            [each.text for each in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,  # its warning about long inputs: `fit` decides about those
        )
        for each, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            documents.append(_document(each, ids, offsets, specials))
        if progress is not None:
            progress(len(rendered))
    labelled = [document for document in documents if document.labelled]
    if not labelled:
        raise DataError(
            f"none of {len(rows)} rows has a token to train",
            "give rows with an assistant message (data.loss_on: completion trains nothing else)",
        )
    return Tokenised(labelled, len(documents) - len(labelled))


def fit(documents: Iterable[Document], max_seq_length: int, overflow: Overflow = "error") -> Fitted:
    """Applies the overflow rule to documents of more than `max_seq_length` tokens: refuse, leave out, or cut the end.

    A document that loses its last label by the cut is dropped. Raises DataError at the first overlong document
    ("error"), and where nothing is left; ConfigError for another `overflow`.
    """
    if overflow not in ("error", "drop", "truncate"):
        raise ConfigError(f"data.overflow is {overflow!r}", "set it to error, drop or truncate")
    kept: list[Document] = []
    dropped = truncated = number = 0
    for number, document in enumerate(documents, 1):
        if len(document) > max_seq_length:
            if overflow == "error":
                source = f" ({document.source})" if document.source else ""
                raise DataError(
                    f"document {number - 1}{source} has {len(document)} tokens > max_seq_length {max_seq_length}",
                    "raise max_seq_length or set data.overflow to drop or truncate",
                )
            ids, labels = document.input_ids[:max_seq_length], document.labels[:max_seq_length]
            document = Document(ids, labels, document.source)
            if overflow == "drop" or not document.labelled:
                dropped += 1
                continue
            truncated += 1
        kept.append(document)
    if not kept:
        raise DataError(
            f"none of {number} documents is left at max_seq_length {max_seq_length} with data.overflow: {overflow}",
            "raise max_seq_length",
        )
    return Fitted(kept, dropped, truncated)


def _render(row: Row, tokenizer: "PreTrainedTokenizerBase", loss_on: LossOn) -> _Rendered:
    if isinstance(row, PromptCompletion) and tokenizer.chat_template:
        messages = (Message("user", row.prompt), Message("assistant", row.completion))
        row = Conversation(messages, path=row.path, line=row.line)
    if isinstance(row, PromptCompletion):
        text = row.prompt + row.completion
        turns = [(len(row.prompt), len(text))] if loss_on == "completion" else None
        return _Rendered(text, turns, bare=True, source=row.source)
    if not isinstance(row, Conversation):
        return _Rendered(row.text, None, bare=True, source=row.source)
    if not tokenizer.chat_template:
        raise DataError(
            f"{row.source}: a conversation, but the tokenizer has no chat template",
            "use the model's instruct version or set tokenizer.chat_template",
        )
    text = _apply_template(row.messages, tokenizer, row.source, answer=False)
    turns = None if loss_on == "all" else _turns(row, text, tokenizer)
    return _Rendered(text, turns, bare=False, source=row.source)


def _turns(row: Conversation, text: str, tokenizer: "PreTrainedTokenizerBase") -> list[tuple[int, int]]:
    """The character ranges in `text` that the model generates in the assistant's turns, end-of-turn tokens excluded."""
    turns = []
    for index, message in enumerate(row.messages):
        if message.role != "assistant":
            continue
        prompt = _apply_template(row.messages[:index], tokenizer, row.source, answer=True)
        if not text.startswith(prompt):
            raise DataError(
                f"{row.source} message {index + 1}: the chat template renders the conversation before this turn "
                "otherwise than the same messages within the whole conversation",
                "set tokenizer.chat_template to one that renders a beginning the same whatever follows, or split the "
                "row so that each ends with the assistant turn to train",
            )
        start = len(prompt)
        lead = next((lead for lead in LEADS if text.startswith(lead + message.content, start)), None)
        if lead is None:
            raise DataError(
                f"{row.source} message {index + 1}: after the generation prompt the chat template writes "
                f"{_clip(text[start:])}, not the assistant's text {_clip(message.content)} as it stands",
                "trim white space around the text and leave reasoning out of turns before the last, or set "
                "tokenizer.chat_template to one that keeps the text and knows add_generation_prompt",
            )
        turns.append((start, start + len(lead) + len(message.content)))
    return turns


def _apply_template(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", source: str, answer: bool
) -> str:
    from jinja2 import TemplateError

    chat = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer))
    except TemplateError as error:
        raise DataError(
            f"{source}: the chat template refuses the conversation ({error})", "mend the row's roles or the template"
        ) from error


def _document(rendered: _Rendered, ids: list[int], offsets: list[tuple[int, int]], specials: "_Specials") -> Document:
    if rendered.turns is None:
        labels = list(ids)
    else:
        labels = [IGNORE_INDEX] * len(ids)
        for first, end in _token_ranges(rendered, ids, offsets, specials.control):
            labels[first:end] = ids[first:end]
    if rendered.bare:
        if specials.eos is None:
            raise DataError(f"{rendered.source}: the tokenizer has no token to end it with", "set tokenizer.eos_token")
        bos = specials.bos if specials.bos != ids[:1] else []
        ids, labels = [*bos, *ids, specials.eos], [*[IGNORE_INDEX] * len(bos), *labels, specials.eos]
    labels[:1] = [IGNORE_INDEX] * len(labels[:1])
    return Document(ids, labels, rendered.source)


def _token_ranges(
    rendered: _Rendered, ids: list[int], offsets: list[tuple[int, int]], control: frozenset[int]
) -> list[tuple[int, int]]:
    """The token ranges [first, end) of the turns, end-of-turn tokens included (bare text has none yet)."""
    text, source = rendered.text, rendered.source
    begins, ends = _edges(offsets)
    ranges = []
    at, count = 0, len(ids)
    for start, end in rendered.turns or ():
        while at < count and ends[at] <= start:
            at += 1
        first = at
        while at < count and ends[at] <= end:
            if ids[at] in control:
                token = _clip(text[begins[at] : ends[at]])
                raise DataError(f"{source}: the assistant's text holds the control token {token}", "delete it there")
            at += 1
        for edge, token_at in ((start, first), (end, at)):
            if token_at < count and begins[token_at] < edge < ends[token_at]:
                token = _clip(text[begins[token_at] : ends[token_at]])
                before, after = _clip(text[max(0, edge - 20) : edge]), _clip(text[edge : edge + 20])
                raise DataError(
                    f"{source}: token {token} lies on both sides of the boundary between {before} and {after}",
                    "trim white space around the assistant's text, or move it from the prompt's end to the completion",
                )
        if not rendered.bare:
            while at < count and ids[at] not in control and text[begins[at] : ends[at]].isspace():
                at += 1
            if at == count or ids[at] not in control:
                raise DataError(
                    f"{source}: no end-of-turn token follows the assistant's text, but {_clip(text[end:])}",
                    "use a chat template that ends the assistant's turns with a special token of the tokenizer",
                )
            at += 1
        ranges.append((first, at))
    return ranges


def _edges(offsets: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Where each token begins and ends in the text, so that every character belongs to a token.

    Some byte-level tokenizers leave a token's leading white space out of its offsets (`trim_offsets`); a character that
    no token covers goes to the next one, or a token could cross a boundary unseen.
    """
    begins, ends = [], []
    covered = 0
    for begin, end in offsets:
        begins.append(min(begin, covered))
        covered = max(covered, end)
        ends.append(end)
    return begins, ends


def _clip(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
