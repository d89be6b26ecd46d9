"""Add up how long each cause took, exactly, over a window of time: of a device's streams or of a processor's thread.

Every moment of the window has one cause. On a device: what computes (of several kernels the one that began first), else
what is copied, else why nothing runs. What ran beside it is hidden. On a CPU: the innermost operation that is open.
torch's `key_averages()` adds up names, not moments, so it can tell neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pronghorn.diagnose.profile_report import PHASES, KernelTime, Profile, Row, Shape
from pronghorn.diagnose.profile_trace import ENGINE, TRANSFERS, Cause, Span, cause, spans
from pronghorn.ranges import PREFIX

VISIBLE = 1000
"""Parts of a step's width that can be told apart."""
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree")
_IDLE = "idle"
"""The lane of the time in which a device does nothing."""
_WAITS = {f"{PREFIX}data": Cause.DATA, f"{PREFIX}logging": Cause.LOGGING}
"""What the host may do while a device is idle."""
_PHASES = ("data", "model", "backward", "optimiser", "logging")
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
_DIRECTIONS = {"HtoD": Cause.TO_DEVICE, "DtoH": Cause.TO_HOST, "DtoD": Cause.ON_DEVICE, "PtoP": Cause.COMMUNICATION}


@dataclass(slots=True)
class Piece:
    """A kernel, a copy, idle time or, on a CPU, an operation's own time; in microseconds."""

    name: str
    cause: Cause
    start: float
    end: float
    lane: str
    again: bool = False
    """It computes what the forward pass had computed already."""
    exposed: float = 0.0
    """The time that it alone accounts for."""
    count: int = 1
    """0 for idle time, and for a later piece of the same operation."""


def device_pieces(events: Iterable[dict[str, Any]], host: list[Span], ranks: frozenset[int]) -> list[Piece]:
    """Return kernels and copies with their causes, by start."""
    launches = {span.args["correlation"]: span for span in host if "correlation" in span.args}
    pieces = []
    for event in events:
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        args, name = event.get("args", {}), event["name"]
        why, again = cause(launches.get(args.get("correlation")), ranks)
        if kind == "gpu_memcpy":
            direction = next((c for word, c in _DIRECTIONS.items() if word in name), Cause.ON_DEVICE)
            why = why if direction is Cause.ON_DEVICE and why is not Cause.UNEXPLAINED else direction
        elif "nccl" in name.lower():
            why = Cause.COMMUNICATION
        lane = f"GPU {args.get('device', 0)} stream {args.get('stream', event['tid'])}"
        pieces.append(Piece(name, why, event["ts"], event["ts"] + event.get("dur", 0), lane, again))
    return sorted(pieces, key=lambda piece: piece.start)


def host_pieces(host: list[Span], ranks: frozenset[int]) -> list[Piece]:
    """Return the time of each operation and range in which none inside it is open, by start."""
    pieces = []
    for span in host:
        at = span.start
        why, again = cause(span, ranks)
        if why not in (Cause.DATA, Cause.LOGGING, Cause.OPTIMISER) and (
            "::" not in span.name or span.name.startswith(ENGINE)  # a range, an autograd node, a function in Python
        ):
            why = Cause.HOST
        name = span.name if span.range is None else f"{span.range} (Python)"
        for child in [*span.children, None]:
            end = span.end if child is None else child.start
            if end > at:
                pieces.append(Piece(name, why, at, end, "operations", again, end - at, int(at == span.start)))
            at = span.end if child is None else child.end
    return sorted(pieces, key=lambda piece: piece.start)


def expose(pieces: list[Piece], start: float, end: float) -> list[tuple[float, float]]:
    """Set each piece's exposed time within [start, end] and return the (start, end) of what no piece covers.

    Exposed times and gaps add up to the window.
    """
    marks = sorted({start, end, *(min(max(t, start), end) for p in pieces for t in (p.start, p.end))})
    active: list[Piece] = []
    gaps: list[tuple[float, float]] = []
    waiting = 0
    for at, until in pairwise(marks):
        while waiting < len(pieces) and pieces[waiting].start <= at:
            active.append(pieces[waiting])
            waiting += 1
        active = [piece for piece in active if piece.end > at]
        if active:
            next((piece for piece in active if piece.cause not in TRANSFERS), active[0]).exposed += until - at
        elif gaps and gaps[-1][1] == at:
            gaps[-1] = (gaps[-1][0], until)
        else:
            gaps.append((at, until))
    return gaps


def explain_gaps(gaps: list[tuple[float, float]], host: list[Span]) -> list[Piece]:
    """Divide idle time by what the host did: it waited for data, logged, had waited for the device, or was late."""
    busy = sorted((span.start, span.end, _WAITS[span.name]) for span in host if span.name in _WAITS)
    syncs = [(span.start, span.end) for span in synchronisations(host)]
    pieces = []
    for start, end in gaps:
        rest = Cause.AFTER_SYNC if any(first <= start <= last for first, last in syncs) else Cause.IDLE
        for first, last, why in [*busy, (end, end, rest)]:
            first, last = min(max(first, start), end), min(last, end)
            if last < first:
                continue
            pieces += [(rest, start, first), (why, first, last)]
            start = last
    return [Piece("", why, a, b, _IDLE, exposed=b - a, count=0) for why, a, b in pieces if b > a]


