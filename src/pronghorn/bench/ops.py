"""`pronghorn bench ops`: each kernel against its formula in plain torch, that compiled, and Liger's; the gate first."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pronghorn.bench.op_gate import Entrant, judge, tidy, told
from pronghorn.bench.op_list import OPS, cases
from pronghorn.bench.op_way import Case, Way, by_autograd
from pronghorn.bench.record import Result, Workload, command_line
from pronghorn.bench.timing import Clock, CudaClock, HostClock, spread
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
        ConfigError: an unknown op or contender (the known ones are listed), a number below 1.
    """
    known = {"--op": (options.ops, tuple(OPS)), "--against": (options.against or (), OTHERS)}
    for flag, (given, names) in known.items():
        for name in given:
            if name not in names:
                raise ConfigError(f"{flag} {name} is unknown", f"use {', '.join(names)}")
    cuda = torch.cuda.is_available()
    tokens = options.tokens if options.tokens is not None else 8192 if cuda else 64
    for flag, value in (("--tokens", tokens), ("--repeats", options.repeats)):
        if value < 1:
            raise ConfigError(f"{flag} {value} is below 1", "give a positive number")
    against = options.against if options.against is not None else OTHERS if cuda else ()
    ops = tuple(dict.fromkeys(options.ops or OPS))
    return replace(options, ops=ops, tokens=tokens, against=tuple(dict.fromkeys(against)))


def bench_ops(
    options: OpsOptions, say: Callable[[str], None], keep: Callable[[Sequence[Result]], None]
) -> list[Result]:
    """Measure; one result per op, shape and contender, also for those that failed or aren't installed. A case that
    fails as a whole is a failure of Pronghorn's, with its reason.

    Args:
        say: told what is being done.
        keep: given the results so far after each case.
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
            say(f"{op} {sizes}")
            try:
                results += _results(make(), options, watch, device)
            except Exception as error:  # memory that a small card hasn't, say: the other cases are measured
                lost = Entrant("pronghorn", _pronghorn)
                lost.fail(told(error))
                results.append(_result(op, sizes, options.tokens, False, lost, options, device))
                tidy()
            keep(results)
    return results


def _results(case: Case, options: OpsOptions, watch: Stopwatch, device: str) -> list[Result]:
    entrants = measure(case, options.against or (), options.repeats, watch, device)
    product = case.product is not None
    return [_result(case.op, case.shape, case.tokens, product, entrant, options, device) for entrant in entrants]


def measure(case: Case, against: Sequence[str], repeats: int, watch: Stopwatch, device: str) -> list[Entrant]:
    """One case: the gate, then times by turns, then the ceiling at the same size."""
    torch.compiler.reset()  # shapes of other cases are none of this one's business
    entrants = [
        Entrant("pronghorn", _pronghorn),
        Entrant("torch", lambda some: by_autograd(some, some.formula)),
        *(_other(name, case, device) for name in against),
    ]
    if device != "cuda":
        entrants[0].notes.append("the torch code that Pronghorn runs on a CPU; its Triton kernel needs a GPU")
    judge(case.small or case, [entrant for entrant in entrants if not entrant.gate])
    ways: dict[str, Way] = {}
    for turn in range(WARM + repeats):
        for entrant in [entrant for entrant in entrants if entrant.gate["green"]]:
            try:
                if entrant.name not in ways:
                    ways[entrant.name] = entrant.make(case)
                times = watch.timed(ways[entrant.name], case.calls)
            except Exception as error:  # whatever a library raises is for the table to tell
                entrant.fail(told(error))
                tidy()
                continue
            if watch.late and turn >= WARM and LATE not in entrant.notes:
                entrant.notes.append(LATE)
            for part, ms in times.items() if turn >= WARM else ():
                entrant.timings.setdefault(part, []).append(ms)
    timed = [entrant for entrant in entrants if entrant.timings]
    for entrant in timed:
        work = ways[entrant.name].work
        entrant.work = {part: amount for part, amount in zip(("forward", "backward"), work, strict=True) if amount}
        if case.work[1] and not work[1]:
            entrant.notes.append("makes the gradients of cross-entropies in the forward")
    try:
        _ceilings(case, timed, repeats, watch)
    except torch.OutOfMemoryError as error:
        for entrant in timed:
            entrant.notes.append(f"no ceiling: {told(error)}")
    return entrants


def _other(name: str, case: Case, device: str) -> Entrant:
    if name == "compile":
        compiled = functools.cache(lambda formula: torch.compile(formula, dynamic=False, fullgraph=True))
        return Entrant(name, lambda some: by_autograd(some, compiled(some.formula)))
    entrant = Entrant(name, _liger)
    if case.liger is None:
        entrant.fail("has no kernel for this op")
    elif importlib.util.find_spec("liger_kernel") is None:
        entrant.fail("not installed: pip install liger-kernel")
    elif device != "cuda":
        entrant.fail("needs an NVIDIA GPU: there is none here")
    return entrant


def _pronghorn(case: Case) -> Way:
    return case.pronghorn(case)


def _liger(case: Case) -> Way:
    assert case.liger is not None
    return case.liger(case)


def _ceilings(case: Case, entrants: Sequence[Entrant], repeats: int, watch: Stopwatch) -> None:
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
    for entrant in entrants:
        for part, amount in entrant.work.items():
            if case.product is not None:
                known[amount] = amount * per_operation
            elif amount not in known:
                source = torch.empty(int(amount) // 2, dtype=torch.uint8, device=case.inputs[0].device)
                target = torch.empty_like(source)
                known[amount] = milliseconds(functools.partial(target.copy_, source))
            entrant.ceiling_ms[part] = known[amount]


def _result(
    op: str, shape: str, tokens: int, product: bool, entrant: Entrant, options: OpsOptions, device: str
) -> Result:
    """`product`: whether the ceiling is one; otherwise it is a copy."""
    rate = "TFLOP/s" if product else "GB/s"
    reached, share, ceilings = {}, {}, {}
    for part, amount in entrant.work.items() if entrant.timings else ():
        milliseconds = spread(entrant.timings[part])[0]
        reached[part] = amount / milliseconds / (1e9 if product else 1e6)
        if part in entrant.ceiling_ms:
            share[part] = entrant.ceiling_ms[part] / milliseconds
            name = "matmul_tflops" if product else "copy_bytes_per_s"
            ceilings[f"{name}_{part}"] = amount / entrant.ceiling_ms[part] / (1e9 if product else 1e-3)
    return Result(
        command=command_line(),
        contender=entrant.name,
        workload=Workload(f"{shape} {options.dtype}", op, tokens, "one", 1.0, 0),
        gate=entrant.gate,
        timings_ms=entrant.timings,
        ceilings=ceilings,
        extra={
            "on_cpu": device != "cuda",
            "notes": entrant.notes,
            "work": entrant.work,
            "rate": rate,
            "reached": reached,
            "share_of_ceiling": share,
        },
        commit=options.commit,
        versions=versions("liger-kernel"),
    )
