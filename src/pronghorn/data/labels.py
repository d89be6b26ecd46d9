"""Rows to documents: token ids, and which of them are supervised.

Labels are exact or refused. A conversation is rendered once whole and once up to each assistant turn, with
`add_generation_prompt=True`; where the second is not the beginning of the first, or the assistant's text does not
follow it as written, the model would be trained on something that it never sees when it answers, and the row is an
error, unless a system message, tools or reasoning are why: such a turn becomes a document of its own, which ends with
it, as the model sees it when it answers. The whole text is then tokenised once and the characters of a turn become
tokens through the tokenizer's offsets; a token that lies on both sides of a boundary is an error too. A turn ends with
its end-of-turn token: that is supervised (or generation never stops), and what a template writes after it (ChatML's
newline) is not. In a data set's first rows the text before each turn is tokenised again by itself: it must be the same.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from pronghorn.data.control_tokens import ControlTokens, Pieces, Rule
from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.data.reasoning import Reasoning, apart
from pronghorn.data.rows import Conversation, Message, OnBad, PromptCompletion, Row, TextDocument, dropping, in_chunks
from pronghorn.data.template import NoTemplateError, Turn, check_said, clip, render, special_tokens, turns
from pronghorn.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["completion", "last", "all"]

ROWS_PER_CALL = 1000
CHARACTERS_PER_CALL = 1_000_000
"""Fast tokenizers encode a list in parallel; the encodings of one list are held in memory at a time, and take some 100
bytes a character."""
VERIFIED_ROWS = 50
"""How many rows' prefixes are tokenised a second time: a template or tokenizer that is off is off in every row."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """Documents in the order of their rows; `unsupervised` counts the rows left out for having no supervised token,
    `conversations` those that went through the chat template, `control_rows` those that hold control tokens in what the
    assistant doesn't say."""

    documents: list[Document]
    unsupervised: int
    conversations: int
    control_rows: int


def label_rows(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    loss_on: LossOn = "completion",
    system_prompt: str | None = None,
    verify_rows: int = VERIFIED_ROWS,
    on_bad: OnBad | None = None,
    control_tokens: Rule = "escape",
) -> Labelled:
    """Tokenise some rows of a set and label them.

    Conversations go through the tokenizer's chat template, and so do prompt and completion, as a user's and an
    assistant's message, where there is one; else they are [bos] + prompt + completion + eos. Texts are [bos] + text +
    eos. bos is there where the tokenizer adds it to plain text; a template writes its own. Neither is written twice: a
    text may begin and end with its own.

    Args:
        loss_on: "completion" supervises every assistant turn (or the completion) with its end-of-turn token, and texts
            whole; "last" only the last of a conversation's assistant turns; "all" every token. Never the first token.
        system_prompt: begins the conversations (prompt and completion through a template are one) without a system
            message.
        verify_rows: in so many rows supervised ranges are checked (`verify`) against the tokens of the text before each
            and of the text up to its end, tokenised by themselves.
        on_bad: called with the error of each row that can't be labelled, which is then left out; None raises it. What
            the check finds is always raised: rows that aren't checked have it, too.
        control_tokens: what becomes of control tokens (special ones, and other added tokens that the template writes)
            in what others than the assistant say and in tools: "escape" tokenises them as ordinary text, "error"
            refuses the row, "allow" lets them end turns. The assistant's own text may never hold special tokens; only a
            bare completion may end with eos.
    Raises:
        DataError: a template or a boundary that would give wrong labels (see above), control tokens inside an
            assistant's text; names file and line. UnsupportedError: a tokenizer without offsets.
    """
    if not tokenizer.is_fast:
        raise UnsupportedError(f"{type(tokenizer).__name__} gives no character offsets", "use a fast tokenizer")
    labeller = Labeller(tokenizer, loss_on, system_prompt, control_tokens)
    documents: list[Document] = []
    control_rows = 0
    for chunk in in_chunks(rows, ROWS_PER_CALL, CHARACTERS_PER_CALL):
        texts: list[Rendered] = []
        for row in chunk:
            with dropping(on_bad):
                texts += labeller.render(row)
        # texts with escaped control tokens are tokenised in pieces, one by one
        encodings = iter(labeller.encode([text.text for text in texts if not text.escaped]))
        for text in texts:
            labelled = None
            encoding = None if text.escaped else next(encodings)
            with dropping(on_bad):
                labelled = labeller.label(text, encoding)
            if labelled is None:
                continue
            document, ranges, tokens = labelled
            if text.turns is not None and len(documents) < verify_rows:
                verify(text, tokens.ids, ranges, Edges(tokens), partial(labeller.ids_of, text))
            documents.append(document)
            control_rows += text.control
    supervised = [document for document in documents if document.supervised]
    spoken = sum(not isinstance(row, TextDocument) for row in rows) if tokenizer.chat_template else 0
    return Labelled(supervised, len(documents) - len(supervised), spoken, control_rows)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row's text and its supervised turns (None: all of it). `bare` text has no template: it needs bos and eos around
    it. `control`: the row holds control tokens in what the assistant doesn't say; `escaped`: they are marked."""

    text: str
    turns: list[Turn] | None
    bare: bool
    source: str
    control: bool = False
    escaped: bool = False


