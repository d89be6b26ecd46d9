"""Choose the plan with the least predicted time that fits: which layers keep, recompute or offload.

Minimise the sum of what policies cost, over all policies by layer whose peak fits the formula of `memory.estimate`. Of
layers i, i + 1, … only two figures matter to those before them: their time, and the peak F_i that they and the head
have above what the earlier layers stored,

    F_i = max( K_i + W_i, s_i + F_{i+1} )        F after the last layer: the head

The smaller F_{i+1} is, the smaller is every F_i. So going from the last layer to the first, of all choices only those
are carried on that no other undercuts in both figures, which is exact for any order of unlike layers. Besides, two
facts are carried along: whether a later layer offloads (the last one's input stays, `plan.followed`), and whether an
earlier one will (between the two a second input is on its way back).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.memory.devices import DeviceSpec
from pronghorn.memory.estimate import GIB, NF4_BYTES, LayerBytes, MemoryModel, ModelDims, TrainSetup
from pronghorn.memory.plan import TILE_ROWS, Codes, Plan, Policy, followed
from pronghorn.memory.step_time import LayerTimes, StepTimes, step_times, times_written
from pronghorn.memory.tiles import can_tile, tiled_times

GRAPH_MS = 3.0
"""A layer's forward and backward below this are likely to be captured as a CUDA graph (`models.graph`)."""


SPARE = 64
"""One part in so many of a device's memory is left free. 70B over 4 bits ran out of an H200's under plans that filled
99.9 % of it, and 99.2 % by `fp8_both`: peaks were up to .6 % above plans, and the allocator held .5 % more that it
couldn't use than is counted. What keeps less after that is slower than what fits at once."""


class PlanDoesNotFit(ConfigError):
    """No policies fit into the budget; the remedy tells what would."""


def plan(
    dims: ModelDims,
    setup: TrainSetup,
    device: DeviceSpec,
    budget_bytes: int | None = None,
    times: StepTimes | None = None,
    asked: Plan | None = None,
) -> Plan:
    """Choose the fastest plan within a budget, or check the one that is asked for.

    MLPs are computed in tiles of rows only where that is asked for or nothing else fits. 8-bit codes that may be kept
    beside 16-bit weights or written out of them are as the faster plan has them. Of the device a part is left free
    (`SPARE`) unless nothing fits into the rest, or a plan that needs it is asked for.

    Args:
        budget_bytes: of the process, CUDA's context included; None for the whole device.
        times: measured (`StepTimes.scaled`); None for the device's estimate.
        asked: None or an undecided one (`auto`) for the fastest.
    Raises:
        PlanDoesNotFit: with the least that would fit and what would make it smaller.
        UnsupportedError: tiles are asked for and these layers have none.
    """
    if setup.chooses_codes and (asked is None or asked.undecided or asked.codes_written):
        return _with_codes(dims, setup, device, budget_bytes, times, asked)
    budget = device.memory_bytes if budget_bytes is None else budget_bytes
    most = device.memory_bytes - device.memory_bytes // SPARE
    whole = times or step_times(dims, setup, device)
    rows, can = asked.mlp_rows if asked is not None else 0, can_tile(dims.layers, setup)
    if rows and not can:
        raise UnsupportedError(
            "MLPs in tiles of rows need packed rows, fused layers, and attention with one gated MLP in each",
            "leave memory.feed_forward out",
        )
    times, setup = tiled_times(whole) if rows else whole, replace(setup, mlp_rows=rows)
    if asked is not None and not asked.undecided:
        setup = replace(setup, written_out="once" if asked.written_once else setup.written_out)
    # what takes memory and decides nothing comes last, where some is left: weights written out once, and graphs
    memory = MemoryModel.of(dims, replace(setup, graph=False))
    if asked is not None and not asked.undecided:
        made = _predicted(memory, times, asked.by_layer(len(dims.layers)), asked.buffers)
    else:
        made = Frontier(memory, times).within(min(budget, most))
    if made.predicted["process"] <= budget:
        if not rows and (asked is None or asked.undecided):
            made, setup, times = _with_written_weights(made, dims, setup, times, device, min(budget, most))
        made = replace(made, graph=False) if rows else _with_graph(made, dims, setup, times, min(budget, most))
        made = replace(made, codes_written=setup.codes == "written", written_once=setup.written_once)
        return replace(made, mlp_rows=rows, device=device.name, budget_bytes=budget)
    # nothing fits with MLPs as a whole; with tiles that are no smaller nothing would, either
    if can and not rows and (asked is None or asked.undecided):
        in_tiles = MemoryModel.of(dims, replace(setup, mlp_rows=TILE_ROWS, graph=False))
        least_tiled = Frontier(in_tiles, tiled_times(whole))[-1].predicted["process"]
        if least_tiled < made.predicted["process"]:
            tiled = Plan((Policy.RECOMPUTE_LAYER,), mlp_rows=TILE_ROWS, undecided=True)
            return plan(dims, setup, device, budget_bytes, whole, tiled)
    smallest = plans_of(dims, setup, times)[-1]
    least = smallest.predicted["process"]
    if least <= budget:
        needs = f"{_up(made.predicted['process'])} GiB and the budget is {_down(budget)} GiB"
        auto = f"memory.gradient_checkpointing: auto needs {_up(least)} GiB or more"
        raise PlanDoesNotFit(f"what memory.gradient_checkpointing asks for needs {needs}", auto)
    raise _refusal(dims, setup.leanest, times, budget, smallest, device.fp8)


