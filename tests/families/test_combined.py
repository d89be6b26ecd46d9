"""Families, methods, bases, computes, policies and strategies together: each cell of docs/families.md is tried here.

`python tests/families/test_combined.py` writes the page's table anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

from support.combined import GROUPS, Cell, cells, outcome
from support.pages import DOCS, as_table, table_rows, with_section

PAGE = DOCS / "families.md"
HEADING = "What goes together"
COLUMNS = ["method, base, compute", "activations", "on", *GROUPS]


def committed() -> dict[Cell, str]:
    """Return what the page says of each cell, with the note's text."""
    text = PAGE.read_text()
    notes = dict(re.findall(r"^- \((\w)\) `(.*)`$", text.split(f"## {HEADING}")[1], re.MULTILINE))
    return {
        Cell(*row[:3], group): re.sub(r" \((\w)\)$", lambda match: f": {notes[match[1]]}", cell)
        for row in table_rows(text, HEADING)[1:]
        for group, cell in zip(GROUPS, row[3:], strict=True)
    }


SAID = committed()


def test_the_table_has_every_cell() -> None:
    assert SAID.keys() == set(cells())


@pytest.mark.matrix(6)
@pytest.mark.parametrize("cell", list(SAID), ids=lambda cell: ", ".join(cell))
def test_a_cell_is_true(cell: Cell) -> None:
    assert outcome(cell) == SAID[cell]


if __name__ == "__main__":
    said = {cell: outcome(cell) for cell in cells()}
    reasons = sorted({text.partition(": ")[2] for text in said.values()} - {""})
    letters = {reason: "abcdefghijklmnop"[index] for index, reason in enumerate(reasons)}
    rows: dict[tuple[str, ...], list[str]] = {}
    for cell, text in said.items():
        word, _, reason = text.partition(": ")
        rows.setdefault(cell[:3], [*cell[:3]]).append(f"{word} ({letters[reason]})" if reason else word)
    notes = "\n".join(f"- ({letter}) `{reason}`" for reason, letter in letters.items())
    body = f"{as_table([COLUMNS, *rows.values()])}\n\n{notes}"
    PAGE.write_text(with_section(PAGE.read_text(), HEADING, body))
