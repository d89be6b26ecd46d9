"""Show an inspection, whatever text is in the data: in the terminal and as one HTML page.

The terminal has colours where there are some, and ⟦ ⟧ around what is trained where there are none.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pronghorn.diagnose.inspect import Example, Inspection, Piece, clip, figures, histogram, visible
from pronghorn.train.page import write_page

PAGE_TOKENS = 1500
PAGE_BINS = 40
SHOWN_TOKENS = 400
SHOWN_BINS = 16
_TRAINED, _SPECIAL, _REST = "bold white on dark_green", "cyan", "dim"


def show(inspection: Inspection, console: Console) -> None:
    """Print sources, examples, figures and, last, what looks wrong."""
    recipe, errors = inspection.recipe, inspection.prepared.errors
    console.print(Text(f"data.{inspection.split} of {recipe.model.name}", style="bold"))
    console.print(
        Text(f"loss on {recipe.data.loss_on}, chat template: {inspection.template}, overflow: {recipe.data.overflow}\n")
    )
    console.print(_sources(inspection))
    if errors:
        console.print(Text(f"The first dropped row: {visible(errors[0])}", style="yellow"))
    console.print()
    colours = console.color_system is not None and not console.no_color
    for number, example in enumerate(inspection.examples, 1):
        console.rule(Text(f"Example {number}: {visible(example.source)}"), align="left", style="dim")
        console.print(_tokens(example, colours))
        console.print(
            Text(f"{example.tokens:,} tokens, {example.trained:,} of them trained\n", style="italic"), highlight=False
        )
    if inspection.examples:
        marks = Text("trained", _TRAINED) if colours else Text("⟦trained⟧")
        console.print(Text("In the examples: ").append_text(marks).append("; ↵ and ⇥ are line ends and tabs.\n"))
    console.print(_figures(inspection))
    console.print()
    console.print(Text("Tokens of a document", style="bold"))
    console.print(_bars(inspection), highlight=False)
    console.print(Text(f"model.max_seq_length is {inspection.packing.row_tokens:,}", style="dim"))
    for warning in inspection.warnings:
        console.print(Text(f"\nwarning: {warning}", style="bold yellow"))


def _sources(inspection: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("Source", overflow="fold")
    table.add_column("Format", no_wrap=True)
    for name in ("Rows", "Dropped", "Used"):
        table.add_column(name, justify="right", no_wrap=True)
    for count in inspection.prepared.counts:
        figures = (f"{n:,}" for n in (count.rows + count.dropped, count.dropped, count.used))
        table.add_row(Text(visible(count.path)), count.format, *figures)
    return table


def _figures(inspection: Inspection) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, figure in figures(inspection):
        table.add_row(name, figure)
    return table


def _tokens(example: Example, colours: bool) -> Text:
    shown = clip(example, SHOWN_TOKENS)
    text = _pieces(shown.head, colours)
    if shown.left_out:
        text.append(f"\n… {shown.left_out:,} tokens left out, {shown.left_out_trained:,} of them trained …\n", "italic")
        text.append_text(_pieces(shown.tail, colours))
    return text


def _pieces(pieces: list[Piece], colours: bool) -> Text:
    text = Text(overflow="fold")
    for trained, run in groupby(pieces, lambda piece: piece.trained):
        if not colours:
            said = visible("".join(piece.text for piece in run))
            text.append(f"⟦{said}⟧" if trained else said)
            continue
        for piece in run:
            style = _TRAINED if trained else _SPECIAL if piece.special else _REST
            text.append(visible(piece.text), f"{style} underline" if trained and piece.special else style)
    return text


def _bars(inspection: Inspection) -> Table:
    """A line a bin."""
    bins = histogram(inspection.lengths, SHOWN_BINS)
    most = max(count for *_, count in bins)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    for first, last, count in bins:
        table.add_row(f"{first:,}–{last:,}", Bar(most, 0, count, width=60, color="green"), f"{count:,}")
    return table


def write_report(inspection: Inspection, path: Path) -> Path:
    """Write the page to `path` and return it; ConfigError where no file can be written there."""
    return write_page(
        path,
        Path(__file__).with_name("inspect.html.j2"),
        inspection=inspection,
        headlines=_headlines(inspection),
        figures=figures(inspection),
        bins=histogram(inspection.lengths, PAGE_BINS),
        examples=[(example, clip(example, PAGE_TOKENS)) for example in inspection.examples],
        runs=_runs,
        visible=visible,
    )


def _headlines(inspection: Inspection) -> list[tuple[str, str, str]]:
    """(label, figure, note) of each card."""
    packing, lengths = inspection.packing, inspection.percentiles
    dropped = inspection.prepared.dropped
    return [
        ("Documents", f"{len(inspection.lengths):,}", f"{dropped:,} of {inspection.rows:,} rows dropped"),
        (
            "Trained tokens",
            f"{inspection.trained_share:.1%}",
            f"{inspection.trained:,} of {packing.tokens:,}",
        ),
        ("Median length", f"{lengths['median']:,} tokens", f"99 % have at most {lengths['99 %']:,}"),
        (
            "Packing" if inspection.recipe.packing.enabled else "Packing (off)",
            f"{packing.efficiency:.1%}",
            f"{packing.rows:,} rows of {packing.row_tokens:,} tokens",
        ),
    ]


def _runs(pieces: list[Piece]) -> list[tuple[bool, list[Piece]]]:
    """Neighbours that are trained, or not, together."""
    return [(trained, list(run)) for trained, run in groupby(pieces, lambda piece: piece.trained)]
