"""Time a training step: Pronghorn's, and others' on the same weights, adapters, rows and optimiser.

Every candidate runs in a process of its own, by turns with Pronghorn. Before any clock starts its loss, gradients,
isolation of documents and weight updates are compared with plain transformers and PEFT in float32, document by
document; who fails is shown as failed and its figures are withheld. Ends with code 1 if Pronghorn itself fails.
Figures are medians with minimum and maximum. Without a GPU it runs on the CPU, and says so.

    python -m benchmarks.step --model Llama-3.2-1B --against unsloth,hf-compile --out llama-1b.json
    python -m benchmarks.step --model Qwen3-14B --method qlora --recompute on --checkpoints checkpoints
    python -m benchmarks.step --model Llama-3.2-1B --ablate layers=stock --ablate layers=stock+attention=flash
    python -m benchmarks.step --model Llama-3.2-1B --tree ../pronghorn-before
    python -m benchmarks.step --model tiny --tokens 256 --against hf

    checkpoint, rows, ceilings, reference  ->  for each candidate: load, gate  ->  A B A B ...  ->  results
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.candidates import CANDIDATES, Spec
from benchmarks.candidates.base import RANK, Experts, Method, Recompute, has_experts
from benchmarks.candidates.pronghorn import SWITCHES
from benchmarks.pairs import CandidateResult, PairedRunner
from benchmarks.program import names, parser_of, run
from benchmarks.record import Result, Workload, check_out, command_line, keeper, write_results
from benchmarks.reference import Reference
from benchmarks.tables import print_results, step_table
from benchmarks.timing import by_part, spread
from benchmarks.worker import ROOT, Worker
from benchmarks.workload import Row, check_rows
from pronghorn.cli.options import progress
from pronghorn.diagnose.shapes import check_model, shape_of
from pronghorn.environment import grow_segments
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.memory.devices import parse_bytes

LEAST_MEMORY = 2**30


@dataclass(frozen=True)
class StepOptions:
    """What `benchmarks.step` was asked."""

    model: str
    method: Method = "lora"
    tokens: int = 8192
    lengths: str = "lognormal"
    supervised: float = 1.0
    recompute: Recompute = "off"
    memory: int | None = None
    """Bytes of the GPU that each process may take."""
    experts: Experts = "frozen"
    against: tuple[str, ...] = ()
    ablate: tuple[str, ...] = ()
    """Each a switch of Pronghorn, NAME=VALUE, or several joined by +."""
    trees: tuple[Path, ...] = ()
    """Other checkouts of Pronghorn."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreters of candidates that have one of their own."""
    repeats: int = 20
    seed: int = 0
    checkpoints: Path | None = None
    """Where written checkpoints are kept; None for a folder that goes when the run ends."""
    commit: str = "unknown"


@dataclass(frozen=True)
class Prepared:
    """What all candidates of a run share."""

    spec: Spec
    rows: list[Row]
    reference: Reference
    ceilings: dict[str, float]
    matmul_parameters: int
    device: str
    device_bytes: int
    """Memory of the GPU, 0 without one."""


def candidates_of(options: StepOptions, spec: Spec) -> list[CandidateResult]:
    """Return every candidate that was asked for, Pronghorn first, and refuse what can't be served.

    Raises:
        ConfigError: an unknown model, candidate or switch (the known ones are listed), or a value out of range.
        DataError: a file of lengths that holds none.
        UnsupportedError: qlora without bitsandbytes.
    """
    check_model(options.model)
    check_rows(options.tokens, options.lengths, options.supervised)
    if options.experts == "lora":
        if options.method == "full":
            raise ConfigError("--experts lora with --method full: all weights are trained", "leave one of them out")
        if not has_experts(shape_of(options.model) or json.loads((Path(options.model) / "config.json").read_text())):
            raise ConfigError(f"--experts lora: {options.model} has no experts", "leave it out")
    if options.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedError("--method qlora needs bitsandbytes", "pip install 'pronghorn[nf4]'")
    if options.memory is not None and options.memory < LEAST_MEMORY:
        given = f"--memory {options.memory / 2**20:.0f} MiB"
        raise ConfigError(f"{given} is less than CUDA and libraries take", "give 1GiB or more")
    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats} is below 1", "time at least one step, 20 is common")
    for name, python in options.pythons.items():
        if shutil.which(python) is None:
            raise ConfigError(f"--python {name}={python} is not a program", "give the path of an interpreter")
    for name in (*options.against, *options.pythons):
        if name not in CANDIDATES:
            raise ConfigError(f"candidate {name!r} is unknown", f"use some of {', '.join(CANDIDATES)}")

    def candidate(label: str, name: str = "pronghorn", tree: Path = ROOT, **switches: str) -> CandidateResult:
        own = replace(spec, candidate=name, switches=switches)
        return CandidateResult(label, own, options.pythons.get(name, sys.executable), tree)

    candidates = [candidate("pronghorn")]
    for ablation in options.ablate:
        switches = {name: value for name, _, value in (part.partition("=") for part in ablation.split("+"))}
        if any(value not in SWITCHES.get(name, ()) for name, value in switches.items()):
            known = ", ".join(f"{name}={value}" for name, values in SWITCHES.items() for value in values)
            raise ConfigError(f"ablation {ablation!r} is unknown", f"use one of {known}, or some joined by +")
        candidates.append(candidate(f"pronghorn, {ablation.replace('+', ', ')}", **switches))
    for tree in options.trees:
        if not (tree / "benchmarks/worker.py").is_file():
            raise ConfigError(f"--tree {tree} has no benchmarks/worker.py", "give a checkout's root folder")
        candidates.append(candidate(f"pronghorn, tree {tree.resolve().name}", tree=tree.resolve()))
    return candidates + [candidate(name, name) for name in dict.fromkeys(options.against) if name != "pronghorn"]


