"""How long each cause took: exact sums over a window of time, of a device's streams or of a processor's thread.

Every moment of the window has one cause. On a device: what computes (of several kernels the one that began first), else
what is copied, else why nothing runs. What ran at the same moment beside it is told as hidden. On a CPU: the innermost
operation that is open. torch's `key_averages()` adds up names, not moments, so it can tell neither.
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
_PHASES = ("data", "model", "backward", "optimiser", "logging")
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree")
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
_DIRECTIONS = {"HtoD": Cause.TO_DEVICE, "DtoH": Cause.TO_HOST, "DtoD": Cause.ON_DEVICE, "PtoP": Cause.COMMUNICATION}


@dataclass(slots=True)
class Piece:
    """A kernel, a copy or, on a CPU, an operation's own time; in microseconds."""

    name: str
    cause: Cause
    start: float
    end: float
    lane: str
    again: bool = False
    """It computes what the forward pass had computed already."""
    exposed: float = 0.0
    """The time that it alone accounts for."""
    first: bool = True
    """Not a later piece of the same operation."""

    @property
    def hidden(self) -> float:
        return self.end - self.start - self.exposed


@dataclass(slots=True)
class Gap:
    """Time in which no piece ran."""

    cause: Cause
    start: float
    end: float


def device_pieces(events: Iterable[dict[str, Any]], host: list[Span], ranks: frozenset[int]) -> list[Piece]:
    """Kernels and copies with their causes, by start."""
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
    """The time of each operation and range in which none inside it is open, by start."""
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
                pieces.append(Piece(name, why, at, end, "operations", again, end - at, at == span.start))
            at = span.end if child is None else child.end
    return sorted(pieces, key=lambda piece: piece.start)


def account(pieces: list[Piece], start: float, end: float) -> list[Gap]:
    """Set each piece's exposed time within [start, end] and return the gaps; exposed times and gaps add up to it."""
    marks = sorted({start, end, *(min(max(t, start), end) for p in pieces for t in (p.start, p.end))})
    active: list[Piece] = []
    gaps: list[Gap] = []
    waiting = 0
    for at, until in pairwise(marks):
        while waiting < len(pieces) and pieces[waiting].start <= at:
            active.append(pieces[waiting])
            waiting += 1
        active = [piece for piece in active if piece.end > at]
        first = next((piece for piece in active if piece.cause not in TRANSFERS), active[0] if active else None)
        if first is not None:
            first.exposed += until - at
        elif gaps and gaps[-1].end == at:
            gaps[-1].end = until
        else:
            gaps.append(Gap(Cause.IDLE, at, until))
    return gaps


def explain_gaps(gaps: list[Gap], host: list[Span]) -> list[Gap]:
    """Idle time by what the host did: it waited for data, logged, had waited for the device, or was just late."""
    whole = {f"{PREFIX}data": Cause.DATA, f"{PREFIX}logging": Cause.LOGGING}
    busy = sorted((s.start, s.end, whole[s.name]) for s in host if s.name in whole)
    syncs = sorted((s.start, s.end) for s in synchronisations(host))
    found = []
    for gap in gaps:
        drained = any(begin <= gap.start <= end for begin, end in syncs)
        rest, at = (Cause.AFTER_SYNC if drained else Cause.IDLE), gap.start
        for begin, end, why in busy:
            if end <= at or begin >= gap.end:
                continue
            if begin > at:
                found.append(Gap(rest, at, begin))
            at = max(at, begin)
            found.append(Gap(why, at, min(end, gap.end)))
            at = min(end, gap.end)
        if at < gap.end:
            found.append(Gap(rest, at, gap.end))
    return found


def synchronisations(host: list[Span]) -> list[Span]:
    """The calls in which the host waits for the device; the profiler's own are left out."""
    return [s for s in host if s.name in SYNCHRONISATIONS and not (s.parent is not None and s.parent.range == "wait")]


def launches(host: list[Span]) -> list[Span]:
    """The calls that give the device work."""
    return [span for span in host if span.name.startswith(_LAUNCHES)]


