"""What memory costs in time: Pronghorn's `auto` within several limits, against other ways and others' modes.

    python -m benchmarks.memory_time --model Llama-3.1-8B --limits 8 --against unsloth:off,unsloth:auto,hf:on
    python -m benchmarks.memory_time --model Llama-3.2-1B --cards 8GiB,12GiB,16GiB,24GiB --against unsloth:auto
    python -m benchmarks.memory_time --draw A.json B.json --plot memory-time.svg

`--limits 8` gives as many, evenly from the least that the model trains in to what keeping everything takes; each is the
limit of Pronghorn's own process, and all alternate with Pronghorn without a limit. `--cards` gives the same limit to
all, each card by itself. A candidate is measured as by `benchmarks.step`: gate first, in a process of its own.
`--draw` only draws results of this program and of `benchmarks.step`: those of the first one's workload.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.candidates import CANDIDATES, Spec
from benchmarks.candidates.base import Recompute
from benchmarks.options import names
from benchmarks.pairs import CandidateResult
from benchmarks.plots import memory_time
from benchmarks.record import Result, check_out, keeper, read_results, write_results
from benchmarks.step import StepOptions, check_options, measure, prepare, recompute_label
from pronghorn.cli.options import grow_segments, progress
from pronghorn.diagnose.shapes import shape_of
from pronghorn.errors import ConfigError
from pronghorn.memory.devices import parse_bytes
from pronghorn.memory.estimate import GIB, MemoryModel, Method, TrainSetup
from pronghorn.memory.plan import Policy
from pronghorn.models import auto_plan


def limits(model: str, method: Method, tokens: int, count: int) -> list[int]:
    """Evenly from what the smallest plan takes to what keeping everything does, in MiB steps."""
    from transformers import AutoConfig

    fields = shape_of(model)
    config: Any = AutoConfig.from_pretrained(model) if fields is None else AutoConfig.for_model(**fields)
    shape = auto_plan.dims_of(auto_plan.skeleton(config))
    step = MemoryModel.of(shape, TrainSetup(tokens, method, accumulates=False))
    ends = ((policy,) * len(shape.layers) for policy in (Policy.OFFLOAD, Policy.KEEP))
    least, most = (step.process(step.peak(policies, 1)) for policies in ends)
    return [round((least + (most - least) * i / max(count - 1, 1)) / 2**20 + 1) * 2**20 for i in range(count)]


Asked = tuple[str, Any, int | None]
"""(candidate, what it recomputes, the limit of its memory in bytes)."""


def groups(given: argparse.Namespace) -> list[list[Asked]]:
    """Who is measured by turns with the first of the group."""
    others = [name.partition(":")[::2] for name in names(given.against)]
    for name, mode in others:
        if name not in CANDIDATES or mode not in get_args(Recompute):
            modes = "|".join(get_args(Recompute))
            raise ConfigError(f"--against {name}:{mode} is unknown", f"use NAME:{modes} with {', '.join(CANDIDATES)}")
    if given.cards:
        sizes = [parse_bytes(size, "--cards") for size in names(given.cards)]
        return [[("pronghorn", "auto", size), *((*other, size) for other in others)] for size in sizes]
    sizes = limits(given.model, given.method, given.tokens, given.limits)
    limited: list[Asked] = [("pronghorn", "auto", size) for size in (None, *sizes)]
    return [[*limited, *((*other, None) for other in others)]]


def candidate_of(asked: Asked, spec: Spec) -> CandidateResult:
    candidate, mode, memory = asked
    spec = replace(spec, candidate=candidate, recompute=mode, memory=memory)
    return CandidateResult(f"{candidate}, {recompute_label(spec)}", spec)


def draw(files: Sequence[Path], plot: Path) -> None:
    every = [each for file in files for each in read_results(file)]
    work, device = every[0].workload, every[0].device
    alike = [each for each in every if (each.workload, each.device) == (work, device)]
    shown = [each for each in alike if each.gate["green"] and each.timings_ms and each.memory_bytes]
    plot.write_bytes(memory_time(f"{work.shape}, {work.tokens:,} tokens, {device}", shown))


def table_of(results: Sequence[Result]) -> Table:
    table = Table("candidate", "gate", "peak, GiB", "step, ms", "times the first's")
    for each in results:
        if not each.timings_ms:
            table.add_row(each.candidate, " ".join(each.gate.get("reasons", ["failed"]))[:160])
            continue
        times = each.extra.get("paired_with", {}).get("step_ratio", [1.0])[0]
        peak = f"{each.memory_bytes.get('peak', 0) / GIB:.2f}"
        table.add_row(each.candidate, "green", peak, f"{each.median('step'):.1f}", f"{times:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a shape, or a model's folder")
    parser.add_argument("--method", choices=["lora", "qlora"], default="lora")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lengths", default="lognormal")
    parser.add_argument("--limits", type=int, default=0, help="how many limits of memory for Pronghorn")
    parser.add_argument("--cards", default="", help="limits for all, with commas")
    parser.add_argument("--against", default="", help="NAME:off|on|offload|auto, with commas")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--checkpoints", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("memory-time.json"))
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="measure nothing, draw these into --plot")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    if (given.draw is None) != (given.plot is None) or (given.draw is None) == (given.model is None):
        parser.error("give --model, or --draw and --plot")
    if given.draw:
        return draw(given.draw, given.plot)
    options = StepOptions(
        given.model, given.method, given.tokens, given.lengths, recompute="auto", repeats=given.repeats,
        checkpoints=given.checkpoints, commit=given.commit,
    )  # fmt: skip
    check_options(options)
    check_out(given.out)
    asked = groups(given)
    for *_, memory in [group[0] for group in asked]:
        check_options(replace(options, memory=memory))
    grow_segments()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), progress()
        prepared = prepare(options, folder, log)
        for group in asked:
            candidates = [candidate_of(each, prepared.spec) for each in group]
            on_result = keeper(given.out, earlier=tuple(results))
            results += measure(options, prepared, candidates, folder, log, on_result)
    write_results(results, given.out)
    Console().print(table_of(results))


if __name__ == "__main__":
    main()