def spec_of(options: StepOptions) -> Spec:
    """Return what every candidate is asked to build, but for the checkpoint and what its rows tell."""
    return Spec(
        candidate="pronghorn",
        checkpoint="",
        method=options.method,
        recompute=options.recompute,
        tokens=options.tokens,
        longest=0,
        documents=0,
        seed=options.seed,
        experts=options.experts,
        memory=options.memory,
    )


def bench_step(
    options: StepOptions, log: Callable[[str], None], on_result: Callable[[Sequence[Result]], None]
) -> list[Result]:
    """Measure; return one result a candidate, in the order asked for, also for those that failed.

    Args:
        log: takes a line about what is being done.
        on_result: takes the results so far after each candidate.
    Raises:
        ConfigError, DataError: options that can't be served.
        WorkerError: the checkpoint or the reference could not be made.
    """
    candidates_of(options, spec_of(options))
    with tempfile.TemporaryDirectory(prefix="pronghorn-bench-") as name:
        prepared = prepare(options, Path(name), log)
        return measure(options, prepared, candidates_of(options, prepared.spec), Path(name), log, on_result)


def measure(
    options: StepOptions,
    prepared: Prepared,
    candidates: Sequence[CandidateResult],
    folder: Path,
    log: Callable[[str], None],
    on_result: Callable[[Sequence[Result]], None],
) -> list[Result]:
    """Measure the first candidate by turns with each of the others."""

    def results() -> list[Result]:
        return [result_of(options, candidate, prepared) for candidate in candidates if candidate.known]

    runner = PairedRunner(
        prepared.rows, prepared.reference, folder, options.repeats, prepared.device_bytes, log,
        on_result=lambda: on_result(results()),
    )  # fmt: skip
    runner.run(candidates[0], candidates[1:])
    return results()


def prepare(options: StepOptions, folder: Path, log: Callable[[str], None]) -> Prepared:
    """Make checkpoint, rows, ceilings and reference, in a process that ends before anything is measured."""
    log(f"checkpoint of {options.model}, ceilings of the device, reference in float32, document by document")
    model = options.model if shape_of(options.model) else str(Path(options.model).resolve())
    checkpoints = (options.checkpoints or folder).resolve()
    with closing(Worker(folder / "prepare.log")) as worker:
        made = worker.call(
            "prepare", model=model, folder=checkpoints, lengths=options.lengths, supervised=options.supervised,
            spec=spec_of(options),
        )  # fmt: skip
    return Prepared(**made)


def recompute_label(spec: Spec) -> str:
    """Tell what is recomputed, and in how much memory if less than all."""
    return spec.recompute + (f", {spec.memory / 2**30:.4g} GiB" if spec.memory is not None else "")


