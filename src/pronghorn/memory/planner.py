"""The plan with the least predicted time that fits: which layers keep, recompute or offload.

With s_p what a policy stores, t_p what it costs, and the formula of `memory.estimate`: minimise Σ t_p over all policies
by layer whose peak fits. A model's layers count as alike. Then, for given counts, those that store least are best put
first: layer i's moment is Σ_{j<i} s_j + K_i + W, where what stores more reads at most as much more, so of two
neighbours the one that stores less belongs before. It also keeps copies out of the way: what the last layers kept is
used first and freed while the first layers' inputs come back. So only counts are left to choose, and a Pareto search
does that exactly. Where gradients come with the backward (full fine-tuning, one micro-batch a step), the first layer's
moment may be the peak, and no other policy is tried there for what it reads: the plan is the best for a budget smaller
by the size of three layers' inputs at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pronghorn.errors import ConfigError
from pronghorn.memory.devices import Card
from pronghorn.memory.estimate import GIB, Shape, Step, Work
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.step_time import StepTimes, step_times

T = TypeVar("T")
GRAPH_MS = 3.0
"""A layer's forward and backward below this are likely to be captured as a CUDA graph (`models.graph`)."""


class PlanDoesNotFit(ConfigError):
    """No policies fit into the budget; the remedy tells what would."""


def plan(
    shape: Shape,
    work: Work,
    card: Card,
    budget_bytes: int | None = None,
    times: StepTimes | None = None,
    asked: Plan | None = None,
) -> Plan:
    """The fastest plan within a budget, or what the one that is asked for takes.

    Args:
        budget_bytes: of the process, CUDA's context included; None for the whole card.
        times: measured (`StepTimes.scaled`); None for the card's estimate.
        asked: None or an undecided one (`auto`) for the fastest.
    Raises:
        PlanDoesNotFit: with the least that would fit and what would make it smaller.
    """
    budget = card.memory_bytes if budget_bytes is None else budget_bytes
    times = times or step_times(shape, work, card)
    plans = choices = plans_of(shape, work, times)
    if asked is not None and not asked.undecided:
        step, policies = Step.of(shape, replace(work, graph=False)), asked.by_layer(shape.layers)
        choices = [_predicted(step, times, policies, asked.buffers)]
    for made in choices:
        if made.predicted["process"] <= budget:
            return replace(_with_graph(made, shape, work, times, budget), device=card.name, budget_bytes=budget)
    least = plans[-1].predicted["process"]
    if least <= budget:
        needs = f"{choices[0].predicted['process'] / GIB:.1f} GiB and the budget is {budget / GIB:.1f} GiB"
        auto = f"memory.gradient_checkpointing: auto needs {least / GIB:.1f} GiB or more"
        raise PlanDoesNotFit(f"what memory.gradient_checkpointing asks for needs {needs}", auto)
    raise _refusal(shape, work, times, budget, plans[-1])


def plans_of(shape: Shape, work: Work, times: StepTimes) -> list[Plan]:
    """The frontier of a model that is trained in this way, without CUDA graphs."""
    return frontier(Step.of(shape, replace(work, graph=False)), times, shape.layers)


def _with_graph(made: Plan, shape: Shape, work: Work, times: StepTimes, budget: int) -> Plan:
    """The plan, with CUDA graphs allowed if their memory is there, too, and counted where they are likely."""
    graph = work.graph and work.fused and work.method == "lora"
    step = Step.of(shape, replace(work, graph=graph))
    if made.predicted["process"] + step.graph > budget:
        return replace(made, graph=False)
    likely = times.forward + times.backward < GRAPH_MS
    return _predicted(step, times, made.policies, made.buffers) if likely else made


def frontier(step: Step, times: StepTimes, layers: int) -> list[Plan]:
    """Every plan that is the best for some budget: the fastest first, each slower one smaller than all before."""
    found = [_smallest(step, times, layers)]
    for offload in (False, True) if times.copy else (False,):
        extra = {policy: round(1e6 * ms) for policy, ms in times.extra(2).items()}  # whole: sums have no order
        found += [_predicted(step, times, each, 2) for each in _candidates(step.stored, extra, layers, offload)]
    return _undominated(found, lambda made: (round(made.predicted["step_ms"], 6), made.predicted["process"]))


