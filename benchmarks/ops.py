"""Time each kernel against its formula in plain torch, that compiled, and Liger's: `python -m benchmarks.ops`."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.op_case import Case, Way, by_autograd
from benchmarks.op_gate import OpCandidate, describe, free_memory, judge
from benchmarks.op_list import OPS, cases
from benchmarks.options import Commit, Results, names
from benchmarks.record import Result, Workload, check_out, command_line, keeper, write_results
from benchmarks.tables import ops_table
from benchmarks.timing import Clock, CudaClock, HostClock, spread
from pronghorn.cli.errors import plain_errors
from pronghorn.cli.options import Debug, grow_segments, progress
from pronghorn.device import versions
from pronghorn.errors import ConfigError

OTHERS = ("compile", "liger")
WARM = 3
"""Untimed rounds."""
HEAD_START, OF_A_CALL = 1_000_000, 40_000
"""Clock cycles, about half a millisecond and 20 µs for each of `Case.calls`, that the GPU waits before a timed part:
the host has launched all of it by then, so that the device's work is measured and not the host's."""
LONGER = 1, 2, 4, 8
"""Times as long a wait, where the host, busy with other things, had not."""
LATE = "the host was late, however long the GPU waited: some times are the host's"


@dataclass(frozen=True)
class OpsOptions:
    """What is asked for."""

    ops: tuple[str, ...] = ()
    """Empty: all."""
    tokens: int | None = None
    """Rows T; None: 8192 on a GPU, 64 on the CPU."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    repeats: int = 20
    against: tuple[str, ...] | None = None
    """None: all on a GPU; nobody on the CPU, where compiling takes longer than all the rest."""
    commit: str = "unknown"


class Stopwatch:
    """Times parts on the current device, each with cold caches."""

    def __init__(self, device: str) -> None:
        self._clock: Clock = HostClock()
        self._flush: Tensor | None = None
        self.late = False
        """Whether the GPU had to wait for the host in what was timed last."""
        if device == "cuda":
            self._clock = CudaClock()
            cache = torch.cuda.get_device_properties().L2_cache_size
            self._flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)

    def timed(self, way: Way, calls: int = 0) -> dict[str, float]:
        """Milliseconds of one forward and one backward on fresh inputs; `calls` as a case's. Where the host was late,
        once more with a longer wait."""
        for longer in LONGER:
            self.late = False
            state, forward = self._part(functools.partial(way.forward, way.start()), calls, longer)
            times = {"forward": forward}
            if way.backward is not None:
                _, times["backward"] = self._part(functools.partial(way.backward, state), calls, longer)
            if not self.late:
                break
        return {**times, "step": sum(times.values())}

    def _part(self, work: Callable[[], Any], calls: int, longer: int) -> tuple[Any, float]:
        """What `work` returns, and its milliseconds.

        The cache is filled with written lines, as it is in training: what a part leaves there unwritten at its end it
        pays for at its start. Then the GPU is held until the host is ahead.
        """
        held = []
        began = time.perf_counter()
        if self._flush is not None:
            self._flush.zero_()
            held = [self._clock.mark()]
            torch.cuda._sleep(longer * (HEAD_START + calls * OF_A_CALL))
        marks = [*held, self._clock.mark()]
        result = work()
        marks.append(self._clock.mark())
        launching = (time.perf_counter() - began) * 1e3
        *waited, milliseconds = self._clock.milliseconds(marks)
        self.late = self.late or any(launching > wait for wait in waited)
        return result, milliseconds


def check_options(options: OpsOptions) -> OpsOptions:
    """The options with what was left open filled in.

    Raises:
        ConfigError: an unknown op or candidate (the known ones are listed), a number below 1.
    """
    known = {"--op": (options.ops, tuple(OPS)), "--against": (options.against or (), OTHERS)}
    for flag, (given, allowed) in known.items():
        for name in given:
            if name not in allowed:
                raise ConfigError(f"{flag} {name} is unknown", f"use {', '.join(allowed)}")
    cuda = torch.cuda.is_available()
    tokens = options.tokens if options.tokens is not None else 8192 if cuda else 64
    for flag, value in (("--tokens", tokens), ("--repeats", options.repeats)):
        if value < 1:
            raise ConfigError(f"{flag} {value} is below 1", "give a positive number")
    against = options.against if options.against is not None else OTHERS if cuda else ()
    ops = tuple(dict.fromkeys(options.ops or OPS))
    return replace(options, ops=ops, tokens=tokens, against=tuple(dict.fromkeys(against)))