def result_of(options: StepOptions, candidate: CandidateResult, prepared: Prepared) -> Result:
    """Make the result of what became of a candidate."""
    parts = by_part(candidate.turns)
    supervised = sum(row.n_labels for row in prepared.rows) / len(prepared.rows)
    extra: dict[str, Any] = {
        "recompute": recompute_label(candidate.spec),
        "experts": options.experts,
        "rank": None if options.method == "full" else RANK,
        "documents": [len(row.lengths) for row in prepared.rows],
        "on_cpu": not prepared.device_bytes,
        "notes": [*candidate.loaded.get("notes", []), *candidate.notes],
    }
    if parts:
        second = spread(parts["step"])[0] / 1e3
        extra |= {
            "import_s": candidate.loaded["import_s"],
            "load_s": candidate.loaded["load_s"],
            "first_step_s": candidate.first_step_s,
            "tokens_per_s": {"real": options.tokens / second, "supervised": supervised / second},
            "paired_with": candidate.paired_with,
        }
        if prepared.ceilings:
            peak, n = prepared.ceilings["matmul_tflops"] * 1e12, prepared.matmul_parameters
            utilisation = {f"{times}N": times * n * options.tokens / second / peak for times in (4, 6)}
            counted = "weights that a token meets, with the head, without adapters and the embedding lookup"
            extra["mfu"] = {**utilisation, "N": n, "N_counts": counted, "peak": "the bf16 product of this run"}
    shape, lengths = Path(options.model).name, Path(options.lengths).name
    return Result(
        command=command_line(),
        candidate=candidate.label,
        workload=Workload(shape, options.method, options.tokens, lengths, options.supervised, options.seed),
        gate=candidate.gate,
        timings_ms=parts,
        memory_bytes=candidate.memory,
        counts=candidate.counts,
        ceilings=prepared.ceilings,
        extra=extra,
        commit=options.commit,
        versions=candidate.loaded.get("versions", {}),
        device=prepared.device,
    )


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--model", required=True, metavar="SHAPE|PATH",
        help="a known shape with random weights (SHAPE@12: its first 12 layers), or a model's folder",
    )  # fmt: skip
    parser.add_argument("--method", choices=get_args(Method), default="lora", help="LoRA's rank is 16")
    parser.add_argument("--tokens", type=int, default=8192, help="of a packed row, one row a step")
    parser.add_argument(
        "--lengths", default="lognormal", metavar="FILE|lognormal|one",
        help="of documents: a JSON list to draw from, log-normal (mean about 180), or one document a row",
    )  # fmt: skip
    parser.add_argument(
        "--supervised", type=float, default=1.0, help="share of each document's tokens with labels, from its end"
    )
    parser.add_argument(
        "--recompute", choices=get_args(Recompute), default="off",
        help="recompute layers in the backward pass; offload also moves their inputs to the host; auto is each one's "
        "own default: Pronghorn's plan, Unsloth's offloading, and recomputing for the others",
    )  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE", help="of the GPU for each, as on a smaller card: 8GiB, say")
    parser.add_argument(
        "--experts", choices=get_args(Experts), default="frozen", help="whether experts get adapters, too"
    )
    parser.add_argument("--against", type=names, default=(), metavar="NAMES", help=f"{', '.join(CANDIDATES)}")
    parser.add_argument(
        "--ablate", action="append", default=[], metavar="NAME=VALUE",
        help="Pronghorn with a switch turned, as one more candidate; several joined by +; can be repeated: "
        + "; ".join(f"{name}={'|'.join(values)}" for name, values in SWITCHES.items()),
    )  # fmt: skip
    parser.add_argument(
        "--tree", action="append", default=[], type=Path, metavar="DIR",
        help="Pronghorn of another checkout, measured by its own benchmarks, as one more candidate; can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH",
        help="another interpreter for a candidate, with its own packages; can be repeated",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each candidate in a pair")
    parser.add_argument("--seed", type=int, default=0, help="of random weights, adapters and tokens")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="keep written ones here, and use those there")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Measure, write and show; tell whether Pronghorn's gate was green."""
    check_out(given.out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, or a checkpoint of many GB stays behind
    grow_segments()
    asked = dict(vars(given))
    for name in ("out", "debug", "tree", "python"):
        del asked[name]
    asked["memory"] = None if given.memory is None else parse_bytes(given.memory, "--memory")
    asked |= {"ablate": tuple(given.ablate), "trees": tuple(given.tree)}
    options = StepOptions(**asked, pythons=dict(entry.partition("=")[::2] for entry in given.python))
    results = bench_step(options, progress(), keeper(given.out))
    write_results(results, given.out)
    title = f"{results[0].workload.shape}, {options.method}, {options.tokens} tokens a step ({options.lengths}, "
    title += f"{options.supervised:.0%} supervised), recompute {results[0].extra['recompute']}"
    print_results(results, step_table(results), title)
    return bool(results[0].gate["green"])


if __name__ == "__main__":
    run(arguments, main)
