"""The table a finished run ends with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from pronghorn.train.record import RunRecord


def summary(record: RunRecord, output: Path) -> Table:
    """The figures of a run that most want to know, where its files are, and which paths it took."""
    from pronghorn.train.progress import duration

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    before, after = record.heldout["before"], record.heldout["after"]
    if before is not None and after is not None:
        colour = "green" if after < before else "yellow"
        table.add_row("Held-out loss", f"{before:.4f} → [{colour}]{after:.4f}[/] ({after - before:+.4f})")
    elif record.steps:
        table.add_row("Training loss", f"{record.steps[0]['loss']:.4f} → {record.steps[-1]['loss']:.4f}")
    if record.tokens_per_second is not None:
        table.add_row("Speed", f"{record.tokens_per_second:,.0f} tokens/s (median over steps)")
    packing = record.packing
    table.add_row("Packing", f"{packing['efficiency']:.1%} full; at most {packing['ceiling']:.1%} is possible")
    if record.peak_memory_bytes is not None:
        table.add_row("Peak memory", f"{record.peak_memory_bytes / 2**30:.1f} GiB")
    if record.out_of_memory:
        steps = ", ".join(str(event["step"]) for event in record.out_of_memory)
        now = escape(record.out_of_memory[-1]["plan"])
        table.add_row("Out of memory", f"[yellow]survived at step {steps}[/]; layers from then on: {now}")
    table.add_row("Time", f"{duration(record.seconds)}, limited by {record.stopped}")
    for path in record.paths:
        line = f"{path['part']}: {path['path']}"
        table.add_row("Path taken", escape(line) + f" [dim]({escape(path['why'])})[/]")
    for sample in record.samples:
        table.add_row("Asked", escape(sample["prompt"]))
        table.add_row("  before", escape(sample["before"]))
        table.add_row("  after", escape(sample["after"]))
    table.add_row("Output", escape(str(output)))
    report = output / "report.html"
    if report.is_file():
        table.add_row("Report", escape(str(report)))
    return table
