"""`pronghorn bench step`: what a training step costs, contender by contender, each in a process of its own.

    checkpoint, rows, ceilings, reference  ->  for each contender: load, gate  ->  A B A B ...  ->  results

Each contender is measured in a pair with the first, so that both saw the same minutes of the same machine.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pronghorn.bench.contenders import CONTENDERS, Spec
from pronghorn.bench.contenders.base import RANK, Experts, Method, Recompute
from pronghorn.bench.contenders.pronghorn import SWITCHES
from pronghorn.bench.pairs import Outcome, Pairs
from pronghorn.bench.process import Worker
from pronghorn.bench.record import Result, Workload, command_line
from pronghorn.bench.shapes import check_experts, check_model, shape_of
from pronghorn.bench.timing import spread
from pronghorn.bench.workload import Row, check_rows, make_rows, write_rows
from pronghorn.errors import ConfigError, UnsupportedError

LEAST_MEMORY = 2**30


@dataclass(frozen=True)
class StepOptions:
    """What `pronghorn bench step` was asked."""

    model: str
    method: Method = "lora"
    tokens: int = 8192
    lengths: str = "lognormal"
    labelled: float = 1.0
    recompute: Recompute = "off"
    memory: int | None = None
    """Bytes that each process may take of the GPU."""
    experts: Experts = "frozen"
    against: tuple[str, ...] = ()
    ablate: tuple[str, ...] = ()
    """Each a switch of Pronghorn, NAME=VALUE, or several joined by +."""
    repeats: int = 20
    seed: int = 0
    checkpoints: Path | None = None
    """Where written checkpoints are kept; None for a folder that goes when the run ends."""
    commit: str = "unknown"


@dataclass(frozen=True)
class Prepared:
    """What all contenders of a run share."""

    spec: Spec
    rows: list[Row]
    reference: Path
    ceilings: dict[str, float]
    matmul_parameters: int
    device: str
    device_bytes: int
    """Memory of the GPU, 0 without one."""


def check_options(options: StepOptions) -> dict[str, tuple[str, dict[str, str]]]:
    """Every contender's label with its name and switches, Pronghorn first.

    Raises:
        ConfigError: an unknown model, contender or switch (the known ones are listed), or a value out of range.
        DataError: a file of lengths that holds none.
        UnsupportedError: qlora without bitsandbytes.
    """
    check_model(options.model)
    check_rows(options.tokens, options.lengths, options.labelled)
    if options.experts == "lora" and options.method == "full":
        raise ConfigError("--experts lora with --method full: all weights are trained", "leave one of them out")
    if options.experts == "lora":
        check_experts(options.model)
    if options.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedError("--method qlora needs bitsandbytes", "pip install 'pronghorn[nf4]'")
    if options.memory is not None and options.memory < LEAST_MEMORY:
        given = f"--memory {options.memory / 2**20:.0f} MiB"
        raise ConfigError(f"{given} is less than CUDA and libraries take", "give 1GiB or more")
    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats} is below 1", "time at least one step, 20 is common")
    entrants: dict[str, tuple[str, dict[str, str]]] = {"pronghorn": ("pronghorn", {})}
    for ablation in options.ablate:
        switches = {name: value for name, _, value in (part.partition("=") for part in ablation.split("+"))}
        for name, value in switches.items():
            if value not in SWITCHES.get(name, ()):
                known = ", ".join(f"{name}={value}" for name, values in SWITCHES.items() for value in values)
                raise ConfigError(f"ablation {ablation!r} is unknown", f"use one of {known}, or some joined by +")
        entrants[f"pronghorn, {ablation.replace('+', ', ')}"] = ("pronghorn", switches)
    for name in options.against:
        if name not in CONTENDERS:
            raise ConfigError(f"contender {name!r} is unknown", f"use some of {', '.join(CONTENDERS)}")
        entrants.setdefault(name, (name, {}))
    return entrants


def bench_step(
    options: StepOptions,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    keep: Callable[[Sequence[Result]], None],
) -> list[Result]:
    """Measure; one result a contender, in the order asked for, also for those that failed or aren't installed.

    Args:
        environment: of every process that is started.
        say: told what is being done.
        keep: given the results so far after each contender.
    Raises:
        ConfigError, DataError: options that can't be served.
        WorkerError: the checkpoint or the reference could not be made.
    """
    entrants = check_options(options)
    with tempfile.TemporaryDirectory(prefix="pronghorn-bench-") as name:
        folder = Path(name)
        prepared = prepare(options, folder, environment, say)
        outcomes = [
            Outcome(label, replace(prepared.spec, contender=contender, switches=switches))
            for label, (contender, switches) in entrants.items()
        ]
        return measure(options, prepared, outcomes, folder, environment, say, keep)


def measure(
    options: StepOptions,
    prepared: Prepared,
    outcomes: Sequence[Outcome],
    folder: Path,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    keep: Callable[[Sequence[Result]], None],
) -> list[Result]:
    """The first outcome's contender by turns with each of the others."""

    def results() -> list[Result]:
        return [result_of(options, outcome, prepared) for outcome in outcomes if outcome.told]

    Pairs(
        folder / "rows.json", prepared.reference, folder, environment, options.repeats, prepared.device_bytes, say,
        keep=lambda: keep(results()),
    ).measure(outcomes[0], outcomes[1:])  # fmt: skip
    return results()


