"""A profile as one HTML page."""

from __future__ import annotations

from pathlib import Path

from pronghorn.diagnose.profile_causes import Cause
from pronghorn.diagnose.profile_record import PHASES, Profile
from pronghorn.diagnose.profile_terminal import differences, headlines
from pronghorn.train.page import write_page

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
        end=max((end for shapes in profile.timeline.values() for _, end, _ in shapes), default=1.0),
        phases=PHASES,
    )
