"""Time each kernel: Pronghorn's, the same formula in plain torch, that compiled by torch, and Liger's.

Before any clock starts outputs and gradients are compared with the formula in float64; who is more than twice as far
off as plain torch is shown as failed and its figures are withheld. Ends with code 1 if Pronghorn itself fails.

Forward and backward are timed apart, by turns, with cold caches. The ceiling is a copy of as many bytes, or a product
of the same size, in the same run. Figures are medians with minimum and maximum. Without a GPU it runs on the CPU with
small shapes, and says so.

    python -m benchmarks.ops --out ops.json
    python -m benchmarks.ops --op rms_norm --op swiglu --tokens 16384 --against compile
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from benchmarks.op_case import Case, OpCandidate, Way, by_autograd, describe, free_memory, judge
from benchmarks.op_list import OPS, cases
from benchmarks.program import names, parser_of, run
from benchmarks.record import Result, Workload, check_out, command_line, keeper, write_results
from benchmarks.tables import ops_table, print_results
from benchmarks.timing import Clock, CudaClock, HostClock, spread
from pronghorn.cli.options import progress
from pronghorn.device import versions
from pronghorn.environment import grow_segments
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
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class OpsOptions:
    """What is asked for."""

    ops: tuple[str, ...] = ()
    """Empty: all."""
    tokens: int | None = None
    """Rows T; None: 8192 on a GPU, 64 on the CPU."""
    dtype: Dtype = "bfloat16"
    repeats: int = 20
    against: tuple[str, ...] | None = None
    """None: all on a GPU; nobody on the CPU, where compiling takes longer than all the rest."""
    commit: str = "unknown"


class Stopwatch:
    """Time parts on the current device, each with cold caches."""

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
        """Return the milliseconds of one forward and one backward on fresh inputs; `calls` as a case's.

        Where the host was late, they run once more with a longer wait.
        """
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
        """Return what `work` returns, and its milliseconds.

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


def bench_ops(
    options: OpsOptions, log: Callable[[str], None], on_result: Callable[[Sequence[Result]], None]
) -> list[Result]:
    """Measure; return one result per op, shape and candidate, also for those that failed or aren't installed.

    A case that fails as a whole is a failure of Pronghorn's, with its reason.

    Args:
        log: takes a line about what is being done.
        on_result: takes the results so far after each case.
    Raises:
        ConfigError: an unknown op or candidate (the known ones are listed), a number below 1.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = options.tokens if options.tokens is not None else 8192 if device == "cuda" else 64
    against = options.against if options.against is not None else OTHERS if device == "cuda" else ()
    for flag, given, allowed in (("--op", options.ops, tuple(OPS)), ("--against", against, OTHERS)):
        if unknown := [name for name in given if name not in allowed]:
            raise ConfigError(f"{flag} {unknown[0]} is unknown", f"use {', '.join(allowed)}")
    for flag, value in (("--tokens", tokens), ("--repeats", options.repeats)):
        if value < 1:
            raise ConfigError(f"{flag} {value} is below 1", "give a positive number")
    watch = Stopwatch(device)
    results: list[Result] = []
    for op in dict.fromkeys(options.ops or OPS):
        for sizes, make in cases(op, tokens, device, getattr(torch, options.dtype)).items():
            log(f"{op} {sizes}")
            try:
                case = make()
                candidates = measure(case, tuple(dict.fromkeys(against)), options.repeats, watch, device)
                results += [result_of(case, candidate, options, device) for candidate in candidates]
            except Exception as error:  # memory that a small card hasn't, say: the other cases are measured
                lost = OpCandidate("pronghorn", lambda case: case.pronghorn(case))
                lost.fail(describe(error))
                nothing = Case(op, sizes, tokens, lambda *_: (), (), (), (), (0.0, 0.0), lost.make)
                results.append(result_of(nothing, lost, options, device))
                free_memory()
            on_result(results)
    return results


def measure(case: Case, against: Sequence[str], repeats: int, watch: Stopwatch, device: str) -> list[OpCandidate]:
    """Measure one case: the gate, then times by turns, then the ceiling at the same size."""
    torch.compiler.reset()  # shapes of other cases are none of this one's business
    candidates = [
        OpCandidate("pronghorn", lambda some: some.pronghorn(some)),
        OpCandidate("torch", lambda some: by_autograd(some, some.formula)),
        *(other(name, case, device) for name in against),
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
        measure_ceilings(case, timed, repeats, watch)
    except torch.OutOfMemoryError as error:
        for candidate in timed:
            candidate.notes.append(f"no ceiling: {describe(error)}")
    return candidates


def other(name: str, case: Case, device: str) -> OpCandidate:
    """Return torch.compile or Liger as a candidate, failed already where it can't run."""
    if name == "compile":
        compiled = functools.cache(lambda formula: torch.compile(formula, dynamic=False, fullgraph=True))
        return OpCandidate(name, lambda some: by_autograd(some, compiled(some.formula)))
    liger: Any = case.liger
    candidate = OpCandidate(name, liger)
    if liger is None:
        candidate.fail("has no kernel for this op")
    elif importlib.util.find_spec("liger_kernel") is None:
        candidate.fail("not installed: pip install liger-kernel")
    elif device != "cuda":
        candidate.fail("needs an NVIDIA GPU: there is none here")
    return candidate


def measure_ceilings(case: Case, candidates: Sequence[OpCandidate], repeats: int, watch: Stopwatch) -> None:
    """Time a copy of as many bytes (half read, half written), or as many operations of a plain product."""
    of_amount: dict[float, float] = {}

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
                of_amount[amount] = amount * per_operation
            elif amount not in of_amount:
                source = torch.empty(int(amount) // 2, dtype=torch.uint8, device=case.inputs[0].device)
                target = torch.empty_like(source)
                of_amount[amount] = milliseconds(functools.partial(target.copy_, source))
            candidate.ceiling_ms[part] = of_amount[amount]


def result_of(case: Case, candidate: OpCandidate, options: OpsOptions, device: str) -> Result:
    """Make the result of what became of a candidate in a case."""
    product = case.product is not None
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
        workload=Workload(f"{case.shape} {options.dtype}", case.op, case.tokens, "one", 1.0, 0),
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


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help=f"some of {', '.join(OPS)}")
    parser.add_argument("--tokens", type=int, help="rows; 8192, or 64 on the CPU, if not given")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16", help="of inputs and outputs")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each candidate")
    parser.add_argument("--against", type=names, metavar="NAMES", help=f"{', '.join(OTHERS)}; on a GPU both by default")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Measure, write and show; tell whether all of Pronghorn's gates were green."""
    check_out(given.out)
    grow_segments()
    options = OpsOptions(tuple(given.op), given.tokens, given.dtype, given.repeats, given.against, given.commit)
    results = bench_ops(options, progress(), keeper(given.out))
    write_results(results, given.out)
    print_results(results, ops_table(results), "Ops")
    return all(result.gate["green"] for result in results if result.candidate == "pronghorn")


if __name__ == "__main__":
    run(arguments, main)