def prepare(options: StepOptions, folder: Path, environment: Mapping[str, str], say: Callable[[str], None]) -> Prepared:
    """Checkpoint, rows, ceilings and reference, in a process that ends before anything is measured."""
    with closing(Worker("prepare", environment, folder / "prepare.log")) as worker:
        say(f"checkpoint of {options.model}")
        kept = (options.checkpoints or folder).resolve()
        model = options.model if shape_of(options.model) else str(Path(options.model).resolve())
        made = worker.ask("checkpoint", model=model, folder=str(kept), seed=options.seed)
        rows = make_rows(options.tokens, options.lengths, options.labelled, made["vocab_size"], options.seed)
        write_rows(rows, folder / "rows.json")
        spec = Spec(
            contender="hf",
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
        say("ceilings of the device")
        ceilings = worker.ask("ceilings")
        say("reference in float32, document by document")
        arguments: dict[str, Any] = {"spec": spec.__dict__, "rows": str(folder / "rows.json")}
        reference = worker.ask("reference", **arguments, folder=str(folder))["path"]
    return Prepared(
        spec, rows, Path(reference), ceilings, made["matmul_parameters"], made["device"], made["device_bytes"]
    )


def recompute_label(spec: Spec) -> str:
    """What is recomputed, and in how much memory if less than all."""
    return spec.recompute + (f", {spec.memory / 2**30:.4g} GiB" if spec.memory is not None else "")


def result_of(options: StepOptions, outcome: Outcome, prepared: Prepared) -> Result:
    parts = outcome.series.parts
    supervised = sum(row.n_labels for row in prepared.rows) / len(prepared.rows)
    extra: dict[str, Any] = {
        "recompute": recompute_label(outcome.spec),
        "experts": options.experts,
        "rank": None if options.method == "full" else RANK,
        "documents": [len(row.lengths) for row in prepared.rows],
        "on_cpu": not prepared.device_bytes,
        "notes": [*outcome.loaded.get("notes", []), *outcome.notes],
    }
    if parts:
        second = spread(parts["step"])[0] / 1e3
        extra |= {
            "import_s": outcome.loaded["import_s"],
            "load_s": outcome.loaded["load_s"],
            "first_step_s": outcome.first_step_s,
            "tokens_per_s": {"real": options.tokens / second, "supervised": supervised / second},
            "beside": outcome.beside,
        }
        if prepared.ceilings:
            peak, n = prepared.ceilings["matmul_tflops"] * 1e12, prepared.matmul_parameters
            utilisation = {f"{times}N": times * n * options.tokens / second / peak for times in (4, 6)}
            counted = "weights that a token meets, with the head, without adapters and the embedding lookup"
            extra["mfu"] = {**utilisation, "N": n, "N_counts": counted, "peak": "the bf16 product of this run"}
    lengths = Path(options.lengths).name
    shape = Path(options.model).name
    return Result(
        command=command_line(),
        contender=outcome.label,
        workload=Workload(shape, options.method, options.tokens, lengths, options.labelled, options.seed),
        gate=outcome.gate,
        timings_ms=parts,
        memory_bytes=outcome.memory,
        counts=outcome.counts,
        ceilings=prepared.ceilings,
        extra=extra,
        commit=options.commit,
        versions=outcome.loaded.get("versions", {}),
        device=prepared.device,
    )
