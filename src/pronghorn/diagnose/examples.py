"""A document's tokens as people read them: each with the text that it adds, clipped, and nothing in them invisible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.text import visible as text_visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PER_CHARACTER = 4  # bytes of UTF-8, so the most tokens that spell one character


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that are shown as one: a single token, or the several that spell one character."""

    ids: tuple[int, ...]
    text: str
    trained: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A document to look at."""

    source: str
    tokens: int
    trained: int
    pieces: list[Piece]


def example_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> Example:
    """The document with its tokens' texts."""
    pieces = pieces_of(document.input_ids, document.labels, tokenizer)
    return Example(document.source, len(document), document.labelled, pieces)


def pieces_of(ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """What each token adds to the text; tokens that spell one character together are one piece.

    A piece is decoded behind the one before it: by itself, a SentencePiece token would lose its leading space.
    """
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}

    def decode(first: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[first:end]), clean_up_tokenization_spaces=False))

    pieces: list[Piece] = []
    before = first = 0  # where the last piece begins, and this one
    for end in range(1, len(ids) + 1):
        text = decode(before, end)[len(decode(before, first)) if first else 0 :]
        trained = labels[first] != IGNORE_INDEX
        unfinished = False
        if text.endswith("\ufffd"):  # which the text may hold itself: then each token that comes adds to it
            longer = [decode(before, more) for more in range(end, min(end + _PER_CHARACTER, len(ids) + 1))]
            unfinished = not all(len(b) > len(a) and b.startswith(a) for a, b in pairwise(longer))
        if unfinished and end < len(ids) and (labels[end] != IGNORE_INDEX) == trained and ids[end] not in special:
            continue
        pieces.append(Piece(tuple(ids[first:end]), text, trained, ids[first] in special))
        before, first = first, end
    return pieces


@dataclass(frozen=True, slots=True)
class Clipped:
    """An example's pieces without its middle: `left_out` tokens, of which `left_out_trained` are trained."""

    head: list[Piece]
    tail: list[Piece]
    left_out: int
    left_out_trained: int


def clip(example: Example, tokens: int) -> Clipped:
    """Keep about `tokens` tokens, half from either end; an example that is hardly longer stays whole."""
    if example.tokens <= tokens * 1.1:
        return Clipped(example.pieces, [], 0, 0)
    ends = list(accumulate(len(piece.ids) for piece in example.pieces))
    cut = next(i for i, end in enumerate(ends, 1) if end >= tokens // 2)
    again = next(i for i, end in enumerate(ends, 1) if example.tokens - end <= tokens // 2)
    middle = example.pieces[cut:again]
    trained = sum(len(piece.ids) for piece in middle if piece.trained)
    return Clipped(example.pieces[:cut], example.pieces[again:], sum(len(piece.ids) for piece in middle), trained)


def visible(text: str) -> str:
    """Return the text with a glyph before each line's end and each tab, and unseen characters written out."""
    return text_visible(text).replace("\n", "↵\n").replace("\t", "⇥\t")
