"""A profile as one HTML page."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from pronghorn.diagnose.inspect import round_up
from pronghorn.diagnose.profile_causes import Cause
from pronghorn.diagnose.profile_record import PHASES, Profile, Shape
from pronghorn.diagnose.profile_terminal import differences, headlines
from pronghorn.train.page import write_page

_WIDTH, _LANE = 1040, 34
_COLOURS = [
    "#3b6fd4", "#8257d0", "#1f9e8f", "#4aa84e", "#9db23a", "#d9a521", "#e07b30", "#a9714b", "#d65f8f", "#a83e77",
    "#5c7a99", "#d43f3f", "#c98a8a", "#8f97a6", "#eaa3a3", "#c9cfda", "#b9bfca", "#5b5f66",
]  # fmt: skip
"""Of each `Cause`, in their order."""


def write_report(profile: Profile, path: Path, other: Profile | None = None) -> Path:
    """Write the page to `path` and return it; ConfigError where no file can be written there."""
    return write_page(
        path,
        Path(__file__).with_name("profile.html.j2"),
        profile=profile,
        other=other,
        differences=differences(profile, other) if other is not None else [],
        headlines=headlines(profile),
        colours={str(cause): (f"c{i}", _COLOURS[i]) for i, cause in enumerate(Cause)},
        rows=sorted(profile.rows, key=lambda row: -row.ms),
        timeline=_timeline(profile),
    )


def _timeline(profile: Profile) -> dict[str, Any]:
    """The last step's lanes in the coordinates of an SVG: one path a lane and cause, phases by name."""
    end = max((shape[1] for shapes in profile.timeline.values() for shape in shapes), default=0.0) or 1.0
    scale = _WIDTH / end
    lanes: list[dict[str, Any]] = []
    for name, shapes in profile.timeline.items():
        y = _LANE * len(lanes)
        if name == PHASES:
            phases = [(what, a * scale, (b - a) * scale) for a, b, what in shapes]
            lanes.append({"name": name, "y": y, "phases": phases, "paths": []})
        else:
            lanes.append({"name": name, "y": y, "phases": [], "paths": _paths(shapes, y, scale)})
    tick = round_up(end / 8 * 1000) / 1000  # about eight, at round microseconds
    ticks = [(i * tick * scale, f"{i * tick:g}") for i in range(int(end / tick) + 1)]
    return {"width": _WIDTH, "lane": _LANE, "height": _LANE * len(lanes), "lanes": lanes, "ticks": ticks}


def _paths(shapes: list[Shape], y: float, scale: float) -> list[tuple[str, str]]:
    """(cause, path data)."""
    parts: dict[str, list[str]] = defaultdict(list)
    for begin, until, cause in shapes:
        width = max((until - begin) * scale, 0.3)
        parts[cause].append(f"M{begin * scale:.2f} {y + 14}h{width:.2f}v16h-{width:.2f}z")
    return [(cause, "".join(drawn)) for cause, drawn in parts.items()]