def synchronisations(host: list[Span]) -> list[Span]:
    """Return the calls in which the host waits for the device, but not the profiler's own."""
    return [s for s in host if s.name in SYNCHRONISATIONS and not (s.parent is not None and s.parent.range == "wait")]


def account_for(trace: list[dict[str, Any]], ranks: frozenset[int]) -> Profile:
    """Return the times of a trace of steps, each in a range `pronghorn:step`; per step, in milliseconds."""
    host = spans(trace)
    steps = sorted((span for span in host if span.name == f"{PREFIX}step"), key=lambda span: span.start)
    start, end, count = steps[0].start, steps[-1].end, len(steps)
    pieces = device_pieces(trace, host, ranks)
    on_device = bool(pieces)
    if on_device:
        pieces += explain_gaps(expose(pieces, start, end), host)
    else:
        pieces = host_pieces([span for span in host if span.thread == steps[0].thread], ranks)
        pieces = [piece for piece in pieces if start <= piece.start and piece.end <= end]
    launches = [span.end - span.start for span in host if span.name.startswith(_LAUNCHES)]
    # a device works on a step while the host is at the next: the last step's worth of time then
    last_step = end - (end - start) / count if on_device else steps[-1].start
    return Profile(
        steps=count,
        step_ms=(end - start) / 1e3 / count,
        rows=_rows(pieces, host if on_device else [], count),
        kernels=_kernels(pieces, count),
        recomputed_ms=sum(piece.exposed for piece in pieces if piece.again) / 1e3 / count,
        launches=len(launches) / count,
        launch_ms=sum(launches) / 1e3 / count,
        timeline=_timeline(pieces, host, last_step, end),
    )


def _rows(pieces: list[Piece], host: list[Span], steps: int) -> list[Row]:
    """Make a row for each cause that took any time, in the order of `Cause`; `host` is empty on a CPU."""
    by_cause: dict[Cause, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_cause[piece.cause].append(piece)
    rows = []
    for why in Cause:
        own = by_cause[why]
        exposed = sum(piece.exposed for piece in own)
        hidden = sum(piece.end - piece.start for piece in own) - exposed
        waits = [span.end - span.start for span in host if _WAITS.get(span.name) is why]
        if waits:  # what of the host's waiting or logging lay behind the device's work
            hidden = max(sum(waits) - sum(piece.exposed for piece in own if piece.lane == _IDLE), 0)
        if exposed or hidden:
            rows.append(Row(why.value, exposed / 1e3 / steps, hidden / 1e3 / steps, sum(p.count for p in own) / steps))
    return rows


def _kernels(pieces: list[Piece], steps: int) -> list[KernelTime]:
    """Add up time by name and cause, the longest first."""
    times: dict[tuple[str, Cause], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for piece in pieces:
        if piece.lane != _IDLE:
            entry = times[piece.name, piece.cause]
            entry[0] += piece.end - piece.start
            entry[1] += piece.count
    kernels = [KernelTime(name, why.value, us / 1e3 / steps, n / steps) for (name, why), (us, n) in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def _timeline(pieces: list[Piece], host: list[Span], start: float, end: float) -> dict[str, list[Shape]]:
    """Draw [start, end] in lanes: what the trainer does, then streams (of a CPU, its thread), then idle time."""
    lanes: dict[str, list[tuple[float, float, str]]] = {PHASES: []}
    for span in host:
        if span.range in _PHASES and span.parent is not None and span.parent.range == "step":
            lanes[PHASES].append((span.start, span.end, span.range))
    for piece in pieces:
        lanes.setdefault(piece.lane, []).append((piece.start, piece.end, piece.cause.value))
    return {lane: _drawn(shapes, start, end) for lane, shapes in lanes.items()}


def _drawn(shapes: list[tuple[float, float, str]], start: float, end: float) -> list[Shape]:
    """Keep what can be seen: neighbours of one cause as one, and what is too narrow as part of its neighbour."""
    near = (end - start) / VISIBLE
    merged: list[Shape] = []
    for begin, until, what in shapes:
        begin, until = max(begin, start), min(until, end)
        last = merged[-1] if merged else None
        if until <= begin:
            continue
        if last is not None and begin - last[1] < near and (last[2] == what or until - begin < near / 2):
            merged[-1] = (last[0], max(until, last[1]), last[2])
        else:
            merged.append((begin, until, what))
    return [(round((a - start) / 1e3, 4), round((b - start) / 1e3, 4), what) for a, b, what in merged]
