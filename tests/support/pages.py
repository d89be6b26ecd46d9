"""Tables of the documentation that tests make: how a page's part is read, and written anew."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, the header's first, the rule left out."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in (lines[0], *lines[2:])]


def as_table(rows: list[list[str]]) -> str:
    """Write rows, the header's first, as a table."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def with_section(text: str, heading: str, body: str) -> str:
    """Return a page with what is below a heading replaced."""
    pattern = re.compile(rf"(## {re.escape(heading)}\n).*?(?=\n## |\Z)", re.DOTALL)
    assert pattern.search(text), heading
    return pattern.sub(lambda match: f"{match[1]}\n{body.strip()}\n", text)
