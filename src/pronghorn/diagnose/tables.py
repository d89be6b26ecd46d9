"""Tables that the terminal and the HTML pages of `pronghorn profile` and `data inspect` both show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import table as rich_table
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """Cells as text: a first column, columns of numbers, and perhaps a last column of text."""

    first: str
    numbers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    last: str | None = None

    def render(self, most: int | None = None) -> rich_table.Table:
        """Return the first `most` rows (None: all) for a terminal. Cells are shown as they are, without markup."""
        table = plain_table()
        table.add_column(self.first, overflow="fold", max_width=60)
        for name in self.numbers:
            table.add_column(name, justify="right", no_wrap=True)
        if self.last is not None:
            table.add_column(self.last, no_wrap=True)
        for row in self.rows[:most]:
            table.add_row(*map(Text, row))
        return table


def plain_table() -> rich_table.Table:
    """Return a table without lines or columns."""
    return rich_table.Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
