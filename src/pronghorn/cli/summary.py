"""The table a finished run ends with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from pronghorn.train.record import RunRecord


def summary(record: RunRecord, output: Path) -> Table:
    """The report's headlines, the paths taken, answers, and where the run's files are."""
    from pronghorn.train.report import FILE_NAME, headlines

    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, figure, note in headlines(record):
        table.add_row(label, f"{escape(figure)} [dim]({escape(note)})[/]")
    for path in record.paths:
        line = f"{path['part']}: {path['path']}"
        table.add_row("Path taken", escape(line) + f" [dim]({escape(path['why'])})[/]")
    for sample in record.samples:
        table.add_row("Asked", escape(sample["prompt"]))
        table.add_row("  before", escape(sample["before"]))
        table.add_row("  after", escape(sample["after"]))
    table.add_row("Output", escape(str(output)))
    if (output / FILE_NAME).is_file():
        table.add_row("Report", escape(str(output / FILE_NAME)))
    return table
