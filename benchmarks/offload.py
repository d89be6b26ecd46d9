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
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.candidates.base import device, lora_model
from benchmarks.record import Result, Workload, check_out, command_line, write_results
from benchmarks.timing import WARM_STEPS, CudaClock, HostClock, schedule
from benchmarks.workload import make_rows
from pronghorn.data.batch import Collator
from pronghorn.diagnose.shapes import SHAPES, shape_of
from pronghorn.memory.offload import LayerTiming
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import Handle, attach

WAYS = {"two buffers": Plan.offload(2), "one buffer": Plan.offload(1), "recompute": Plan.recompute()}


def batches(model: Any, tokens: int, seed: int) -> list[dict[str, Any]]:
    collator = Collator(tokens, pad_token_id=0)
    rows = make_rows(tokens, "lognormal", 1.0, model.config.vocab_size, seed)
    return [{name: value.to(device()) for name, value in collator([vars(row)]).items()} for row in rows]


def gradients(model: Any, batch: dict[str, Any], plan: Plan) -> list[torch.Tensor]:
    """Of two micro-batches, the second through memory that the first one used."""
    attach(model, plan, graph="off")
    model.zero_grad()
    for _ in range(2):
        model(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def gate(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    wanted, equal = gradients(model, batch, WAYS["recompute"]), {}
    for name, plan in ({"recompute, again": WAYS["recompute"]} | WAYS).items():
        found = gradients(model, batch, plan)
        equal[name] = len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))
    return {"gradients equal bit by bit": equal, "green": all(equal.values())}


@dataclass
class Steps:
    """Of a way, turn after turn."""

    milliseconds: list[float] = field(default_factory=list)
    megahertz: list[float] = field(default_factory=list)
    """The mean clock of each; none on the CPU."""
    peak: int = 0
    """Bytes."""


def turn(model: Any, plan: Plan, rows: Sequence[dict[str, Any]], steps: int, found: Steps) -> Handle:
    """So many steps after warm ones, added to those `found`."""
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
            found.milliseconds += clock.milliseconds(marks)
            found.megahertz += [sm_clock.megahertz(*ticks)] if cuda else []
    found.peak = max(found.peak, torch.cuda.max_memory_allocated() if cuda else 0)
    return handle


def layer_timings(model: Any, plan: Plan, rows: Sequence[dict[str, Any]]) -> list[LayerTiming]:
    """Of one step after warm ones; none on the CPU."""
    engine = turn(model, plan, rows, 1, Steps()).offload_engine
    assert engine is not None
    engine.timed = True
    model(**rows[0]).loss.backward()
    model.zero_grad()
    return engine.timings()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Llama-3.1-8B", help="SHAPE@12: with its first 12 layers")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    shape = shape_of(arguments.shape)
    if shape is None:
        parser.error(f"--shape {arguments.shape} is unknown: use one of {', '.join(SHAPES)}")
    check_out(arguments.out)
    model = lora_model(shape, arguments.seed)
    rows = batches(model, arguments.tokens, arguments.seed)
    checked = gate(model, rows[0])
    resting = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    ways = {name: Steps() for name in WAYS}
    states = {}
    for name, steps in schedule(list(WAYS), arguments.repeats):
        states[name] = turn(model, WAYS[name], rows, steps, ways[name]).report[-1].why
    medians = {name: statistics.median(way.milliseconds) for name, way in ways.items()}
    clocks = {name: statistics.median(way.megahertz) for name, way in ways.items() if way.megahertz}
    table = Table("way", "step ms", "least", "greatest", "MHz", "peak GiB", title=f"{arguments.shape}, gate {checked}")
    for name, way in ways.items():
        figures = (f"{value:,.1f}" for value in (medians[name], min(way.milliseconds), max(way.milliseconds)))
        clock = f"{clocks[name]:,.0f}" if clocks else "–"
        table.add_row(f"{name} ({states[name]})", *figures, clock, f"{way.peak / 2**30:.2f}")
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
        at_one_clock = (cycles["one buffer"] - cycles["two buffers"]) / (predicted * clocks["one buffer"])
        extra["saved_cycles_share"] = at_one_clock
        extra["layers_ms"] = {"one buffer": [vars(t) for t in one], "two buffers": [vars(t) for t in two]}
        table.caption = (
            f"c {c:.2f} ms, g {g:.2f} ms a layer; (L - 1)·min(c, g): {predicted:.1f} ms; saved: {saved:.1f} ms, "
            f"{saved / predicted:.0%} of it, in cycles {at_one_clock:.0%}; hidden by events: {hidden:.1%}; "
            f"second buffer: {(ways['two buffers'].peak - ways['one buffer'].peak) / 2**30:+.2f} GiB"
        )
    Console(width=140).print(table)
    work = Workload(arguments.shape, "lora", arguments.tokens, "lognormal", 1.0, arguments.seed)
    results = [
        Result(command_line(), f"pronghorn, {name}", work, checked, {"step": way.milliseconds}, commit=arguments.commit,
               memory_bytes={"resting": resting, "peak": way.peak}, extra=extra)
        for name, way in ways.items()
    ]  # fmt: skip
    write_results(results, arguments.out)
    if not checked["green"]:
        raise SystemExit("gradients differ: the figures mean nothing")


if __name__ == "__main__":
    main()
