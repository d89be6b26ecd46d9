"""Measure what memory costs in time: Pronghorn's `auto` within several limits, against other ways and others' modes.

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

from benchmarks.candidates import CANDIDATES, Spec
from benchmarks.candidates.base import Recompute
from benchmarks.pairs import CandidateResult
from benchmarks.plots import memory_time
from benchmarks.program import names, parser_of, run
from benchmarks.record import Result, check_out, keeper, read_results, write_results
from benchmarks.step import StepOptions, candidates_of, measure, prepare, recompute_label, spec_of
from benchmarks.tables import print_results, step_table
from pronghorn.cli.options import progress
from pronghorn.diagnose.shapes import shape_of
from pronghorn.environment import grow_segments
from pronghorn.errors import ConfigError
from pronghorn.memory.devices import parse_bytes
from pronghorn.memory.estimate import MemoryModel, Method, TrainSetup
from pronghorn.memory.plan import Policy
from pronghorn.models import auto_plan
from pronghorn.train import weightless


def limits(model: str, method: Method, tokens: int, count: int) -> list[int]:
    """Return limits evenly from what the smallest plan takes to what keeping everything does, in MiB steps."""
    from transformers import AutoConfig

    fields = shape_of(model)
    config: Any = AutoConfig.from_pretrained(model) if fields is None else AutoConfig.for_model(**fields)
    shape = auto_plan.dims_of(weightless.skeleton(config))
    step = MemoryModel.of(shape, TrainSetup(tokens, method, accumulates=False))
    ends = ((policy,) * len(shape.layers) for policy in (Policy.OFFLOAD, Policy.KEEP))
    least, most = (step.process(step.peak(policies, 1)) for policies in ends)
    return [round((least + (most - least) * i / max(count - 1, 1)) / 2**20 + 1) * 2**20 for i in range(count)]


Asked = tuple[str, Any, int | None]
"""(candidate, what it recomputes, the limit of its memory in bytes)."""


def groups(given: argparse.Namespace) -> list[list[Asked]]:
    """Return who is measured by turns with the first of the group."""
    others = [name.partition(":")[::2] for name in given.against]
    for name, mode in others:
        if name not in CANDIDATES or mode not in get_args(Recompute):
            modes = "|".join(get_args(Recompute))
            raise ConfigError(f"--against {name}:{mode} is unknown", f"use NAME:{modes} with {', '.join(CANDIDATES)}")
    if given.cards:
        sizes = [parse_bytes(size, "--cards") for size in given.cards]
        return [[("pronghorn", "auto", size), *((*other, size) for other in others)] for size in sizes]
    sizes = limits(given.model, given.method, given.tokens, given.limits)
    limited: list[Asked] = [("pronghorn", "auto", size) for size in (None, *sizes)]
    return [[*limited, *((*other, None) for other in others)]]


def candidate_of(asked: Asked, spec: Spec) -> CandidateResult:
    """Return a candidate that was asked for, nothing measured yet."""
    candidate, mode, memory = asked
    spec = replace(spec, candidate=candidate, recompute=mode, memory=memory)
    return CandidateResult(f"{candidate}, {recompute_label(spec)}", spec)


def draw(files: Sequence[Path], plot: Path) -> None:
    """Draw the results of the first one's workload and device; red gates are left out."""
    results = [result for file in files for result in read_results(file)]
    work, device = results[0].workload, results[0].device
    alike = [result for result in results if (result.workload, result.device) == (work, device)]
    drawn = [result for result in alike if result.shown and result.memory_bytes]
    plot.write_bytes(memory_time(f"{work.shape}, {work.tokens:,} tokens, {device}", drawn))


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a shape, or a model's folder")
    parser.add_argument("--method", choices=["lora", "qlora"], default="lora")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lengths", default="lognormal")
    parser.add_argument("--limits", type=int, default=0, help="how many limits of memory for Pronghorn")
    parser.add_argument("--cards", type=names, default=(), help="limits for all, with commas")
    parser.add_argument("--against", type=names, default=(), help="NAME:off|on|offload|auto, with commas")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="measure nothing, draw these into --plot")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    return parser


def main(given: argparse.Namespace) -> None:
    """Measure each group by turns, or draw results."""
    if (given.draw is None) != (given.plot is None) or (given.draw is None) == (given.model is None):
        raise ConfigError("--model, --draw and --plot don't go together so", "give --model, or --draw and --plot")
    if given.draw:
        return draw(given.draw, given.plot)
    options = StepOptions(
        given.model, given.method, given.tokens, given.lengths, recompute="auto", repeats=given.repeats,
        checkpoints=given.checkpoints, commit=given.commit,
    )  # fmt: skip
    candidates_of(options, spec_of(options))
    check_out(given.out)
    asked = groups(given)
    for (_, _, memory), *_ in asked:
        candidates_of(replace(options, memory=memory), spec_of(options))
    grow_segments()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), progress()
        prepared = prepare(options, folder, log)
        for group in asked:
            candidates = [candidate_of(entry, prepared.spec) for entry in group]
            on_result = keeper(given.out, earlier=tuple(results))
            results += measure(options, prepared, candidates, folder, log, on_result)
    write_results(results, given.out)
    print_results(results, step_table(results), f"{given.model}, {given.tokens} tokens a step")


if __name__ == "__main__":
    run(arguments, main)
