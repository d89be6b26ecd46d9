"""Where the host waits for the device: each synchronisation with its place in the Python source."""

from __future__ import annotations

import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pronghorn.diagnose.profile_causes import ENGINE, PREFIX, Span, spans
from pronghorn.diagnose.profile_record import Sync
from pronghorn.diagnose.profile_times import synchronisations

_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
_PASSING = ("/torch/", "/accelerate/utils/", "/contextlib.py")
"""Libraries whose frames only pass a call on."""


@dataclass(frozen=True)
class Place:
    """A line of Python."""

    file: str
    line: int
    function: str

    @property
    def passing(self) -> bool:
        return self.file.startswith("<") or any(part in f"/{self.file}" for part in _PASSING)


@contextmanager
def noticed() -> Iterator[list[Place]]:
    """The lines at which the host waited for the device, as torch's sync debug mode notices them.

    It doesn't notice all (an event's `synchronize`, what backward threads do), but knows the very line.
    """
    places: list[Place] = []

    def notice(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            frames = [Place(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_stack()[:-1])]
            places.extend([frame for frame in frames if not frame.passing and frame.file != warnings.__file__][:1])

    earlier = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = notice
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(earlier)


def find_sites(trace: list[dict[str, Any]], places: list[Place]) -> list[Sync]:
    """The synchronisations of a step recorded with Python's stack, those that took longest first.

    Args:
        places: what `noticed` found in the step; the stack knows only where a function begins.
    """
    step = next(event for event in trace if event.get("name") == f"{PREFIX}step")
    # Ranges that one hook opens and another closes lie across Python's frames: without them all spans nest.
    nested = [e for e in trace if e.get("cat") != "user_annotation" or e.get("name") == f"{PREFIX}wait"]
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for span in synchronisations(spans(nested)):
        if not step["ts"] <= span.start <= step["ts"] + step["dur"]:
            continue
        entry = found[_call(span), _site(span, places)]
        entry[0] += 1
        entry[1] += (span.end - span.start) / 1e3
    syncs = [Sync(call, site, count, ms) for (call, site), (count, ms) in found.items()]
    return sorted(syncs, key=lambda sync: -sync.ms)


def _call(span: Span) -> str:
    """The outermost operation around a synchronisation, as users know it, or the CUDA function itself."""
    call, at = span.name, span.parent
    while at is not None and at.category == "cpu_op" and not at.name.startswith(ENGINE):
        call, at = at.name, at.parent
    return call


def _site(span: Span, places: list[Place]) -> str:
    """file:line in function, of the first frame that doesn't just pass a call on."""
    at, backward = span.parent, ""
    while at is not None:
        frame = _FRAME.fullmatch(at.name) if at.category == "python_function" else None
        if frame is not None:
            file, begins, function = frame["file"], int(frame["line"]), frame["function"]
            if not Place(file, begins, function).passing:
                lines = {p.line for p in places if p.file.endswith(file) and p.function == function}
                where = ", ".join(map(str, sorted(lines))) if lines else f"{begins} ff."
                return f"{file}:{where} in {function}"
        elif at.name.startswith(ENGINE):
            backward = at.name.removeprefix(f"{ENGINE}: ")
        at = at.parent
    return f"backward pass, in {backward}" if backward else "unknown"
