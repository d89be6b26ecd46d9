"""Time a training step of several candidates, each in a process of its own: `python -m benchmarks.step`.

    checkpoint, rows, ceilings, reference  ->  for each candidate: load, gate  ->  A B A B ...  ->  results

Each candidate is measured in a pair with the first, so that both saw the same minutes of the same machine.
"""

from __future__ import annotations

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
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from benchmarks.candidates import CANDIDATES, Spec
from benchmarks.candidates.base import RANK, Experts, Method, Recompute, has_experts
from benchmarks.candidates.pronghorn import SWITCHES
from benchmarks.options import Commit, Results, names
from benchmarks.pairs import CandidateResult, PairedRunner
from benchmarks.record import Result, Workload, check_out, command_line, keeper, write_results
from benchmarks.reference import Reference
from benchmarks.tables import step_table
from benchmarks.timing import by_part, spread
from benchmarks.worker import Worker
from benchmarks.workload import Row, check_rows, make_rows
from pronghorn.cli import options as shared
from pronghorn.cli.errors import plain_errors
from pronghorn.diagnose.shapes import check_model, shape_of
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


def check_options(options: StepOptions) -> dict[str, tuple[str, dict[str, str]]]:
    """Return every candidate's label with its name and switches, Pronghorn first.

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
    candidates: dict[str, tuple[str, dict[str, str]]] = {"pronghorn": ("pronghorn", {})}
    for ablation in options.ablate:
        switches = {name: value for name, _, value in (part.partition("=") for part in ablation.split("+"))}
        for name, value in switches.items():
            if value not in SWITCHES.get(name, ()):
                known = ", ".join(f"{name}={value}" for name, values in SWITCHES.items() for value in values)
                raise ConfigError(f"ablation {ablation!r} is unknown", f"use one of {known}, or some joined by +")
        candidates[f"pronghorn, {ablation.replace('+', ', ')}"] = ("pronghorn", switches)
    for name in (*options.against, *options.pythons):
        if name not in CANDIDATES:
            raise ConfigError(f"candidate {name!r} is unknown", f"use some of {', '.join(CANDIDATES)}")
    for name, python in options.pythons.items():
        if shutil.which(python) is None:
            raise ConfigError(f"--python {name}={python} is no program", "give the path of an interpreter")
    return candidates | {name: (name, {}) for name in options.against if name != "pronghorn"}


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
    candidates = check_options(options)
    with tempfile.TemporaryDirectory(prefix="pronghorn-bench-") as name:
        prepared = prepare(options, Path(name), log)
        found = [
            CandidateResult(
                label,
                replace(prepared.spec, candidate=candidate, switches=switches),
                options.pythons.get(candidate, sys.executable),
            )
            for label, (candidate, switches) in candidates.items()
        ]
        return measure(options, prepared, found, Path(name), log, on_result)


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
    with closing(Worker("prepare", folder / "prepare.log")) as worker:
        log(f"checkpoint of {options.model}")
        kept = (options.checkpoints or folder).resolve()
        model = options.model if shape_of(options.model) else str(Path(options.model).resolve())
        made = worker.call("checkpoint", model=model, folder=kept, seed=options.seed)
        rows = make_rows(options.tokens, options.lengths, options.supervised, made["vocab_size"], options.seed)
        spec = Spec(
            candidate="hf",
            checkpoint=made["path"],
            method=options.method,
            recompute=options.recompute,
            memory=options.memory,
            tokens=options.tokens,
            longest=max(max(row.lengths) for row in rows),
            documents=max(len(row.lengths) for row in rows),
            seed=options.seed,
            experts=options.experts,
        )
        log("ceilings of the device")
        ceilings = worker.call("ceilings")
        log("reference in float32, document by document")
        reference = worker.call("reference", spec=spec, row=rows[0], folder=folder)
    return Prepared(spec, rows, reference, ceilings, made["matmul_parameters"], made["device"], made["device_bytes"])


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


app = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)


@app.command(no_args_is_help=True)
def step(
    model: Annotated[
        str,
        typer.Option(
            metavar="SHAPE|PATH",
            help="A known shape with random weights (SHAPE@12: its first 12 layers), or a model's folder.",
        ),
    ],
    method: shared.Method = "lora",
    tokens: Annotated[int, typer.Option(help="Tokens of a packed row, one row a step.")] = 8192,
    lengths: Annotated[
        str,
        typer.Option(
            metavar="FILE|lognormal|one",
            help="Document lengths: a JSON list to draw from, log-normal (mean about 180), or one document a row.",
        ),
    ] = "lognormal",
    supervised: Annotated[
        float, typer.Option(help="Share of each document's tokens that have labels, from its end.")
    ] = 1.0,
    recompute: Annotated[
        Literal["off", "on", "offload", "auto"],
        typer.Option(
            help="Recompute layers in the backward pass; offload also moves their inputs to the host; auto is each "
            "one's own default: Pronghorn's plan, Unsloth's offloading, and recomputing for the others."
        ),
    ] = "off",
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What each may take of the GPU, as on a smaller card: 8GiB, say."),
    ] = None,
    experts: Annotated[
        Literal["frozen", "lora"], typer.Option(help="Whether experts get adapters too; by default attention alone.")
    ] = "frozen",
    against: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="hf, hf-compile, hf-flex, hf-sdpa, liger, liger-sdpa, unsloth; with commas."
        ),
    ] = "",
    ablate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Pronghorn with a switch turned, as one more candidate: layers=stock, packing_metadata=per_layer, "
            "attention=masked, offload_buffers=1; several joined by +. Can be repeated.",
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="Another interpreter for a candidate, with its own packages. Can be repeated."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each candidate in a pair.")] = 20,
    seed: shared.Seed = 0,
    checkpoints: shared.Checkpoints = None,
    out: Results = None,
    commit: Commit = "unknown",
    debug: shared.Debug = False,
) -> None:
    """Time a training step: Pronghorn's, and others' on the same weights, adapters, rows and optimiser.

    Every candidate runs in a process of its own, by turns with Pronghorn. Before any clock starts its loss, gradients,
    isolation of documents and weight updates are compared with plain transformers and PEFT in float32, document by
    document; who fails is shown as failed and its figures are withheld. Ends with code 1 if Pronghorn itself fails.

    Figures are medians with minimum and maximum. Without a GPU it runs on the CPU, and says so.

    [bold]Examples[/]

      python -m benchmarks.step --model Llama-3.2-1B --against unsloth,hf-compile --out llama-1b.json

      python -m benchmarks.step --model Qwen3-14B --method qlora --recompute on --checkpoints checkpoints

      python -m benchmarks.step --model Llama-3.2-1B --ablate layers=stock --ablate layers=stock+attention=flash

      python -m benchmarks.step --model tiny --tokens 256 --against hf
    """
    with plain_errors(debug):
        check_out(out)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, or a checkpoint of many GB stays behind
        shared.grow_segments()
        options = StepOptions(
            model=model,
            method=method,
            tokens=tokens,
            lengths=lengths,
            supervised=supervised,
            recompute=recompute,
            memory=None if memory is None else parse_bytes(memory, "--memory"),
            experts=experts,
            against=names(against),
            ablate=tuple(ablate or ()),
            pythons=dict(each.partition("=")[::2] for each in python or ()),
            repeats=repeats,
            seed=seed,
            checkpoints=checkpoints,
            commit=commit,
        )
        results = bench_step(options, shared.progress(), keeper(out))
        write_results(results, out)
        Console().print(step_table(results))
    if not results[0].gate["green"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
