"""The plan with the least predicted time that fits: which layers keep, recompute or offload.

With s_p what a policy stores, t_p what it costs, and the formula of `memory.estimate`: minimise Σ t_p over all policies
by layer whose peak fits. A model's layers count as alike. Then, for given counts, those that store least are best put
first: layer i's moment is Σ_{j<i} s_j + K + W whatever its own policy, so of two neighbours the one that stores less
belongs before. It also keeps copies out of the way: what the last layers kept is used first and freed while the first
layers' inputs come back. So only counts are left to choose, and a Pareto search does that exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pronghorn.errors import ConfigError
from pronghorn.memory.devices import Card
from pronghorn.memory.estimate import (
    GIB,
    Shape,
    Step,
    Work,
    process_bytes,
)
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.step_time import StepTimes, step_times

GRAPH_MS = 3.0
"""A layer's forward and backward below this may be captured as a CUDA graph (`models.graph`), which takes memory."""


class PlanDoesNotFit(ConfigError):
    """No policies fit into the budget; the remedy tells what would."""


@dataclass(frozen=True)
class Choice:
    """Policies for every layer, from the first, and the buffers they need."""

    policies: tuple[Policy, ...]
    buffers: int
    kinds: Mapping[str, int]
    """Bytes by kind at the peak (`Step.peak`)."""
    milliseconds: float

    @property
    def process_bytes(self) -> int:
        """What the process takes at its peak."""
        return process_bytes(self.kinds)


def frontier(step: Step, times: StepTimes, layers: int) -> list[Choice]:
    """Every choice that is the best for some budget: the fastest first, each slower one smaller than all before."""
    found = [_smallest(step, times, layers)]
    for buffers in (0, 2) if times.copy else (0,):
        extra = {policy: round(1e6 * ms) for policy, ms in times.extra(buffers).items()}  # whole: sums have no order
        for policies in _candidates(step.stored, extra, layers, bool(buffers)):
            found.append(Choice(policies, buffers, step.peak(policies, buffers), times.step(policies, buffers)))
    kept: list[Choice] = []
    for choice in sorted(found, key=lambda choice: (round(choice.milliseconds, 6), choice.process_bytes)):
        if not kept or choice.process_bytes < kept[-1].process_bytes:
            kept.append(choice)
    return kept


def _smallest(step: Step, times: StepTimes, layers: int) -> Choice:
    """All inputs offloaded (but the last layer's, which is needed at once) through one buffer; or all recomputed."""
    buffers = 1 if times.copy and layers > 1 else 0
    before = Policy.OFFLOAD if buffers else Policy.RECOMPUTE_LAYER
    policies = (*[before] * (layers - 1), Policy.RECOMPUTE_LAYER)
    return Choice(policies, buffers, step.peak(policies, buffers), times.step(policies, buffers))


def plan(shape: Shape, work: Work, card: Card, budget_bytes: int | None = None, times: StepTimes | None = None) -> Plan:
    """The fastest plan within a budget.

    Args:
        budget_bytes: of the process, CUDA's context included; None for the whole card.
        times: measured (`StepTimes.scaled`); None for the card's estimate.
    Raises:
        PlanDoesNotFit: with the least that would fit and what would make it smaller.
    """
    budget = card.memory_bytes if budget_bytes is None else budget_bytes
    times = times or step_times(shape, work, card)
    choices = choices_of(shape, work, times)
    fitting = [choice for choice in choices if choice.process_bytes <= budget]
    if not fitting:
        raise _refusal(shape, work, times, budget, choices[-1].process_bytes)
    best = fitting[0]
    predicted = {**best.kinds, "peak": sum(best.kinds.values()), "process": best.process_bytes}
    return Plan(best.policies, best.buffers or 2, card.name, 1, budget, {**predicted, "step_ms": best.milliseconds})


def choices_of(shape: Shape, work: Work, times: StepTimes) -> list[Choice]:
    """The frontier of a model that is trained in this way."""
    graph = work.fused and work.method == "lora" and times.forward + times.backward < GRAPH_MS
    return frontier(Step.of(shape, replace(work, graph=work.graph and graph)), times, shape.layers)


def _refusal(shape: Shape, work: Work, times: StepTimes, budget: int, least: int) -> PlanDoesNotFit:
    """The error for a budget that nothing fits, with what each remedy would need."""
    half = {name: max(1, work.rank(name) // 2) for name in shape.linears if work.rank(name)}
    remedies = {
        f"rows of half as many tokens ({work.tokens // 2:,})": replace(work, tokens=work.tokens // 2),
        "adapter.method: lora": replace(work, method="lora") if work.method == "full" else None,
        "model.load_in_4bit: true": replace(work, method="qlora") if work.method == "lora" else None,
        f"adapter.r: {max(half.values(), default=0)}": replace(work, ranks=half) if half else None,
    }
    told = [
        f"{name} needs {_smallest(Step.of(shape, other), times, shape.layers).process_bytes / GIB:.1f} GiB"
        for name, other in remedies.items()
        if other is not None and other.tokens
    ]
    if work.fused and not times.copy:
        told.append("this device shares its memory with the host, so nothing can be offloaded")
    return PlanDoesNotFit(
        f"the smallest plan needs {least / GIB:.1f} GiB and the budget is {budget / GIB:.1f} GiB", "; ".join(told)
    )


def _candidates(
    stored: Mapping[Policy, int], extra: Mapping[Policy, int], layers: int, offload: bool
) -> list[tuple[Policy, ...]]:
    """Every choice that can be the best for some budget, the fastest first; `extra` is in whole nanoseconds.

    The last layer stores the most and decides the peak together with the sum, so it is fixed; of the others only sums
    are kept that no other undercuts in bytes and time. With `offload` at least one input is offloaded.
    """
    ascending = sorted((p for p in stored if offload or p is not Policy.OFFLOAD), key=lambda p: stored[p])
    found: list[_Sum] = []
    for last, policy in enumerate(ascending):
        counts = [int(n == last) + int(offload and n == 0) for n in range(len(ascending))]
        if policy is Policy.OFFLOAD or sum(counts) > layers:
            continue  # the last layer's input is needed at once
        front = [(stored[policy], extra[policy] + offload * extra[ascending[0]], tuple(counts))]
        for _ in range(layers - sum(counts)):
            front = _undominated(
                (size + stored[p], time + extra[p], (*counts[:n], counts[n] + 1, *counts[n + 1 :]))
                for size, time, counts in front
                for n, p in enumerate(ascending[: last + 1])
            )
        found += front
    ordered = sorted(found, key=lambda one: (one[1], one[0]))
    return [
        tuple(p for p, count in zip(ascending, counts, strict=True) for _ in range(count)) for *_, counts in ordered
    ]


_Sum = tuple[int, int, tuple[int, ...]]
"""Bytes, nanoseconds, and how many layers have each policy."""


def _undominated(sums: Iterable[_Sum]) -> list[_Sum]:
    kept: list[_Sum] = []
    for one in sorted(sums):
        if not kept or one[1] < kept[-1][1]:
            kept.append(one)
    return kept