def bench_ops(
    options: OpsOptions, log: Callable[[str], None], on_result: Callable[[Sequence[Result]], None]
) -> list[Result]:
    """Measure; return one result per op, shape and candidate, also for those that failed or aren't installed.

    A case that fails as a whole is a failure of Pronghorn's, with its reason.

    Args:
        log: takes a line about what is being done.
        on_result: takes the results so far after each case.
    Raises:
        ConfigError: options that can't be served.
    """
    options = check_options(options)
    assert options.tokens is not None and options.against is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    watch = Stopwatch(device)
    results: list[Result] = []
    for op in options.ops:
        for sizes, make in cases(op, options.tokens, device, getattr(torch, options.dtype)).items():
            log(f"{op} {sizes}")
            try:
                results += _results(make(), options, watch, device)
            except Exception as error:  # memory that a small card hasn't, say: the other cases are measured
                lost = OpCandidate("pronghorn", _pronghorn)
                lost.fail(describe(error))
                results.append(_result(op, sizes, options.tokens, False, lost, options, device))
                free_memory()
            on_result(results)
    return results


def _results(case: Case, options: OpsOptions, watch: Stopwatch, device: str) -> list[Result]:
    candidates = measure(case, options.against or (), options.repeats, watch, device)
    product = case.product is not None
    return [_result(case.op, case.shape, case.tokens, product, candidate, options, device) for candidate in candidates]


def measure(case: Case, against: Sequence[str], repeats: int, watch: Stopwatch, device: str) -> list[OpCandidate]:
    """One case: the gate, then times by turns, then the ceiling at the same size."""
    torch.compiler.reset()  # shapes of other cases are none of this one's business
    candidates = [
        OpCandidate("pronghorn", _pronghorn),
        OpCandidate("torch", lambda some: by_autograd(some, some.formula)),
        *(_other(name, case, device) for name in against),
    ]
    if device != "cuda":
        candidates[0].notes.append("the torch code that Pronghorn runs on a CPU; its Triton kernel needs a GPU")
    judge(case.small or case, [candidate for candidate in candidates if not candidate.gate])
    ways: dict[str, Way] = {}
    for turn in range(WARM + repeats):
        for candidate in [candidate for candidate in candidates if candidate.gate["green"]]:
            try:
                if candidate.name not in ways:
                    ways[candidate.name] = candidate.make(case)
                times = watch.timed(ways[candidate.name], case.calls)
            except Exception as error:  # whatever a library raises is for the table to tell
                candidate.fail(describe(error))
                free_memory()
                continue
            if watch.late and turn >= WARM and LATE not in candidate.notes:
                candidate.notes.append(LATE)
            for part, ms in times.items() if turn >= WARM else ():
                candidate.timings.setdefault(part, []).append(ms)
    timed = [candidate for candidate in candidates if candidate.timings]
    for candidate in timed:
        work = ways[candidate.name].work
        candidate.work = {part: amount for part, amount in zip(("forward", "backward"), work, strict=True) if amount}
        if case.work[1] and not work[1]:
            candidate.notes.append("makes the gradients of cross-entropies in the forward")
    try:
        _ceilings(case, timed, repeats, watch)
    except torch.OutOfMemoryError as error:
        for candidate in timed:
            candidate.notes.append(f"no ceiling: {describe(error)}")
    return candidates


def _other(name: str, case: Case, device: str) -> OpCandidate:
    if name == "compile":
        compiled = functools.cache(lambda formula: torch.compile(formula, dynamic=False, fullgraph=True))
        return OpCandidate(name, lambda some: by_autograd(some, compiled(some.formula)))
    candidate = OpCandidate(name, _liger)
    if case.liger is None:
        candidate.fail("has no kernel for this op")
    elif importlib.util.find_spec("liger_kernel") is None:
        candidate.fail("not installed: pip install liger-kernel")
    elif device != "cuda":
        candidate.fail("needs an NVIDIA GPU: there is none here")
    return candidate


def _pronghorn(case: Case) -> Way:
    return case.pronghorn(case)


