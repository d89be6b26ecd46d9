"""An inspection as one HTML page, whatever text is in the data."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from pronghorn.diagnose.examples import Piece, clip, visible
from pronghorn.diagnose.inspect import Inspection, figures, histogram
from pronghorn.train.page import write_page

CLIP_TOKENS = 1500
BINS = 40


def write_report(inspection: Inspection, path: Path) -> Path:
    """Write the page to `path` and return it; ConfigError where no file can be written there."""
    return write_page(
        path,
        Path(__file__).with_name("inspect.html.j2"),
        inspection=inspection,
        headlines=_headlines(inspection),
        figures=figures(inspection),
        bins=histogram(inspection.lengths, BINS),
        examples=[(example, clip(example, CLIP_TOKENS)) for example in inspection.examples],
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
