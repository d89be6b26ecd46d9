"""Characters to tokens: which tokens are the text of an assistant's turn, by the tokenizer's offsets, and the proof."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pronghorn.data.template import Turn, clip
from pronghorn.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding

    from pronghorn.data.control_tokens import Pieces


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row's text and the turns to train (None: all of it). `bare` text has no template: it needs bos and eos around
    it. `control`: the row holds control tokens in what the assistant doesn't say; `escaped`: they are marked."""

    text: str
    turns: list[Turn] | None
    bare: bool
    source: str
    control: bool = False
    escaped: bool = False


class Edges:
    """Where each token of an encoded text begins and ends in it, so that every character belongs to a token.

    Some byte-level tokenizers leave a token's leading white space out of its offsets (`trim_offsets`); a character that
    no token covers goes to the next one, or a token could cross a boundary unseen. Tokens stand in the text's order
    (`verify` checks it), so the few edges that labels need are looked up one by one: all offsets, as Python's tuples,
    would cost a tenth of the tokenizing.
    """

    def __init__(self, encoding: "Encoding | Pieces") -> None:
        self._encoding = encoding
        self._span: Any = encoding.token_to_chars
        self._tokens = range(len(encoding))

    def begin(self, token: int) -> int:
        """The first character of a token."""
        return min(self._span(token)[0], self.end(token - 1)) if token else 0

    def end(self, token: int) -> int:
        """One past a token's last character."""
        return self._span(token)[1]

    def first_past(self, character: int, start: int) -> int:
        """The first token, from `start` on, that ends after `character`; the number of tokens where none does."""
        covering = self._encoding.char_to_token(character)
        if covering is not None:
            return max(start, covering)
        return bisect_right(self._tokens, character, lo=start, key=self.end)

    @property
    def in_order(self) -> bool:
        """Whether no token ends before the one in front of it."""
        ends = [end for _, end in self._encoding.offsets]
        return ends == sorted(ends)


def token_ranges(
    rendered: Rendered, ids: list[int], edges: Edges, control: frozenset[int], eos: int | None = None
) -> list[tuple[int, int]]:
    """The token ranges [first, end) of the turns, end-of-turn tokens included; bare text has none yet, unless it ends
    with its own `eos`."""
    text, source = rendered.text, rendered.source
    ranges = []
    at, count = 0, len(ids)
    for start, end, said in rendered.turns or ():
        first = edges.first_past(start, at)
        at = edges.first_past(end, first)
        own = first if said == start else edges.first_past(said, first)
        end_of_own = at - 1 if rendered.bare and at == count and ids[-1:] == [eos] else at
        if not control.isdisjoint(ids[own:end_of_own]):
            held = next(token for token in range(own, at) if ids[token] in control)
            token = clip(text[edges.begin(held) : edges.end(held)])
            raise DataError(f"{source}: the assistant's text holds the control token {token}", "delete it there")
        for edge, token_at in ((start, first), (end, at)):
            if token_at < count and edges.begin(token_at) < edge < edges.end(token_at):
                token = clip(text[edges.begin(token_at) : edges.end(token_at)])
                before, after = clip(text[max(0, edge - 20) : edge]), clip(text[edge : edge + 20])
                raise DataError(
                    f"{source}: token {token} lies on both sides of the boundary between {before} and {after}",
                    "trim white space around the assistant's text, or move it from the prompt's end to the completion",
                )
        if not rendered.bare:
            while at < count and ids[at] not in control and text[edges.begin(at) : edges.end(at)].isspace():
                at += 1
            if at == count or ids[at] not in control:
                raise DataError(
                    f"{source}: no end-of-turn token follows the assistant's text, but {clip(text[end:])}",
                    "use a chat template that ends the assistant's turns with a special token of the tokenizer",
                )
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
    """Tokenises the text before each turn, and the text up to the turn's end, by themselves with `encode`: they must
    give the tokens that the whole text has there, or the model is trained after other tokens than it sees when it
    answers."""
    if not edges.in_order:
        raise DataError(
            f"{rendered.source}: the tokenizer's offsets do not follow the text", "use a tokenizer whose offsets do"
        )
    edges_of = [edge for turn in rendered.turns or () for edge in (turn.start, turn.end)]
    texts = [rendered.text[:edge] for edge in edges_of]
    alone = encode(texts) if texts else []
    for number, (edge, found) in enumerate(zip(edges_of, alone, strict=True)):
        first, last = ranges[number // 2]
        if found != (ids[:last][: len(found)] if number % 2 else ids[:first]):
            before, after = clip(rendered.text[max(0, edge - 20) : edge]), clip(rendered.text[edge : edge + 20])
            raise DataError(
                f"{rendered.source}: the text up to the boundary between {before} and {after} has other tokens by "
                "itself than within the whole text",
                "trim white space around the assistant's text, or move it from the prompt's end to the completion",
            )
