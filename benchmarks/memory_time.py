"""What memory costs in time: Pronghorn's `auto` within several limits, against other ways and others' modes.

    python benchmarks/memory_time.py --model Llama-3.1-8B --limits 8 --against unsloth:off,unsloth:auto,hf:on
    python benchmarks/memory_time.py --model Llama-3.2-1B --cards 8GiB,12GiB,16GiB,24GiB --against unsloth:auto
    python benchmarks/memory_time.py --model Llama-3.1-8B --draw A.json B.json --plot memory-time.svg

`--limits 8` gives as many, evenly from the least that the model trains in to what keeping everything takes; each is the
limit of Pronghorn's own process, and all alternate with Pronghorn without a limit. `--cards` gives the same limit to
all, each card by itself. A contender is measured as by `pronghorn bench step`: gate first, in a process of its own.
`--draw` only draws results of this program and of `bench step`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from pronghorn.bench.contenders import CONTENDERS
from pronghorn.bench.contenders.base import Recompute
from pronghorn.bench.pairs import Outcome, Pairs
from pronghorn.bench.record import Result, read_results, write_results
from pronghorn.bench.shapes import shape_of
from pronghorn.bench.step import Prepared, StepOptions, check_options, prepare, recompute_label, result_of
from pronghorn.cli.bench import CHILD_ENVIRONMENT
from pronghorn.cli.options import grow_segments, progress
from pronghorn.memory.devices import parse_bytes
from pronghorn.memory.estimate import GIB, Method, Step, Work
from pronghorn.memory.plan import Policy
from pronghorn.models import auto_plan


def limits(model: str, method: Method, tokens: int, count: int) -> list[int]:
    """Evenly from what the smallest plan takes to what keeping everything does, in MiB steps."""
    from transformers import AutoConfig

    fields = shape_of(model)
    config: Any = AutoConfig.from_pretrained(model) if fields is None else AutoConfig.for_model(**fields)
    shape = auto_plan.shape_of(auto_plan.skeleton(config))
    step = Step.of(shape, Work(tokens, method, accumulates=False))
    ends = ((policy,) * shape.layers for policy in (Policy.OFFLOAD, Policy.KEEP))
    least, most = (step.process(policies, step.peak(policies, 1)) for policies in ends)
    return [round((least + (most - least) * i / max(count - 1, 1)) / 2**20 + 1) * 2**20 for i in range(count)]


def groups(given: argparse.Namespace, prepared: Prepared) -> list[list[Outcome]]:
    """Contenders that are measured by turns with the first of their group."""

    def outcome(contender: str, mode: Any, memory: int | None) -> Outcome:
        spec = replace(prepared.spec, contender=contender, recompute=mode, memory=memory)
        return Outcome(f"{contender}, {recompute_label(spec)}", spec)

    others = [name.partition(":")[::2] for name in given.against.split(",") if name]
    for name, mode in others:
        if name not in CONTENDERS or mode not in get_args(Recompute):
            modes = "|".join(get_args(Recompute))
            raise SystemExit(f"--against {name}:{mode} is unknown: use NAME:{modes} with {', '.join(CONTENDERS)}")
    if given.cards:
        sizes = [parse_bytes(size, "--cards") for size in given.cards.split(",")]
        return [[outcome("pronghorn", "auto", size), *(outcome(*other, size) for other in others)] for size in sizes]
    sizes = limits(given.model, given.method, given.tokens, given.limits)
    return [
        [
            outcome("pronghorn", "auto", None),
            *(outcome("pronghorn", "auto", size) for size in sizes),
            *(outcome(*other, None) for other in others),
        ]
    ]


def draw(title: str, results: Sequence[Result], file: Path) -> None:
    """Step time over peak memory; down and left is better."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for each in results:
        if each.timings_ms and each.memory_bytes:  # a CPU tells no memory
            mode = each.extra["recompute"]
            name = each.contender.partition(",")[0] + (", auto" if mode.startswith("auto,") else "")
            lines.setdefault(name, []).append((each.memory_bytes["peak"] / GIB, each.median("step"), mode))
    for name, points in lines.items():
        x, y, modes = zip(*sorted(points), strict=True)
        axes.plot(x, y, "o-" if name.endswith("auto") else "o", markersize=4, linewidth=1.2, label=name)
        for place, mode in zip(zip(x, y, strict=True), modes, strict=True):
            if not name.startswith("pronghorn"):
                axes.annotate(mode, place, xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.set(title=title, xlabel="peak memory, GiB", ylabel="step, ms")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")


def table_of(results: Sequence[Result]) -> Table:
    table = Table("contender", "gate", "peak, GiB", "step, ms", "times the first's")
    for each in results:
        if not each.timings_ms:
            table.add_row(each.contender, " ".join(each.gate.get("reasons", ["failed"]))[:160])
            continue
        times = each.extra.get("beside", {}).get("step_ratio", [1.0])[0]
        peak = f"{each.memory_bytes.get('peak', 0) / GIB:.2f}"
        table.add_row(each.contender, "green", peak, f"{each.median('step'):.1f}", f"{times:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shape, or a model's folder")
    parser.add_argument("--method", choices=["lora", "qlora"], default="lora")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lengths", default="lognormal")
    parser.add_argument("--limits", type=int, default=0, help="how many limits of memory for Pronghorn")
    parser.add_argument("--cards", default="", help="limits for all, with commas")
    parser.add_argument("--against", default="", help="NAME:off|on|offload|auto, with commas")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--checkpoints", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("memory-time.json"))
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="measure nothing, draw these into --plot")
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    console = Console()
    if given.draw:
        if given.plot is None:
            parser.error("--draw needs --plot FILE")
        results = [each for file in given.draw for each in read_results(file) if each.workload.shape == given.model]
        return draw(f"{given.model}, {given.tokens:,} tokens, {results[0].device}", results, given.plot)
    options = StepOptions(
        given.model, given.method, given.tokens, given.lengths, recompute="auto", repeats=given.repeats,
        checkpoints=given.checkpoints, commit=given.commit,
    )  # fmt: skip
    check_options(options)
    grow_segments()
    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    environment = {**os.environ, **CHILD_ENVIRONMENT, "PYTHONPATH": paths}
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tell = progress()
        prepared = prepare(options, folder, environment, tell)
        for group in groups(given, prepared):

            def say(text: str, group: list[Outcome] = group, earlier: Sequence[Result] = tuple(results)) -> None:
                """Whatever is complete is written: a long run may be cut off."""
                tell(text)
                complete = [result_of(options, each, prepared) for each in group if each.series.turns]
                write_results([*earlier, *complete], given.out)

            rows = folder / "rows.json"
            pairs = Pairs(rows, prepared.reference, folder, environment, given.repeats, prepared.device_bytes, say)
            pairs.measure(group[0], group[1:])
            results += [result_of(options, outcome, prepared) for outcome in group]
            write_results(results, given.out)
    console.print(table_of(results))
    if given.plot is not None:
        draw(f"{given.model}, {given.method}, {given.tokens:,} tokens, {results[0].device}", results, given.plot)


if __name__ == "__main__":
    main()