def _smallest(step: Step, times: StepTimes, layers: int) -> Plan:
    """All inputs offloaded, through one buffer; or all layers recomputed."""
    return _predicted(step, times, [Policy.OFFLOAD if times.copy else Policy.RECOMPUTE_LAYER] * layers, 1)


def _predicted(step: Step, times: StepTimes, policies: Sequence[Policy], buffers: int) -> Plan:
    kinds = step.peak(policies, buffers)
    sums = {
        "peak": sum(kinds.values()),
        "process": step.process(kinds),
        "step_ms": times.step(policies, buffers),
    }
    return Plan(tuple(policies), buffers if Policy.OFFLOAD in policies else 2, predicted={**kinds, **sums})


def _refusal(shape: Shape, work: Work, times: StepTimes, budget: int, least: Plan) -> PlanDoesNotFit:
    """The error for a budget that nothing fits, with what each remedy would need."""
    half = {name: max(1, work.rank(name) // 2) for name in shape.linears if work.rank(name)}
    remedies = {
        f"rows of half as many tokens ({work.tokens // 2:,})": replace(work, tokens=work.tokens // 2),
        "adapter.method: lora": replace(work, method="lora", ranks=None) if work.method == "full" else None,
        "model.load_in_4bit: true": replace(work, method="qlora")
        if work.method == "lora" and not shape.experts
        else None,
        f"adapter.r: {max(half.values(), default=0)}": replace(work, ranks=half) if half else None,
    }
    needs = {
        name: _smallest(Step.of(shape, other), times, shape.layers).predicted["process"] / GIB
        for name, other in remedies.items()
        if other is not None and other.tokens
    }
    told = [f"{name} needs {gib:.1f} GiB" for name, gib in needs.items()]
    if not times.copy:
        told.append("this device shares its memory with the host, so nothing can be offloaded")
    problem = f"the smallest plan needs {least.predicted['process'] / GIB:.1f} GiB"
    return PlanDoesNotFit(f"{problem} and the budget is {budget / GIB:.1f} GiB", "; ".join(told))


def _candidates(
    stored: Mapping[Policy, int], extra: Mapping[Policy, int], layers: int, offload: bool
) -> list[tuple[Policy, ...]]:
    """Every choice that can be the best for some budget; `extra` is in whole nanoseconds.

    The layer that stores the most is last and decides the peak together with the sum, so it is fixed; of the others
    only sums are kept that no other undercuts in bytes and time. With `offload` at least one input leaves, and at least
    one layer is recomputed from an input that stays: the engine's last (`plan.followed`).
    """
    # of policies that store the same the one that is meant to store less comes first
    served = [policy for policy in reversed(Policy) if policy in stored and (offload or policy is not Policy.OFFLOAD)]
    ascending = sorted(served, key=lambda policy: stored[policy])
    found: list[tuple[int, int, tuple[int, ...]]] = []  # bytes, nanoseconds, how many layers have each policy
    for last, policy in enumerate(ascending):
        fixed = {policy, Policy.OFFLOAD, Policy.RECOMPUTE_LAYER} if offload else {policy}
        if policy is Policy.OFFLOAD or len(fixed) > layers:
            continue
        size, time = sum(stored[p] for p in fixed), sum(extra[p] for p in fixed)
        front = [(size, time, tuple(int(p in fixed) for p in ascending))]
        for _ in range(layers - len(fixed)):
            front = _undominated(
                (
                    (size + stored[p], time + extra[p], (*counts[:n], counts[n] + 1, *counts[n + 1 :]))
                    for size, time, counts in front
                    for n, p in enumerate(ascending[: last + 1])
                ),
                lambda one: one[:2],
            )
        found += front
    choices = []
    for *_, counts in found:
        policies = [p for p, count in zip(ascending, counts, strict=True) for _ in range(count)]
        if offload:
            policies[counts[0]] = Policy.OFFLOAD  # the one whose input stays
        choices.append(tuple(policies))
    return choices


def _undominated(given: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Those that no other undercuts in both costs, by the first."""
    kept: list[T] = []
    for one in sorted(given, key=costs):
        if not kept or costs(one)[1] < costs(kept[-1])[1]:
            kept.append(one)
    return kept