def account_for(trace: list[dict[str, Any]], ranks: frozenset[int]) -> Profile:
    """The times of a trace of steps, each in a range `pronghorn:step`; per step, in milliseconds."""
    host = spans(trace)
    steps = sorted((span for span in host if span.name == f"{PREFIX}step"), key=lambda span: span.start)
    start, end = steps[0].start, steps[-1].end
    pieces = device_pieces(trace, host, ranks)
    gaps: list[Gap] = []
    if pieces:
        gaps = explain_gaps(account(pieces, start, end), host)
    else:
        pieces = host_pieces([span for span in host if span.thread == steps[0].thread], ranks)
        pieces = [piece for piece in pieces if start <= piece.start and piece.end <= end]
    found = Profile(
        steps=len(steps),
        step_ms=(end - start) / 1e3 / len(steps),
        rows=_rows(pieces, gaps, host, len(steps)),
        kernels=_kernels(pieces, len(steps)),
        recomputed_ms=sum(piece.exposed for piece in pieces if piece.again) / 1e3 / len(steps),
        launches=len(launches(host)) / len(steps),
        launch_ms=sum(span.end - span.start for span in launches(host)) / 1e3 / len(steps),
    )
    # a device works on a step while the host is at the next: the last step's worth of time then
    begin = end - (end - start) / len(steps) if gaps else steps[-1].start
    found.timeline = _timeline(pieces, gaps, host, begin, end)
    return found


def _rows(pieces: list[Piece], gaps: list[Gap], host: list[Span], steps: int) -> list[Row]:
    """A row a cause, in the order of `Cause`, of what took any time."""
    shown: dict[Cause, float] = defaultdict(float)
    hidden: dict[Cause, float] = defaultdict(float)
    counts: dict[Cause, int] = defaultdict(int)
    for piece in pieces:
        shown[piece.cause] += piece.exposed
        hidden[piece.cause] += piece.hidden
        counts[piece.cause] += piece.first
    for gap in gaps:
        shown[gap.cause] += gap.end - gap.start
    if gaps:  # what of the host's waiting and logging lay behind the device's work
        for why, kind in ((Cause.DATA, "data"), (Cause.LOGGING, "logging")):
            whole = sum(span.end - span.start for span in host if span.name == PREFIX + kind)
            hidden[why] = max(whole - sum(gap.end - gap.start for gap in gaps if gap.cause is why), 0)
    return [
        Row(str(why), shown[why] / 1e3 / steps, hidden[why] / 1e3 / steps, counts[why] / steps)
        for why in Cause
        if shown[why] or hidden[why]
    ]


def _kernels(pieces: list[Piece], steps: int) -> list[KernelTime]:
    """Time by name and cause, the longest first."""
    times: dict[tuple[str, Cause], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for piece in pieces:
        entry = times[piece.name, piece.cause]
        entry[0] += piece.end - piece.start
        entry[1] += piece.first
    found = [KernelTime(name, str(why), us / 1e3 / steps, n / steps) for (name, why), (us, n) in times.items()]
    return sorted(found, key=lambda kernel: -kernel.ms)


def _timeline(
    pieces: list[Piece], gaps: list[Gap], host: list[Span], start: float, end: float
) -> dict[str, list[Shape]]:
    """[start, end] by lanes: what the trainer does, then streams (of a CPU, its thread), then gaps."""
    lanes: dict[str, list[tuple[float, float, str]]] = {PHASES: []}
    for span in host:
        if span.range in _PHASES and span.parent is not None and span.parent.range == "step":
            lanes[PHASES].append((span.start, span.end, span.range))
    for piece in pieces:
        lanes.setdefault(piece.lane, []).append((piece.start, piece.end, str(piece.cause)))
    if gaps:
        lanes["idle"] = [(gap.start, gap.end, str(gap.cause)) for gap in gaps]
    return {lane: _drawn(shapes, start, end) for lane, shapes in lanes.items()}


def _drawn(shapes: list[tuple[float, float, str]], start: float, end: float) -> list[Shape]:
    """What can be seen: neighbours of one cause as one, and what is too narrow as part of its neighbour."""
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