def _with_codes(
    dims: ModelDims,
    setup: TrainSetup,
    device: DeviceSpec,
    budget_bytes: int | None,
    times: StepTimes | None,
    asked: Plan | None,
) -> Plan:
    """Make the plan with codes kept and with codes written out, and return the one without tiles, else the faster one.

    Where policies are asked for, and codes with them, only those are counted. `times` are of codes as in `setup`.
    """
    undecided, found, refusal = asked is None or asked.undecided, list[Plan](), None
    ways: tuple[Codes, ...] = ("kept", "written") if undecided else ("written",)
    for codes in ways:
        with_codes = replace(setup, codes=codes)
        of_codes = None if times is None else times_written(times, dims, setup, with_codes, device)
        try:
            found.append(plan(dims, with_codes, device, budget_bytes, of_codes, asked))
        except PlanDoesNotFit as error:  # the last one's needs least
            refusal = error
    if refusal is not None and not found:
        raise refusal
    return min(found, key=lambda made: (made.mlp_rows, made.predicted["step_ms"]))


def plans_of(dims: ModelDims, setup: TrainSetup, times: StepTimes) -> Frontier:
    """Return the frontier of a model that is trained in this way, without CUDA graphs and with as few codes kept as
    can be."""
    return Frontier(MemoryModel.of(dims, replace(setup.leanest, graph=False)), times)


def _with_written_weights(
    made: Plan, dims: ModelDims, setup: TrainSetup, times: StepTimes, device: DeviceSpec, budget: int
) -> tuple[Plan, TrainSetup, StepTimes]:
    """Return the plan, its setup and times, with weights of few bits written out once if the setup leaves that to a
    plan, everything else is kept, and there is room for them and for CUDA graphs."""
    if not setup.chooses_written_once or set(made.policies) != {Policy.KEEP}:
        return made, setup, times
    once = replace(setup, written_out="once")
    faster = times_written(times, dims, setup, once, device)
    alone, with_graph = (
        _predicted(MemoryModel.of(dims, replace(once, graph=graph)), faster, made.policies, made.buffers)
        for graph in (False, setup.can_graph)
    )
    return (alone, once, faster) if with_graph.predicted["process"] <= budget else (made, setup, times)


def _with_graph(made: Plan, dims: ModelDims, setup: TrainSetup, times: StepTimes, budget: int) -> Plan:
    """Return the plan, with CUDA graphs allowed if their memory is there, too, and counted where they are likely."""
    memory = MemoryModel.of(dims, replace(setup, graph=setup.can_graph))
    if made.predicted["process"] + memory.graph > budget:
        return replace(made, graph=False)
    likely = max(layer.forward + layer.backward for layer in times.layers) < GRAPH_MS
    return _predicted(memory, times, made.policies, made.buffers) if likely else made


def _smallest(memory: MemoryModel, times: StepTimes) -> Plan:
    """Offload all inputs, through one buffer; or recompute all layers."""
    policy = Policy.OFFLOAD if times.copy else Policy.RECOMPUTE_LAYER
    return _predicted(memory, times, [policy] * len(memory.layers), 1)


def _predicted(memory: MemoryModel, times: StepTimes, policies: Sequence[Policy], buffers: int) -> Plan:
    kinds = memory.peak(policies, buffers)
    sums = {
        "peak": sum(kinds.values()),
        "process": memory.process(kinds),
        "step_ms": times.step(policies, buffers),
    }
    return Plan(tuple(policies), buffers if Policy.OFFLOAD in policies else 2, predicted={**kinds, **sums})