class Labeller:
    """What `label_rows` needs to know of a tokenizer, and the steps from a row to its labels."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", loss_on: LossOn, system_prompt: str | None, rule: Rule
    ) -> None:
        self._tokenizer, self._loss_on, self._system_prompt, self._rule = tokenizer, loss_on, system_prompt, rule
        self._control, self._reasoning = ControlTokens(tokenizer), Reasoning(tokenizer)
        self._special_tokens = special_tokens(tokenizer)
        special: Any = tokenizer.convert_tokens_to_ids(sorted(self._special_tokens))
        self._special: frozenset[int] = frozenset(special)
        """Ids of special tokens, which may end a turn and not stand inside one."""
        # of a text: what a tokenizer puts behind one may be bos, too
        probe: Any = tokenizer("a", return_special_tokens_mask=True)
        before = takewhile(itemgetter(1), zip(probe["input_ids"], probe["special_tokens_mask"], strict=True))
        self._bos = [token for token, _ in before if token == tokenizer.bos_token_id]

    def render(self, row: Row) -> list[Rendered]:
        """Return the row's text and the ranges of its characters that are supervised; several texts where the template
        renders a turn with tools or reasoning otherwise once the conversation goes on."""
        tokenizer, whole = self._tokenizer, self._loss_on == "all"
        if isinstance(row, TextDocument):
            return [Rendered(row.text, None, bare=True, source=row.source)]
        if isinstance(row, PromptCompletion):
            if not tokenizer.chat_template:
                text, start = row.prompt + row.completion, len(row.prompt)
                spans = None if whole else [Turn(start, len(text), start)]
                return [Rendered(text, spans, bare=True, source=row.source)]
            messages = (Message("user", row.prompt), Message("assistant", row.completion))
            row = Conversation(messages, path=row.path, line=row.line)
        if not tokenizer.chat_template:
            raise NoTemplateError(
                f"{row.source}: a conversation, but the tokenizer has no chat template",
                "use the model's instruct version or set data.chat_template",
            )
        if self._system_prompt is not None and all(message.role != "system" for message in row.messages):
            row = replace(row, messages=(Message("system", self._system_prompt), *row.messages))
        held = self._control.held(row)
        if held is not None and self._rule == "error":
            raise DataError(
                f"{row.source} {held[0]} holds the control token {clip(held[1])}",
                "delete it there, or set data.control_tokens to escape, which makes it ordinary text",
            )
        escaped = held is not None and self._rule == "escape"
        if escaped:
            row = self._control.escape(row)
        row = self._reasoning.placed(row)
        common: Any = {"bare": False, "control": held is not None, "escaped": escaped}
        supervised = [i for i, message in enumerate(row.messages) if message.role == "assistant" and message.supervised]
        if whole:
            if len(supervised) < sum(message.role == "assistant" for message in row.messages):
                raise DataError(
                    f"{row.source}: a turn that is not to be trained, with data.loss_on: all, which trains every token",
                    "set data.loss_on: completion, or delete the turn's weight",
                )
            text = render(row.messages, row.tools, tokenizer, row.source, answer=False)
            said = [apart(message) for message in row.messages if message.role == "assistant"]
            check_said(said, text, self._special_tokens, row.source)
            return [Rendered(text, None, source=row.source, **common)]
        return self._documents(row, supervised[-1:] if self._loss_on == "last" else supervised, common)

    def _documents(self, row: Conversation, left: list[int], common: dict[str, Any]) -> list[Rendered]:
        """Render the whole conversation and, for turns that it rewrites, the conversation up to the last of them."""
        why = (m.role == "system" or m.reasoning or "tool_calls" in m.extra for m in row.messages)
        excused = bool(row.tools) or any(why)
        rendered: list[Rendered] = []
        end, more = len(row.messages), True
        while more:
            text = render(row.messages[:end], row.tools, self._tokenizer, row.source, answer=False)
            ranges, rewritten = turns(row, text, self._tokenizer, left)
            if rewritten and (not excused or end - 1 in rewritten):
                raise next(iter(rewritten.values()))
            source = f"{row.source} up to message {end}" if end < len(row.messages) else row.source
            rendered.append(Rendered(text, ranges, source=source, **common))
            left = list(rewritten)
            more, end = bool(left), left[-1] + 1 if left else end
        return [text for text in reversed(rendered) if text.turns or len(rendered) == 1]

    def encode(self, texts: list[str]) -> "list[Encoding]":
        """Tokenise texts as `tokenizer(texts, add_special_tokens=False)`, without its conversion of every offset to
        Python objects."""
        backend: Any = self._tokenizer.backend_tokenizer
        backend.no_truncation()  # what transformers, too, sets before each call
        backend.no_padding()
        return backend.encode_batch(texts, add_special_tokens=False)

    def ids_of(self, row: Rendered, parts: list[str]) -> list[list[int]]:
        """Tokenise parts of a row's text, each by itself."""
        if row.escaped:
            return [self._control.encode(part, row.source).ids for part in parts]
        return [encoding.ids for encoding in self.encode(parts)]

    def label(
        self, row: Rendered, encoding: "Encoding | None"
    ) -> tuple[Document, list[tuple[int, int]], "Encoding | Pieces"]:
        """Return the row's document, the token ranges of its turns before bos, and its tokens: `encoding`, or those of
        its pieces where it is None."""
        tokens = self._control.encode(row.text, row.source) if encoding is None else encoding
        ids, eos = tokens.ids, self._tokenizer.eos_token_id
        labels, ranges = list(ids), list[tuple[int, int]]()
        if row.turns is not None:
            labels = [IGNORE_INDEX] * len(ids)
            ranges = token_ranges(row, ids, Edges(tokens), self._special, eos)
            for first, end in ranges:
                labels[first:end] = ids[first:end]
        if row.bare:
            if eos is None:
                remedy = "set tokenizer.eos_token, of a folder in its tokenizer_config.json"
                raise DataError(f"{row.source}: the tokenizer has no token to end it with", remedy)
            bos = self._bos if self._bos != ids[:1] else []
            end_token = [eos] if ids[-1:] != [eos] else []
            ids, labels = [*bos, *ids, *end_token], [*[IGNORE_INDEX] * len(bos), *labels, *end_token]
        labels[:1] = [IGNORE_INDEX] * len(labels[:1])
        return Document(ids, labels, row.source), ranges, tokens


