"""A few steps of a recipe's own training under torch's profiler, told by cause.

    warm-up │ steps without the profiler, timed │ CUDA: one with Python's stack, for call sites │ steps under it │ stop

The trainer is `pronghorn train`'s. Ranges around its parts, and hooks around the model's, are there for the profiled
steps only. All of it works in a temporary folder; nothing is saved, and nobody is reported to.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console

from pronghorn.config import Recipe
from pronghorn.device import device_name, versions
from pronghorn.diagnose.profile_advice import advise, unfused
from pronghorn.diagnose.profile_causes import PREFIX, Cause, Span, spans
from pronghorn.diagnose.profile_record import PHASES, KernelTime, Profile, Row, Shape
from pronghorn.diagnose.profile_steps import Recorder, Trace, inner_dimensions
from pronghorn.diagnose.profile_syncs import find_sites
from pronghorn.diagnose.profile_times import (
    Gap,
    Piece,
    account,
    device_pieces,
    explain_gaps,
    host_pieces,
    launches,
)
from pronghorn.train.build import build
from pronghorn.train.control import RunControl
from pronghorn.train.progress import ProgressCallback

GRAPH = "CUDA graph of the layers"
VISIBLE = 1000
"""Parts of a step's width that can be told apart."""
_PHASES = ("data", "model", "backward", "optimiser", "logging")


def profile(recipe: Recipe, console: Console, steps: int = 3, warmup: int = 3) -> Profile:
    """Train `warmup` + 2 · `steps` (on CUDA one more) steps as `pronghorn train` would and tell the last ones by cause.

    Raises:
        ConfigError, DataError, UnsupportedError, TrainingError: as training does.
    """
    with tempfile.TemporaryDirectory(prefix="pronghorn-profile-") as folder:
        train = recipe.train.model_copy(
            update={
                "output": Path(folder) / "run",
                "max_steps": warmup + 2 * steps + 2,  # never reached: the trainer saves after its last step
                "save_steps": None,
                "eval_steps": None,
                "report_to": [],
            }
        )
        packing = recipe.packing.model_copy(update={"graph": "off"})  # a graph's kernels can't be told by cause
        recorder = Recorder(Path(folder), steps, warmup)
        callbacks = [RunControl(None, None, None), ProgressCallback(Console(quiet=True)), recorder]
        trainer, handle = build(recipe.model_copy(update={"train": train, "packing": packing}), console, callbacks)
        recorder.watch(trainer, handle)
        console.print(f"Profiling {steps} steps after {warmup} to warm up and {steps} without the profiler")
        try:
            trainer.train()
        finally:
            recorder.close()
    found = account_for(recorder.trace, inner_dimensions(handle))
    device = handle.model.device
    autocast = torch.bfloat16 if trainer.args.bf16 else torch.float16 if trainer.args.fp16 else None
    paths = handle.paths(autocast)
    found.recipe, found.device, found.versions = recipe.to_dict(), device_name(), versions()
    found.plain_ms, found.warmup = recorder.plain_ms, warmup
    found.paths = [vars(path) for path in paths if path.part != GRAPH]
    if recipe.packing.graph != "off" and device.type == "cuda":
        found.paths.append({"part": GRAPH, "path": "off", "why": "while profiling; training decides by itself"})
    if device.type == "cuda":
        found.syncs = find_sites(recorder.stacks, recorder.places)
        found.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        found.memory_bytes = torch.cuda.get_device_properties(device).total_memory
    found.advice = advise(found, unfused(paths))
    return found


def account_for(trace: Trace, ranks: frozenset[int]) -> Profile:
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