def _liger(case: Case) -> Way:
    assert case.liger is not None
    return case.liger(case)


def _ceilings(case: Case, candidates: Sequence[OpCandidate], repeats: int, watch: Stopwatch) -> None:
    """How long a copy of as many bytes takes (half read, half written), or as many operations of a plain product."""
    known: dict[float, float] = {}

    def milliseconds(work: Callable[[], Any]) -> float:
        way = Way(lambda: None, lambda _: work(), None, lambda *_: {}, (0.0, 0.0))
        return spread([watch.timed(way)["forward"] for _ in range(WARM + repeats)][WARM:])[0]

    if case.product is not None:
        rows, inner, columns = case.product
        like = case.inputs[0]
        a, b = (torch.randn(n, inner, device=like.device, dtype=like.dtype) for n in (rows, columns))
        per_operation = milliseconds(lambda: a @ b.t()) / (2.0 * rows * inner * columns)
    for candidate in candidates:
        for part, amount in candidate.work.items():
            if case.product is not None:
                known[amount] = amount * per_operation
            elif amount not in known:
                source = torch.empty(int(amount) // 2, dtype=torch.uint8, device=case.inputs[0].device)
                target = torch.empty_like(source)
                known[amount] = milliseconds(functools.partial(target.copy_, source))
            candidate.ceiling_ms[part] = known[amount]


def _result(
    op: str, shape: str, tokens: int, product: bool, candidate: OpCandidate, options: OpsOptions, device: str
) -> Result:
    """`product`: whether the ceiling is one; otherwise it is a copy."""
    rate = "TFLOP/s" if product else "GB/s"
    reached, share, ceilings = {}, {}, {}
    for part, amount in candidate.work.items() if candidate.timings else ():
        milliseconds = spread(candidate.timings[part])[0]
        reached[part] = amount / milliseconds / (1e9 if product else 1e6)
        if part in candidate.ceiling_ms:
            share[part] = candidate.ceiling_ms[part] / milliseconds
            name = "matmul_tflops" if product else "copy_bytes_per_s"
            ceilings[f"{name}_{part}"] = amount / candidate.ceiling_ms[part] / (1e9 if product else 1e-3)
    return Result(
        command=command_line(),
        candidate=candidate.name,
        workload=Workload(f"{shape} {options.dtype}", op, tokens, "one", 1.0, 0),
        gate=candidate.gate,
        timings_ms=candidate.timings,
        ceilings=ceilings,
        extra={
            "on_cpu": device != "cuda",
            "notes": candidate.notes,
            "work": candidate.work,
            "rate": rate,
            "reached": reached,
            "share_of_ceiling": share,
        },
        commit=options.commit,
        versions=versions("liger-kernel"),
    )


app = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ops(
    op: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"{', '.join(OPS)}; all if none is given. Can be repeated."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Rows; 8192, or 64 on the CPU, if not given.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Of inputs and outputs.")
    ] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Timed calls of each candidate.")] = 20,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="compile, liger; with commas. If not given, both on a GPU, none on the CPU."
        ),
    ] = None,
    out: Results = None,
    commit: Commit = "unknown",
    debug: Debug = False,
) -> None:
    """Time each kernel: Pronghorn's, the same formula in plain torch, that compiled by torch, and Liger's.

    Before any clock starts outputs and gradients are compared with the formula in float64; who is more than twice as
    far off as plain torch is shown as failed and its figures are withheld. Ends with code 1 if Pronghorn itself fails.

    Forward and backward are timed apart, by turns, with cold caches. The ceiling is a copy of as many bytes, or a
    product of the same size, in the same run. Figures are medians with minimum and maximum. Without a GPU it runs on
    the CPU with small shapes, and says so.

    [bold]Examples[/]

      python -m benchmarks.ops --out ops.json

      python -m benchmarks.ops --op rms_norm --op swiglu --tokens 16384 --against compile
    """
    with plain_errors(debug):
        check_out(out)
        grow_segments()
        others = None if against is None else names(against)
        options = OpsOptions(tuple(op or ()), tokens, dtype, repeats, others, commit)
        results = bench_ops(options, progress(), keeper(out))
        write_results(results, out)
        Console().print(ops_table(results))
    if not all(result.gate["green"] for result in results if result.candidate == "pronghorn"):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
