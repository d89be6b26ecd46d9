"""Show what a recipe's data become before training: documents, labels, lengths, packing. Only the tokenizer is loaded.

A document's tokens are kept as people read them: each with the text that it adds, and nothing in them invisible. The
terminal has colours where there are some, and ⟦ ⟧ around supervised tokens where there are none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.bar import Bar
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from pronghorn.config.recipe import Recipe
from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.diagnose.tables import Table
from pronghorn.records.page import write_page
from pronghorn.text import counted, does
from pronghorn.text import visible as text_visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pronghorn.data.cache import Prepared, Progress
    from pronghorn.data.overflow import Fitted, Overflow
    from pronghorn.data.packed_rows import PackingStats
    from pronghorn.data.repeats import Repeats

Split = Literal["train", "eval"]
LOW_SUPERVISED, HIGH_DROPPED, LOW_PACKING = 0.01, 0.01, 0.5
"""Shares beyond which what is allowed is still worth a warning."""
PAGE_TOKENS, PAGE_BINS = 1500, 40
TERMINAL_TOKENS, TERMINAL_BINS = 400, 16
_PER_CHARACTER = 4  # bytes of UTF-8, so the most tokens that spell one character
_SUPERVISED, _SPECIAL, _REST = "bold white on dark_green", "cyan", "dim"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that are shown as one: a single token, or the several that spell one character."""

    ids: tuple[int, ...]
    text: str
    supervised: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A document to look at, and what its tokens add to the text."""

    document: Document
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Clipped:
    """An example's pieces without its middle: `left_out` tokens, of which `left_out_supervised` are supervised."""

    head: list[Piece]
    tail: list[Piece]
    left_out: int
    left_out_supervised: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Hold everything there is to show. `lengths` are the documents' tokens, ascending, and `long` those of documents
    that are too long; `outcomes` is what each overflow rule would do with these. Where the rule is `error`, `lengths`
    are whole documents' and the rest shows `split`."""

    recipe: Recipe
    split: Split
    template: str
    prepared: Prepared
    lengths: list[int]
    supervised: int
    packing: PackingStats
    examples: list[Example]
    repeats: Repeats
    outcomes: dict[Overflow, Fitted]
    long: list[int]

    @property
    def supervised_share(self) -> float:
        """Return the share of all tokens that is supervised."""
        return self.supervised / self.packing.tokens

    @property
    def refused(self) -> int:
        """Count the rows that can't be trained on (data.bad_rows: drop)."""
        return sum(count.dropped for count in self.prepared.counts)

    @property
    def left_out(self) -> int:
        """Count the documents dropped after tokenising."""
        return self.prepared.dropped - self.refused

    @property
    def why_left_out(self) -> str:
        """Say what drops a document after tokenising under this recipe's overflow rule."""
        cuts = self.recipe.data.overflow in ("drop", "truncate")
        return "without a label or too long" if cuts else "without a label"

    @property
    def percentiles(self) -> dict[str, int]:
        """Return document lengths in tokens, by nearest rank."""
        ranks = {"min": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}
        return {name: self.lengths[max(math.ceil(q * len(self.lengths)) - 1, 0)] for name, q in ranks.items()}

    @property
    def warnings(self) -> list[str]:
        """List what is allowed but looks wrong, with what to do about it."""
        warnings, dropped, packing = [], self.prepared.dropped_share, self.packing
        if self.outcomes and self.recipe.data.overflow == "error":
            share = len(self.long) / len(self.lengths)
            warnings.append(
                f"{counted(len(self.long), 'document')} ({share:.1%}) {does(len(self.long), 'are')} longer than "
                f"model.max_seq_length {packing.row_tokens:,}: training stops there. Raise it, or set data.overflow to "
                "drop, truncate or split; what is shown here is split."
            )
        if self.prepared.cut_share > HIGH_DROPPED:
            warnings.append(f"{self.prepared.cut_share:.1%} of the documents lose their end (data.overflow: truncate).")
        if self.supervised_share < LOW_SUPERVISED:
            warnings.append(
                f"Only {self.supervised_share:.2%} of the tokens are supervised: see in the examples whether the "
                "answers are complete; shorten what stands before them, or supervise more of it (data.loss_on)."
            )
        if dropped > HIGH_DROPPED:
            causes = []
            if self.refused:
                causes.append(f"{self.refused:,} refused: fix them, beginning with the first that is named")
            if self.left_out:
                causes.append(f"{self.left_out:,} {self.why_left_out}: see data.overflow and model.max_seq_length")
            warnings.append(f"{dropped:.1%} of the rows are dropped ({'; '.join(causes)}).")
        warnings += self.repeats.warnings
        if self.recipe.packing.enabled and packing.efficiency < LOW_PACKING:
            warnings.append(
                f"Packed rows are only {packing.efficiency:.0%} full, and no packing exceeds {packing.ceiling:.0%}: "
                f"choose a model.max_seq_length that suits these lengths (the longest has {self.lengths[-1]:,} tokens, "
                f"all have {packing.tokens:,})."
            )
        return warnings