class Edges:
    """Where each token of an encoded text begins and ends in it, so that every character belongs to a token.

    Some byte-level tokenizers leave a token's leading white space out of its offsets (`trim_offsets`); a character that
    no token covers goes to the next one, or a token could cross a boundary unseen. Tokens stand in the text's order
    (`verify` checks it), so the few edges that labels need are looked up one by one: all offsets, as Python's tuples,
    would cost a tenth of the tokenizing.
    """

    def __init__(self, encoding: "Encoding | Pieces") -> None:
        self.encoding = encoding
        self._span: Any = encoding.token_to_chars

    def begin(self, token: int) -> int:
        """Return the first character of a token."""
        return min(self._span(token)[0], self.end(token - 1)) if token else 0

    def end(self, token: int) -> int:
        """Return one past a token's last character."""
        return self._span(token)[1]

    def first_past(self, character: int, start: int) -> int:
        """Return the first token, from `start` on, that ends after `character`, or else the number of tokens."""
        covering = self.encoding.char_to_token(character)
        if covering is not None:
            return max(start, covering)
        return bisect_right(range(len(self.encoding)), character, lo=start, key=self.end)


def token_ranges(
    rendered: Rendered, ids: list[int], edges: Edges, control: frozenset[int], eos: int | None = None
) -> list[tuple[int, int]]:
    """Return the token ranges [first, end) of the turns, end-of-turn tokens included, `eos` right behind one, too; bare
    text has none yet, unless it ends with its own `eos`."""
    text, source, ranges = rendered.text, rendered.source, []
    at, count = 0, len(ids)

    def text_of(token: int) -> str:
        return text[edges.begin(token) : edges.end(token)]

    for start, end, said in rendered.turns or ():
        first = edges.first_past(start, at)
        at = edges.first_past(end, first)
        # up to `said` the template wrote the turn, control tokens too; the row's own text holds none
        own = first if said == start else edges.first_past(said, first)
        end_of_own = at - 1 if rendered.bare and at == count and ids[-1:] == [eos] else at
        if not control.isdisjoint(ids[own:end_of_own]):
            held = next(token for token in range(own, at) if ids[token] in control)
            raise DataError(
                f"{source}: the assistant's text holds the control token {clip(text_of(held))}", "delete it there"
            )
        for edge, token in ((start, first), (end, at)):
            if token < count and edges.begin(token) < edge < edges.end(token):
                raise _boundary_error(rendered, edge, f"token {clip(text_of(token))} lies on both sides of", "")
        if not rendered.bare:
            while at < count and ids[at] not in control and text_of(at).isspace():
                at += 1
            if at == count or ids[at] not in control:
                raise DataError(
                    f"{source}: no end-of-turn token follows the assistant's text, but {clip(text[end:])}",
                    "use a chat template that ends the assistant's turns with a special token of the tokenizer",
                )
            at += 1
            if at < count and ids[at] == eos != ids[at - 1]:  # Command R7B ends its response, and then the turn
                at += 1
        ranges.append((first, at))
    return ranges


