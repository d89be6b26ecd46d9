"""What the second buffer saves: layers recomputed with inputs offloaded by two buffers, by one, and without offloading.

The three take turns in one process on one model of random weights (LoRA r16 on all linears, fused layers). First
gradients must agree bit by bit; then the clock runs; then events on the streams tell a layer's copy c and backward g. A
layer costs c + g with one buffer and max(c, g) with two, so (L − 1)·min(c, g) is what there is to save: the last
layer's input never leaves. Times are of forward and backward. A card bound by its power computes slower without the
pauses that one buffer makes, so the saving is told in cycles of the multiprocessors, too.

    python -m benchmarks.offload --shape Llama-3.1-8B --tokens 8192 --out offload-8b.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.candidates.base import lora_model
from benchmarks.program import packed_batches, parser_of, run, show
from benchmarks.record import Result, Workload, check_out, command_line, write_results
from benchmarks.timing import WARM_STEPS, CudaClock, HostClock, schedule
from pronghorn.diagnose.shapes import SHAPES, shape_of
from pronghorn.errors import ConfigError
from pronghorn.memory.offload import LayerTiming
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import Handle, attach

WAYS = {"two buffers": Plan.offload(2), "one buffer": Plan.offload(1), "recompute": Plan.recompute()}


def gradients(model: Any, batch: dict[str, Any], plan: Plan) -> list[torch.Tensor]:
    """Return those of two micro-batches, the second through memory that the first one used."""
    attach(model, plan, graph="off")
    model.zero_grad()
    for _ in range(2):
        model(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def gate(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Compare every way's gradients with those of recomputation, bit by bit."""
    wanted, equal = gradients(model, batch, WAYS["recompute"]), {}
    for name, plan in ({"recompute, again": WAYS["recompute"]} | WAYS).items():
        own = gradients(model, batch, plan)
        equal[name] = len(own) == len(wanted) > 0 and all(map(torch.equal, own, wanted))
    return {"gradients equal bit by bit": equal, "green": all(equal.values())}


@dataclass
class Steps:
    """Hold what a way took, turn after turn."""

    milliseconds: list[float] = field(default_factory=list)
    megahertz: list[float] = field(default_factory=list)
    """The mean clock of each; none on the CPU."""
    peak: int = 0
    """Bytes."""


def turn(model: Any, plan: Plan, rows: Sequence[dict[str, Any]], steps: int, done: Steps) -> Handle:
    """Time steps after warm ones, and add them to those `done`."""
    cuda = torch.cuda.is_available()
    if cuda:
        from benchmarks import sm_clock  # with Triton
    clock: Any = CudaClock() if cuda else HostClock()
    handle = attach(model, plan, graph="off")
    for step in range(-WARM_STEPS, steps):
        if step == 0 and cuda:
            torch.cuda.reset_peak_memory_stats()
        ticks = [sm_clock.mark(model.device)] if cuda else []
        marks = [clock.mark()]
        model(**rows[step % len(rows)]).loss.backward()
        model.zero_grad()
        marks.append(clock.mark())
        ticks += [sm_clock.mark(model.device)] if cuda else []
        if step >= 0:
            done.milliseconds += clock.milliseconds(marks)
            done.megahertz += [sm_clock.megahertz(*ticks)] if cuda else []
    done.peak = max(done.peak, torch.cuda.max_memory_allocated() if cuda else 0)
    return handle


def layer_timings(model: Any, plan: Plan, rows: Sequence[dict[str, Any]]) -> list[LayerTiming]:
    """Return those of one step after warm ones; none on the CPU."""
    engine = turn(model, plan, rows, 1, Steps()).offload_engine
    assert engine is not None
    engine.timed = True
    model(**rows[0]).loss.backward()
    model.zero_grad()
    return engine.timings()


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="Llama-3.1-8B", help="SHAPE@12: with its first 12 layers")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(given: argparse.Namespace) -> bool:
    """Judge, time by turns, and read the layers' events; tell whether gradients agreed."""
    shape = shape_of(given.shape)
    if shape is None:
        raise ConfigError(f"--shape {given.shape} is unknown", f"use one of {', '.join(SHAPES)}")
    check_out(given.out)
    model = lora_model(shape, given.seed)
    rows = packed_batches(model, given.tokens, given.seed)
    checked = gate(model, rows[0])
    resting = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    ways = {name: Steps() for name in WAYS}
    states = {}
    for name, steps in schedule(list(WAYS), given.repeats):
        states[name] = turn(model, WAYS[name], rows, steps, ways[name]).report[-1].why
    medians = {name: statistics.median(way.milliseconds) for name, way in ways.items()}
    clocks = {name: statistics.median(way.megahertz) for name, way in ways.items() if way.megahertz}
    extra: dict[str, Any] = {"layers": model.config.num_hidden_layers, "states": states, "megahertz": clocks}
    one, two = (layer_timings(model, WAYS[name], rows) for name in ("one buffer", "two buffers"))
    if one:
        alone = [(t.copy_ms, t.compute_ms) for t in one if t.copy_ms]
        c, g = (statistics.median(values) for values in zip(*alone, strict=True))
        predicted = (extra["layers"] - 1) * min(c, g)
        overlapped = [t for t in two if t.copy_ms]
        hidden = 1 - sum(t.exposed_ms for t in two) / sum(min(t.copy_ms, t.compute_ms) for t in overlapped)
        saved = medians["one buffer"] - medians["two buffers"]
        extra |= {"copy_ms": c, "compute_ms": g, "predicted_ms": predicted, "saved_ms": saved, "hidden_share": hidden}
        cycles = {name: medians[name] * clocks[name] for name in WAYS}
        saved_cycles = cycles["one buffer"] - cycles["two buffers"]
        extra["saved_cycles_share"] = saved_cycles / (predicted * clocks["one buffer"])
        extra["layers_ms"] = {"one buffer": [vars(t) for t in one], "two buffers": [vars(t) for t in two]}
    work = Workload(given.shape, "lora", given.tokens, "lognormal", 1.0, given.seed)
    results = [
        Result(command_line(), f"pronghorn, {name}", work, checked, {"step": way.milliseconds}, commit=given.commit,
               memory_bytes={"resting": resting, "peak": way.peak}, extra=extra)
        for name, way in ways.items()
    ]  # fmt: skip
    write_results(results, given.out)
    rows_shown = [
        {"way": f"{name} ({states[name]})",
         "step, ms": f"{medians[name]:,.1f}", "least": f"{min(way.milliseconds):,.1f}",
         "greatest": f"{max(way.milliseconds):,.1f}", "MHz": clocks.get(name), "peak, GiB": f"{way.peak / 2**30:.2f}"}
        for name, way in ways.items() if checked["green"]
    ]  # fmt: skip
    show(rows_shown, f"{given.shape}, gate {checked}")
    if checked["green"]:
        print({key: round(value, 3) for key, value in extra.items() if isinstance(value, float)})
    return checked["green"]


if __name__ == "__main__":
    run(arguments, main)
