"""Where the host waits for the device: each synchronisation with its place in the Python source."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary, extract_stack
from typing import Any

import torch

from pronghorn.diagnose.profile_causes import ENGINE, PREFIX, Span, spans
from pronghorn.diagnose.profile_record import Sync
from pronghorn.diagnose.profile_times import synchronisations

_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
_PASSING = ("/torch/", "/accelerate/utils/", "/contextlib.py")
"""Libraries whose frames only pass a call on."""


def _passing(file: str) -> bool:
    return file.startswith("<") or any(part in f"/{file}" for part in _PASSING)


@contextmanager
def noticed() -> Iterator[list[FrameSummary]]:
    """The lines at which the host waited for the device, as torch's sync debug mode notices them.

    It doesn't notice all (an event's `synchronize`, what backward threads do), but knows the very line.
    """
    places: list[FrameSummary] = []

    def notice(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            frames = reversed(extract_stack()[:-1])
            places.extend([f for f in frames if not _passing(f.filename) and f.filename != warnings.__file__][:1])

    earlier = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = notice
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(earlier)


def find_sites(trace: list[dict[str, Any]], places: list[FrameSummary]) -> list[Sync]:
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


def _site(span: Span, places: list[FrameSummary]) -> str:
    """file:line in function, of the first frame that doesn't just pass a call on."""
    at, backward = span.parent, ""
    while at is not None:
        frame = _FRAME.fullmatch(at.name) if at.category == "python_function" else None
        if frame is not None:
            file, begins, function = frame["file"], int(frame["line"]), frame["function"]
            if not _passing(file):
                lines = {p.lineno or 0 for p in places if p.filename.endswith(file) and p.name == function}
                where = ", ".join(map(str, sorted(lines))) if lines else f"{begins} ff."
                return f"{file}:{where} in {function}"
        elif at.name.startswith(ENGINE):
            backward = at.name.removeprefix(f"{ENGINE}: ")
        at = at.parent
    return f"backward pass, in {backward}" if backward else "unknown"
