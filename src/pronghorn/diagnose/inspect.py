"""What a recipe's data becomes before training: documents, labels, lengths, packing. Only the tokenizer is loaded.

`inspect_terminal` and `inspect_report` show what `inspect` finds; `examples` makes a document's tokens readable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pronghorn.config import Recipe
from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.diagnose.examples import Example, example_of

if TYPE_CHECKING:
    from pronghorn.data.cache import Prepared, Progress
    from pronghorn.data.packed_rows import PackingStats

Split = Literal["train", "eval"]
LOW_TRAINED, HIGH_DROPPED, LOW_PACKING = 0.01, 0.2, 0.5
"""Shares beyond which what is allowed is still worth a warning."""


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