def inspect(recipe: Recipe, split: Split = "train", examples: int = 3, progress: Progress | None = None) -> Inspection:
    """Prepare `data.train` or `data.eval` as training does, and keep the first `examples` documents to look at.

    What is tokenised goes to the cache, where training finds it. Raises what training raises before it loads weights:
    ConfigError, DataError, UnsupportedError.
    """
    import pyarrow.compute as pc

    from pronghorn.data.cache import documents
    from pronghorn.data.overflow import outcomes
    from pronghorn.data.packed_rows import PackedRows, lengths_of
    from pronghorn.data.repeats import Repeats
    from pronghorn.train.documents import find, tokenizer_for

    tokenizer = tokenizer_for(recipe, find(recipe, weights=False))
    tokens, seed = recipe.model.max_seq_length, recipe.data_seed
    shown: Overflow = "split" if recipe.data.overflow == "error" and tokens > 1 else recipe.data.overflow
    prepared = documents(recipe.data, split, tokenizer, tokens, seed, progress, overflow=shown)
    dataset, whole = prepared.dataset, sorted(lengths_of(prepared.whole))
    first = (Document(**row) for row in dataset.select(range(min(examples, len(dataset)))))
    labels = dataset.select_columns("labels").with_format("arrow").iter(batch_size=10_000)  # a part in memory at a time
    return Inspection(
        recipe=recipe,
        split=split,
        template=recipe.data.chat_template or ("the tokenizer's own" if tokenizer.chat_template else "none"),
        prepared=prepared,
        lengths=whole if shown != recipe.data.overflow else sorted(lengths_of(dataset)),
        supervised=sum(pc.sum(pc.not_equal(pc.list_flatten(t["labels"]), IGNORE_INDEX)).as_py() for t in labels),
        packing=PackedRows(dataset, tokens, seed).stats,
        examples=[Example(each, pieces_of(each.input_ids, each.labels, tokenizer)) for each in first],
        repeats=Repeats.of(prepared.whole),
        outcomes=outcomes(prepared.whole, tokens),
        long=[length for length in whole if length > tokens],
    )