def _refusal(
    dims: ModelDims, setup: TrainSetup, times: StepTimes, budget: int, least: Plan, fp8: bool
) -> PlanDoesNotFit:
    """Make the error for a budget that nothing fits, with what each remedy would need; `fp8` if the device has it."""
    ranks = {linear.path: setup.rank(linear.path) for layer in dims.kinds for linear in layer.linears}
    half = {path: max(1, rank // 2) for path, rank in ranks.items() if rank}
    half_states = None if setup.optimizer_bytes is None else setup.optimizer_bytes // 2
    dense = setup.method == "lora" and setup.linear_bytes is None and setup.expert_bytes is None
    in_4_bits = replace(setup, method="qlora", expert_bytes=NF4_BYTES if dims.has_experts else None)
    remedies = {
        f"rows of half as many tokens ({setup.tokens // 2:,})": replace(setup, tokens=setup.tokens // 2),
        "adapter.method: lora": replace(setup, method="lora", ranks=None, trained_share=1.0, optimizer_bytes=None)
        if setup.method == "full"
        else None,
        "model.load_in_4bit: true": in_4_bits if dense else None,
        "precision.compute: fp8": setup.in_fp8 if setup.int8 and fp8 else None,
        "memory.feed_forward: tiled": replace(setup, mlp_rows=TILE_ROWS)
        if can_tile(dims.layers, setup) and not setup.mlp_rows
        else None,
        f"adapter.r: {max(half.values(), default=0)}": replace(setup, ranks=half, optimizer_bytes=half_states)
        if half
        else None,
    }
    needs = {
        name: _smallest(MemoryModel.of(dims, other), times).predicted["process"]
        for name, other in remedies.items()
        if other is not None and other.tokens
    }
    fits = [f"{name} needs {_up(size)} GiB" for name, size in needs.items() if size <= budget]
    larger = [f"{name} needs {_up(size)} GiB" for name, size in needs.items() if size > budget]
    told = [f"fits: {', or '.join(fits)}"] if fits else ["nothing of this fits alone"]
    told += [f"still too large: {', '.join(larger)}"] if larger else []
    if not times.copy:
        told.append("this device shares its memory with the host, so nothing can be offloaded")
    problem = f"the smallest plan needs {_up(least.predicted['process'])} GiB"
    return PlanDoesNotFit(f"{problem} and the budget is {_down(budget)} GiB", "; ".join(told))


def _up(size: float) -> str:
    """Return GiB with one digit, no less than the size: a budget of so many has room for it."""
    return f"{math.ceil(size / GIB * 10) / 10:.1f}"


def _down(budget: int) -> str:
    """Return GiB with one digit, no more than the budget, but for the byte that 18.3GiB is cut by."""
    return f"{math.floor((budget + 1) / GIB * 10) / 10:.1f}"


class _State(NamedTuple):
    """What layers that are chosen for know of others."""

    later: bool
    """One of them, which come later, offloads."""
    earlier: bool
    """One that isn't chosen for yet will."""


class _Front(NamedTuple):
    """Choices that no other undercuts in both figures, by the first; one entry of each array a choice."""

    bytes: NDArray[np.int64]
    """F of the formula above."""
    ns: NDArray[np.int64]
    """What the policies cost, in whole nanoseconds: sums have no order."""
    policy: NDArray[np.int64]
    """Of the first layer, as its place in `Policy`."""
    state: NDArray[np.int64]
    """That of the layers after it, as its place in the fronts there."""
    choice: NDArray[np.int64]
    """Theirs, as its place in their front."""


class Frontier:
    """The plans that are the best for some budget: the fastest first, each slower one smaller than all before.

    All are found at once, and each is made when it is asked for.
    """

    def __init__(self, memory: MemoryModel, times: StepTimes) -> None:
        self._memory, self._times = memory, times
        self._fronts: list[dict[_State, _Front]] = []
        """From the last layer to the first."""
        start = _Front(*(np.array([value]) for value in (memory.head, 0, 0, 0, 0)))
        fronts = {_State(False, earlier): start for earlier in ((False, True) if times.copy else (False,))}
        costs = {layer: layer.extra(times.copy, 2) for layer in set(times.layers)}
        ns = {layer: {policy: round(1e6 * ms) for policy, ms in each.items()} for layer, each in costs.items()}
        for layer in reversed(range(len(memory.layers))):
            fronts = self._before(fronts, layer, ns[times.layers[layer]])
            self._fronts.append(fronts)
        ends = [(state, i) for state in fronts if not state.earlier for i in range(len(fronts[state].ns))]
        found: list[tuple[int, int, tuple[_State, int] | Plan]] = [
            (int(fronts[state].ns[i]), max(int(fronts[state].bytes[i]), memory.last_grads), (state, i))
            for state, i in ends
        ]
        # besides, the smallest plan of all, which has one buffer: the fronts are of two
        smallest = _smallest(memory, times)
        pairs = zip(times.layers, followed(smallest.policies), strict=True)
        one = sum(round(1e6 * layer.extra(times.copy, 1)[policy]) for layer, policy in pairs)
        found.append((one, int(smallest.predicted["process"]) - memory.process(memory.resting), smallest))
        self._plans: list[tuple[_State, int] | Plan] = []
        self._peaks: list[int] = []
        for _, peak, made in sorted(found, key=lambda costs: costs[:2]):
            if not self._peaks or peak < self._peaks[-1]:
                self._peaks.append(peak)
                self._plans.append(made)

    def __len__(self) -> int:
        return len(self._plans)

    def within(self, budget: float) -> Plan:
        """Return the fastest plan whose process fits, or the smallest one of all."""
        peak = budget - self._memory.process(self._memory.resting)
        return self[next((i for i, each in enumerate(self._peaks) if each <= peak), -1)]

    def __getitem__(self, i: int) -> Plan:
        made = self._plans[i]
        if not isinstance(made, Plan):
            self._plans[i] = made = self._made(*made)
        return made

    def _before(self, fronts: dict[_State, _Front], layer: int, ns: dict[Policy, int]) -> dict[_State, _Front]:
        """Return the fronts with one layer before, whose policies cost so much."""
        sizes, grads = self._memory.layers[layer], self._memory.grads(layer)
        found: dict[_State, list[_Front]] = {}
        for place, (state, front) in enumerate(fronts.items()):
            for policy in sizes.stored:
                states, kept = [state], policy
                if policy is Policy.OFFLOAD:
                    if not state.earlier:
                        continue
                    states = [_State(True, earlier) for earlier in (False, True)]
                    kept = policy if state.later else Policy.RECOMPUTE_LAYER  # the last one's input stays
                for new in states:
                    ahead = self._memory.buffer if new.later and new.earlier else 0
                    moment = sizes.read[policy] + sizes.working + grads + ahead
                    count = len(front.ns)
                    found.setdefault(new, []).append(
                        _Front(
                            np.maximum(moment, sizes.stored[kept] + front.bytes),
                            front.ns + ns[kept],
                            np.full(count, list(Policy).index(policy)),
                            np.full(count, place),
                            np.arange(count),
                        )
                    )
        return {state: _undominated(parts) for state, parts in found.items()}

    def _made(self, state: _State, choice: int) -> Plan:
        """Make a plan; of layers of one kind those that store least come first, where that costs nothing.

        What the last layers kept is used first, and freed while the first layers' inputs come back.
        """
        policies = []
        for fronts, later in zip(self._fronts[::-1], [*self._fronts[-2::-1], {}], strict=True):
            front = fronts[state]
            policies.append(list(Policy)[front.policy[choice]])
            place, choice = int(front.state[choice]), int(front.choice[choice])
            state = list(later)[place] if later else state
        if policies.count(Policy.OFFLOAD) == 1:
            policies[policies.index(Policy.OFFLOAD)] = Policy.RECOMPUTE_LAYER
        made = _predicted(self._memory, self._times, policies, 2)
        other = _predicted(self._memory, self._times, list(self._sorted(policies)), 2)
        worse = any(other.predicted[name] > made.predicted[name] + 1e-9 for name in ("process", "step_ms"))
        return made if worse else other

    def _sorted(self, policies: Sequence[Policy]) -> Iterator[Policy]:
        kinds: list[tuple[tuple[LayerBytes, LayerTimes], list[Policy]]] = []
        of: list[list[Policy]] = []
        for sizes, times, policy in zip(self._memory.layers, self._times.layers, policies, strict=True):
            kind = next((found for known, found in kinds if known == (sizes, times)), None)
            if kind is None:
                kind = []
                kinds.append(((sizes, times), kind))
            kind.append(policy)
            of.append(kind)
        order = list(reversed(Policy))
        for (sizes, _), kind in kinds:
            kind.sort(key=lambda policy: (sizes.stored[policy], order.index(policy)), reverse=True)
        return (kind.pop() for kind in of)


def _undominated(fronts: Sequence[_Front]) -> _Front:
    """Keep the choices that no other undercuts in both figures."""
    joined = _Front(*map(np.concatenate, zip(*fronts, strict=True)))
    order = np.lexsort((joined.ns, joined.bytes))
    ns = joined.ns[order]
    kept = order[np.r_[True, ns[1:] < np.minimum.accumulate(ns)[:-1]]]
    return _Front(*(values[kept] for values in joined))
