"""Declare the arguments that several benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Results = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the results as JSON, too.", dir_okay=False)
]
Commit = Annotated[str, typer.Option(help="Of this source, for the results.")]


def names(text: str) -> tuple[str, ...]:
    """Split names between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