def pieces_of(ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Return what each token adds to the text; tokens that spell one character together are one piece.

    A piece is decoded behind the one before it: by itself, a SentencePiece token would lose its leading space.
    """
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}

    def decode(first: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[first:end]), clean_up_tokenization_spaces=False))

    pieces: list[Piece] = []
    before = first = 0  # where the last piece begins, and this one
    for end in range(1, len(ids) + 1):
        text = decode(before, end)[len(decode(before, first)) if first else 0 :]
        supervised = labels[first] != IGNORE_INDEX
        unfinished = False
        if text.endswith("\ufffd"):  # which the text may hold itself: then each token that comes adds to it
            longer = [decode(before, more) for more in range(end, min(end + _PER_CHARACTER, len(ids) + 1))]
            unfinished = not all(len(b) > len(a) and b.startswith(a) for a, b in pairwise(longer))
        if unfinished and end < len(ids) and (labels[end] != IGNORE_INDEX) == supervised and ids[end] not in special:
            continue
        pieces.append(Piece(tuple(ids[first:end]), text, supervised, ids[first] in special))
        before, first = first, end
    return pieces


def clip(example: Example, tokens: int) -> Clipped:
    """Keep about `tokens` tokens, half from either end; an example that is hardly longer stays whole."""
    length = len(example.document)
    if length <= tokens * 1.1:
        return Clipped(example.pieces, [], 0, 0)
    ends = list(accumulate(len(piece.ids) for piece in example.pieces))
    cut = next(i for i, end in enumerate(ends, 1) if end >= tokens // 2)
    again = next(i for i, end in enumerate(ends, 1) if length - end <= tokens // 2)
    supervised = sum(len(piece.ids) for piece in example.pieces[cut:again] if piece.supervised)
    return Clipped(example.pieces[:cut], example.pieces[again:], ends[again - 1] - ends[cut - 1], supervised)


def visible(text: str) -> str:
    """Return the text with a glyph before each line's end and each tab, and unseen characters written out."""
    return text_visible(text).replace("\n", "↵\n").replace("\t", "⇥\t")


def histogram(lengths: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """Return (from, to, documents) of at most `most` bins of equal, round width, from the shortest document's bin on.

    `to` is in the bin. The last bin reaches to the longest document: where the longest hundredth is far out, it is
    wider than the others.
    """
    ordered = sorted(lengths)
    shortest, longest = ordered[0], ordered[-1]
    reach = min(longest, 2 * ordered[math.ceil(0.99 * len(ordered)) - 1])
    width = 1
    while -(-reach // width) - (shortest - 1) // width + (longest > reach) > most:
        width = _round_up(width + 1)
    low, end = (shortest - 1) // width, -(-reach // width)
    counts = [0] * (end - low + (longest > end * width))
    for length in ordered:
        counts[min((length - 1) // width - low, len(counts) - 1)] += 1
    bins = [((low + i) * width + 1, (low + i + 1) * width, n) for i, n in enumerate(counts)]
    first, to, last = bins[-1]
    return [*bins[:-1], (first, max(to, longest), last)]


def _round_up(value: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50 and so on."""
    scale = 10 ** max(math.ceil(math.log10(max(value, 1))) - 1, 0)
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= value)


def figures(inspection: Inspection) -> list[tuple[str, str]]:
    """List (what, how many) of all that is counted, in reading order."""
    prepared, packing, recipe = inspection.prepared, inspection.packing, inspection.recipe
    dropped = {
        "Refused, dropped": inspection.refused,
        f"{inspection.why_left_out.capitalize()}, dropped": inspection.left_out,
        f"Control tokens in a prompt, {recipe.data.control_tokens}": prepared.control_rows,
        "Truncated": prepared.fitted.truncated,
        "Split": prepared.fitted.split,
        "Pieces without a label, dropped": prepared.fitted.dropped_pieces,
    }
    rows = [("Documents", f"{len(inspection.lengths):,}")]
    rows += [(name, f"{count:,}") for name, count in dropped.items() if count]
    rows += [] if prepared.dropped else [("Dropped", "none")]
    rows += [("Repeated", f"{inspection.repeats.repeated:,}")] if inspection.repeats.repeated else []
    rows += [
        ("Tokens", f"{packing.tokens:,}"),
        ("Supervised tokens", f"{inspection.supervised:,} ({inspection.supervised_share:.1%})"),
        ("Length", ", ".join(f"{name} {length:,}" for name, length in inspection.percentiles.items())),
        (
            "Packed rows" if recipe.packing.enabled else "Packed (it is off)",
            f"{packing.rows:,} of {packing.row_tokens:,} tokens, {packing.efficiency:.1%} full; "
            f"at most {packing.ceiling:.1%} is possible",
        ),
    ]
    if inspection.long:
        share = len(inspection.long) / len(prepared.whole)
        rows.append(
            ("Too long", f"{len(inspection.long):,} ({share:.1%}); the longest has {inspection.long[-1]:,} tokens")
        )
    for rule, fitted in inspection.outcomes.items():
        rows.append((f"With overflow: {rule}", outcome(rule, fitted)))
    limit = recipe.data.eval_rows
    if inspection.split == "eval" and limit is not None and limit < packing.rows:
        rows.append(("Evaluated", f"the first {limit:,} packed rows (data.eval_rows)"))
    return rows


def outcome(rule: str, fitted: Fitted) -> str:
    """Say what an overflow rule does with the documents that are too long."""
    if rule == "split":
        gone = f", {fitted.dropped_pieces:,} without a label dropped" if fitted.dropped_pieces else ""
        return f"{counted(fitted.split, 'document', 'become')} {counted(fitted.documents, 'piece')}{gone}"
    end = "its end" if fitted.truncated == 1 else "their end"
    cut = f"{counted(fitted.truncated, 'document', 'lose')} {end}, " if rule == "truncate" else ""
    return f"{cut}{fitted.dropped:,} dropped"


def _sources(inspection: Inspection) -> Table:
    counts = [
        (visible(c.path), f"{c.rows + c.dropped:,}", f"{c.dropped:,}", f"{c.used:,}", c.format)
        for c in inspection.prepared.counts
    ]
    return Table("Source", ("Rows", "Dropped", "Used"), counts, "Format")


def show(inspection: Inspection, console: Console) -> None:
    """Print sources, examples, figures and, last, what looks wrong."""
    data, errors = inspection.recipe.data, inspection.prepared.errors
    console.print(Text(f"data.{inspection.split} of {inspection.recipe.model.name}", style="bold"))
    console.print(Text(f"loss on {data.loss_on}, chat template: {inspection.template}, overflow: {data.overflow}\n"))
    console.print(_sources(inspection).render())
    if errors:
        console.print(Text(f"The first dropped row: {visible(errors[0])}", style="yellow"))
    console.print()
    colours = console.color_system is not None and not console.no_color
    for number, example in enumerate(inspection.examples, 1):
        console.rule(Text(f"Example {number}: {visible(example.document.source)}"), align="left", style="dim")
        shown = clip(example, TERMINAL_TOKENS)
        text = _marked(shown.head, colours)
        if shown.left_out:
            left_out = f"{counted(shown.left_out, 'token')} left out, {shown.left_out_supervised:,} of them supervised"
            text.append(f"\n… {left_out} …\n", "italic").append_text(_marked(shown.tail, colours))
        console.print(text)
        count = f"{counted(len(example.document), 'token')}, {example.document.supervised:,} of them supervised\n"
        console.print(Text(count, style="italic"), highlight=False)
    if inspection.examples:
        marks = Text("supervised", _SUPERVISED) if colours else Text("⟦supervised⟧")
        console.print(Text("In the examples: ").append_text(marks).append("; ↵ and ⇥ are line ends and tabs.\n"))
    grid = Grid.grid(padding=(0, 3, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    for name, figure in figures(inspection):
        grid.add_row(name, figure)
    console.print(grid)
    console.print(Text("\nTokens of a document", style="bold"))
    bins = histogram(inspection.lengths, TERMINAL_BINS)
    most = max(count for *_, count in bins)
    bars = Grid.grid(padding=(0, 2, 0, 0))
    bars.add_column(justify="right", no_wrap=True)
    for first, last, documents in bins:
        bars.add_row(f"{first:,}–{last:,}", Bar(most, 0, documents, width=60, color="green"), f"{documents:,}")
    console.print(bars, highlight=False)
    console.print(Text(f"model.max_seq_length is {inspection.packing.row_tokens:,}", style="dim"))
    for warning in inspection.warnings:
        console.print(Text(f"\nwarning: {warning}", style="bold yellow"))


def _marked(pieces: list[Piece], colours: bool) -> Text:
    text = Text(overflow="fold")
    for supervised, run in _runs(pieces):
        if not colours:
            joined = visible("".join(piece.text for piece in run))
            text.append(f"⟦{joined}⟧" if supervised else joined)
            continue
        for piece in run:
            style = _SUPERVISED if supervised else _SPECIAL if piece.special else _REST
            text.append(visible(piece.text), f"{style} underline" if supervised and piece.special else style)
    return text


def _runs(pieces: list[Piece]) -> list[tuple[bool, list[Piece]]]:
    """Group neighbours that are supervised, or not."""
    return [(supervised, list(run)) for supervised, run in groupby(pieces, lambda piece: piece.supervised)]


def write_report(inspection: Inspection, path: Path) -> Path:
    """Write the page to `path` and return it; ConfigError where no file can be written there."""
    packing, lengths = inspection.packing, inspection.percentiles
    dropped, share = inspection.prepared.dropped, inspection.supervised_share
    packed = "Packing" if inspection.recipe.packing.enabled else "Packing (off)"
    return write_page(
        path,
        Path(__file__).with_name("inspect.html.j2"),
        inspection=inspection,
        sources=_sources(inspection),
        headlines=[
            ("Documents", f"{len(inspection.lengths):,}", f"{dropped:,} of {inspection.prepared.rows:,} rows dropped"),
            ("Supervised tokens", f"{share:.1%}", f"{inspection.supervised:,} of {packing.tokens:,}"),
            ("Median length", f"{lengths['median']:,} tokens", f"99 % have at most {lengths['99 %']:,}"),
            (packed, f"{packing.efficiency:.1%}", f"{counted(packing.rows, 'row')} of {packing.row_tokens:,} tokens"),
        ],
        figures=figures(inspection),
        bins=histogram(inspection.lengths, PAGE_BINS),
        examples=[(example, clip(example, PAGE_TOKENS)) for example in inspection.examples],
        runs=_runs,
        visible=visible,
    )
