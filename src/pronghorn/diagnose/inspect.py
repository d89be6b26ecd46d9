"""What a recipe's data becomes before training: documents, labels, lengths, packing. Only the tokenizer is loaded.

A document's tokens are kept as people read them: each with the text that it adds, and nothing in them invisible.
`inspect_report` shows what `inspect` finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from pronghorn.config import Recipe
from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.text import visible as text_visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pronghorn.data.cache import Prepared, Progress
    from pronghorn.data.packed_rows import PackingStats

Split = Literal["train", "eval"]
LOW_TRAINED, HIGH_DROPPED, LOW_PACKING = 0.01, 0.2, 0.5
"""Shares beyond which what is allowed is still worth a warning."""
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
    return Example(document.source, len(document), document.supervised, pieces)


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


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything there is to show. `lengths` are the documents' tokens, ascending."""

    recipe: Recipe
    split: Split
    template: str
    prepared: Prepared
    lengths: list[int]
    trained: int
    packing: PackingStats
    examples: list[Example]

    @property
    def trained_share(self) -> float:
        """Of all tokens."""
        return self.trained / self.packing.tokens

    @property
    def rows(self) -> int:
        """Rows of the sources, the refused ones among them."""
        return sum(count.rows + count.dropped for count in self.prepared.counts)

    @property
    def refused(self) -> int:
        """Rows that can't be trained on (data.bad_rows: drop)."""
        return sum(count.dropped for count in self.prepared.counts)

    @property
    def left_out(self) -> int:
        """Documents dropped after tokenising."""
        return self.prepared.dropped - self.refused

    @property
    def why_left_out(self) -> str:
        """What ends a document after tokenising under this recipe's overflow rule."""
        cuts = self.recipe.data.overflow in ("drop", "truncate")
        return "without a label or too long" if cuts else "without a label"

    @property
    def percentiles(self) -> dict[str, int]:
        """Document lengths in tokens, by nearest rank."""
        ranks = {"min": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}
        return {name: self.lengths[max(math.ceil(q * len(self.lengths)) - 1, 0)] for name, q in ranks.items()}

    @property
    def warnings(self) -> list[str]:
        """What is allowed but looks wrong, with what to do about it."""
        found, share, dropped = [], self.trained_share, self.prepared.dropped / self.rows
        if share < LOW_TRAINED:
            found.append(
                f"Only {share:.2%} of the tokens are trained: see in the examples whether the answers are complete; "
                "shorten what stands before them, or train more of it (data.loss_on)."
            )
        if dropped > HIGH_DROPPED:
            causes = []
            if self.refused:
                causes.append(f"{self.refused:,} refused: mend them, beginning with the first that is named")
            if self.left_out:
                causes.append(f"{self.left_out:,} {self.why_left_out}: see data.overflow and model.max_seq_length")
            found.append(f"{dropped:.0%} of the rows are dropped ({'; '.join(causes)}).")
        packing = self.packing
        if self.recipe.packing.enabled and packing.efficiency < LOW_PACKING:
            found.append(
                f"Packed rows are only {packing.efficiency:.0%} full, and no packing exceeds {packing.ceiling:.0%}: "
                f"choose a model.max_seq_length that suits these lengths (the longest has {self.lengths[-1]:,} tokens, "
                f"all have {packing.tokens:,})."
            )
        return found


def inspect(recipe: Recipe, split: Split = "train", examples: int = 3, progress: Progress | None = None) -> Inspection:
    """Prepare `data.train` or `data.eval` as training does, and keep the first `examples` documents to look at.

    What is tokenised goes to the cache, where training finds it. Raises what training raises before it loads weights:
    ConfigError, DataError, UnsupportedError.
    """
    from pronghorn.data.cache import documents
    from pronghorn.data.packed_rows import PackedRows, lengths_of
    from pronghorn.train.documents import find, tokenizer_for

    tokenizer = tokenizer_for(recipe, find(recipe, weights=False))
    prepared = documents(recipe.data, split, tokenizer, recipe.model.max_seq_length, recipe.train.seed, progress)
    own = "the tokenizer's own" if tokenizer.chat_template else "none"
    shown = prepared.dataset.select(range(min(examples, len(prepared.dataset))))
    return Inspection(
        recipe=recipe,
        split=split,
        template=recipe.data.chat_template or own,
        prepared=prepared,
        lengths=sorted(lengths_of(prepared.dataset)),
        trained=_trained(prepared.dataset),
        packing=PackedRows(prepared.dataset, recipe.model.max_seq_length, recipe.train.seed).stats,
        examples=[example_of(Document(**row), tokenizer) for row in shown],
    )


def _trained(dataset: Any) -> int:
    """Trained tokens of a `datasets.Dataset` of documents, a part in memory at a time."""
    import pyarrow.compute as pc

    tables = dataset.select_columns("labels").with_format("arrow").iter(batch_size=10_000)
    return sum(pc.sum(pc.not_equal(pc.list_flatten(table["labels"]), IGNORE_INDEX)).as_py() for table in tables)


def histogram(lengths: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """(from, to, documents) of at most `most` bins of equal, round width, from 1 token on; `to` is in.

    The last bin reaches to the longest document: where the longest hundredth is far out, it is wider than the others.
    """
    ordered = sorted(lengths)
    longest = ordered[-1]
    reach = min(longest, 2 * ordered[math.ceil(0.99 * len(ordered)) - 1])
    width = round_up(reach / (most if reach == longest else most - 1))
    bins = -(-reach // width)
    counts = [0] * (bins + (longest > bins * width))
    for length in ordered:
        counts[min((length - 1) // width, len(counts) - 1)] += 1
    return [(i * width + 1, max((i + 1) * width, longest if i == bins else 0), n) for i, n in enumerate(counts)]


def round_up(value: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 and so on."""
    scale = 10 ** max(math.ceil(math.log10(max(value, 1))) - 1, 0)
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= value)


def figures(inspection: Inspection) -> list[tuple[str, str]]:
    """(what, how many) of all that is counted, in reading order."""
    prepared, packing = inspection.prepared, inspection.packing
    rows = [("Documents", f"{len(inspection.lengths):,}")]
    optional = {
        "Refused, dropped": inspection.refused,
        f"{inspection.why_left_out.capitalize()}, dropped": inspection.left_out,
        f"Control tokens in a prompt, {inspection.recipe.data.control_tokens}": prepared.control_rows,
        "Truncated": prepared.truncated,
        "Split": prepared.split,
        "Pieces without a label, dropped": prepared.dropped_pieces,
    }
    rows += [(name, f"{count:,}") for name, count in optional.items() if count]
    if not prepared.dropped:
        rows.append(("Dropped", "none"))
    rows += [
        ("Tokens", f"{packing.tokens:,}"),
        ("Trained tokens", f"{inspection.trained:,} ({inspection.trained_share:.1%})"),
        ("Length", ", ".join(f"{name} {length:,}" for name, length in inspection.percentiles.items())),
        (
            "Packed rows" if inspection.recipe.packing.enabled else "Packed (it is off)",
            f"{packing.rows:,} of {packing.row_tokens:,} tokens, {packing.efficiency:.1%} full; "
            f"at most {packing.ceiling:.1%} is possible",
        ),
    ]
    limit = inspection.recipe.data.eval_rows
    if inspection.split == "eval" and limit is not None and limit < packing.rows:
        rows.append(("Evaluated", f"the first {limit:,} packed rows (data.eval_rows)"))
    return rows