def verify(
    rendered: Rendered,
    ids: list[int],
    ranges: list[tuple[int, int]],
    edges: Edges,
    encode: Callable[[list[str]], list[list[int]]],
) -> None:
    """Tokenise the text before each turn, and the text up to the turn's end, by themselves with `encode`: they must
    give the tokens that the whole text has there, or the model is trained after other tokens than it sees when it
    answers. Of a long conversation these are the first turns, up to CHARACTERS_PER_CALL in all, and the last: all
    together they grow with the square of its turns. Raises DataError otherwise."""
    ends = [end for _, end in edges.encoding.offsets]
    if ends != sorted(ends):
        raise DataError(
            f"{rendered.source}: the tokenizer's offsets do not follow the text", "use a tokenizer whose offsets do"
        )
    chosen = list(zip(rendered.turns or (), ranges, strict=True))
    characters = accumulate(turn.start + turn.end for turn, _ in chosen)
    checked = [each for each, so_far in zip(chosen, characters, strict=True) if so_far <= CHARACTERS_PER_CALL]
    checked += chosen[-1:] if len(checked) < len(chosen) else []
    boundaries = [edge for turn, _ in checked for edge in (turn.start, turn.end)]
    alone = encode([rendered.text[:edge] for edge in boundaries]) if boundaries else []
    for number, (edge, tokens) in enumerate(zip(boundaries, alone, strict=True)):
        first, last = checked[number // 2][1]
        if tokens != (ids[:last][: len(tokens)] if number % 2 else ids[:first]):
            other = " has other tokens by itself than within the whole text"
            raise _boundary_error(rendered, edge, "the text up to", other)


def _boundary_error(rendered: Rendered, edge: int, before: str, after: str) -> DataError:
    left, right = clip(rendered.text[max(0, edge - 20) : edge]), clip(rendered.text[edge : edge + 20])
    return DataError(
        f"{rendered.source}: {before} the boundary between {left} and {right}{after}",
        "trim the assistant's text; the prompt, or what the template writes before it, must not end in white space",
    )
