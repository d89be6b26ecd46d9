"""Characters to tokens: which tokens are the text of an assistant's turn, by the tokenizer's offsets, and the proof."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pronghorn.data.template import clip
from pronghorn.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row's text. `turns` are the character ranges [start, end) to train (None: all of it), each without the
    end-of-turn token that the template writes. `bare` text has no template: it needs bos and eos around it."""

    text: str
    turns: list[tuple[int, int]] | None
    bare: bool
    source: str


def token_ranges(
    rendered: Rendered, ids: list[int], offsets: list[tuple[int, int]], control: frozenset[int]
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
                token = clip(text[begins[at] : ends[at]])
                raise DataError(f"{source}: the assistant's text holds the control token {token}", "delete it there")
            at += 1
        for edge, token_at in ((start, first), (end, at)):
            if token_at < count and begins[token_at] < edge < ends[token_at]:
                token = clip(text[begins[token_at] : ends[token_at]])
                before, after = clip(text[max(0, edge - 20) : edge]), clip(text[edge : edge + 20])
                raise DataError(
                    f"{source}: token {token} lies on both sides of the boundary between {before} and {after}",
                    "trim white space around the assistant's text, or move it from the prompt's end to the completion",
                )
        if not rendered.bare:
            while at < count and ids[at] not in control and text[begins[at] : ends[at]].isspace():
                at += 1
            if at == count or ids[at] not in control:
                raise DataError(
                    f"{source}: no end-of-turn token follows the assistant's text, but {clip(text[end:])}",
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


def verify(
    rendered: Rendered, ids: list[int], ranges: list[tuple[int, int]], tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Tokenises the text before each turn, and the text up to the turn's end, by themselves: they must give the tokens
    that the whole text has there, or the model is trained after other tokens than it sees when it answers."""
    for (start, end), (first, last) in zip(rendered.turns or (), ranges, strict=True):
        for edge, prefix in ((start, ids[:first]), (end, ids[:last])):
            alone = tokenizer(rendered.text[:edge], add_special_tokens=False, verbose=False)["input_ids"]
            if alone != (prefix if edge == start else prefix[: len(alone)]):
                before, after = clip(rendered.text[max(0, edge - 20) : edge]), clip(rendered.text[edge : edge + 20])
                raise DataError(
                    f"{rendered.source}: the text up to the boundary between {before} and {after} has other tokens by "
                    "itself than within the whole text",
                    "trim white space around the assistant's text, or move it from the prompt's end to the completion",
                )
