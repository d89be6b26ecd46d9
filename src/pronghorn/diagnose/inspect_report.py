"""An inspection as one HTML page, whatever text is in the data."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from pronghorn.diagnose.examples import Piece, clip, visible
from pronghorn.diagnose.inspect import Inspection, figures, histogram, round_up
from pronghorn.train.page import write_page

CLIP_TOKENS = 1500
BINS = 40
_WIDTH, _HEIGHT = 660, 200


def write_report(inspection: Inspection, path: Path) -> Path:
    """Write the page to `path` and return it; ConfigError where no file can be written there."""
    return write_page(
        path,
        Path(__file__).with_name("inspect.html.j2"),
        inspection=inspection,
        headlines=_headlines(inspection),
        figures=figures(inspection),
        chart=_chart(inspection),
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


def _chart(inspection: Inspection) -> dict[str, Any]:
    """The length histogram in the coordinates of an SVG of `width` by `height`, y downwards."""
    bins = histogram(inspection.lengths, BINS)
    most, width = max(count for *_, count in bins), bins[0][1]
    end = len(bins) * width  # a wider last bin is drawn as wide as the others
    bars = [
        {
            "x": _WIDTH * i * width / end,
            "width": max(_WIDTH * width / end - 1, 0.5),
            "height": max(_HEIGHT * count / most, 1.5) if count else 0,
            "title": f"{first:,} to {last:,} tokens: {count:,} documents",
        }
        for i, (first, last, count) in enumerate(bins)
    ]
    step = round_up(end / 6)
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "bars": bars,
        "ticks": [(_WIDTH * tokens / end, f"{tokens:,}") for tokens in range(0, end + 1, step)],
        "most": f"{most:,}",
        "rest": f"the last: all from {bins[-1][0]:,} to {bins[-1][1]:,} tokens" if bins[-1][1] != end else None,
    }
