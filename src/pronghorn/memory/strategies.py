"""Predict what training on several GPUs takes, by strategy, and choose one.

    copies    every rank holds the whole model; gradients are averaged once a step
    sharded   ranks share the weights of each layer (`parallel.sharded`): frozen ones, or all in full fine-tuning

A collective of B bytes over N ranks takes (N − 1)/N · B / link to gather, twice that to average.
With g_l a layer's gather, f_l and b_l its forward and backward with what is recomputed,

    adapters          averaged after the last backward: nothing hides it
    copies, full      averaged during it: exposed = max(average of a bucket, average − Σ b_l)
    sharded           forward    g_1 + Σ max(f_l, g_{l+1}) + c · min(f_l, g_{l+1})
                      backward   Σ max(b_l, g_{l−1}) + c · min(…), without the last two layers', which are there
    sharded, full     the same with s, and
                      backward   Σ max(b_l, g_{l−1} + r_{l+1}) + s · min(…) + r_1, r_l the sum of a layer's gradients
                      into parts: of float32, where g_l is of 16 bits; s · the head's average beside the backward, and
                      the average of what else lies outside the layers after it

s is what compute loses to a collective beside it, which takes multiprocessors and memory's bandwidth; c is what it
loses to parts that copy engines bring. Frozen parts come so, and trained ones where there is room for their copies:
then the layers' terms have c in place of s. Of both ways to share trained layers the faster one that fits is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pronghorn.errors import ConfigError
from pronghorn.memory.devices import DeviceSpec
from pronghorn.memory.estimate import GIB, ModelDims, TrainSetup, buffer_bytes
from pronghorn.memory.plan import Plan, Policy, followed
from pronghorn.memory.planner import PlanDoesNotFit, plan, plans_of
from pronghorn.memory.sharded_bytes import gathered_bytes, kept_bytes
from pronghorn.memory.step_time import StepTimes, step_times

BUCKET_BYTES = 25 * 2**20
"""Of gradients that DistributedDataParallel averages together."""
AT_ONCE_BYTES = 2**30
"""Gradients of full fine-tuning up to this travel in one piece, too."""
SLOWED, COPIED = 0.7, 0.35
"""s and c above, of what travels at 75 % of the link. By 8B on two GPUs: gathered by NCCL, shared layers took 29 ms
more than copies in a step of LoRA (H200) and 90 ms more than one GPU in full fine-tuning, of float32; brought by copy
engines, 14 ms more in a step of LoRA (H100). A step of full fine-tuning took 765 ms by NCCL and 746 by copy engines
(H200)."""
HOST_SHARE = 0.9
"""Of the machine's memory that inputs in host memory may take."""


class Strategy(StrEnum):
    """How several GPUs hold one model."""

    COPIES = "copies"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Candidate:
    """What one strategy takes."""

    strategy: Strategy
    work: TrainSetup
    """How a rank trains."""
    plan: Plan | None
    """None where nothing fits."""
    process_bytes: int
    """A rank's, of the plan; of the smallest plan where nothing fits."""
    host_bytes: int
    """In host memory, of all ranks together."""
    communication_ms: float
    """Of a step, not hidden behind compute."""
    step_ms: float
    """Of a step: all its micro-batches, and communication."""
    refusal: str
    """Why it doesn't fit; empty where it does."""


@dataclass(frozen=True)
class Choice:
    """The strategy that is chosen, beside what it was chosen from."""

    gpus: int
    link: float
    """Bytes a second that were counted with."""
    link_source: str
    micro_batches: int
    """Of a step, on each rank."""
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    why: str


def choose(
    dims: ModelDims,
    setup: TrainSetup,
    device: DeviceSpec,
    gpus: int,
    *,
    budget_bytes: int | None = None,
    times: StepTimes | None = None,
    asked: Plan | None = None,
    strategy: Strategy | None = None,
    micro_batches: int = 1,
    host_memory_bytes: int | None = None,
) -> Choice:
    """Choose copies if they fit, else shards; or the strategy that is asked for.

    Args:
        setup: of one rank, as on one GPU.
        device: the smallest of the GPUs; its `link` is counted with.
        budget_bytes: of a rank's process; None for the whole device.
        times: of one rank's micro-batch, as measured; None for the device's estimate.
        asked: the plan that the recipe asks for; None or an undecided one for the fastest.
        strategy: None for what fits.
        micro_batches: of a step, on each rank.
        host_memory_bytes: of the machine; None where it isn't known.
    Raises:
        ConfigError: less than two GPUs, or a link whose rate isn't known; PlanDoesNotFit: with what would fit.
    """
    if gpus < 2:
        raise ConfigError(f"strategies are for several GPUs, and this is {gpus}", "ask for --gpus 2 or more")
    if not device.link:
        raise ConfigError(f"the rate between {gpus} of {device.name} isn't known", "give it, e.g. --link 12 (GB/s)")
    times = times or step_times(dims, setup, device)
    budget = device.memory_bytes if budget_bytes is None else budget_bytes
    room = None if host_memory_bytes is None else int(HOST_SHARE * host_memory_bytes)

    def candidate(strategy: Strategy) -> Candidate:
        works = [_work(dims, setup, strategy, gpus)]
        if strategy is Strategy.SHARDED and setup.method == "full":
            works.append(replace(works[0], copy_trained=True))
        made = [with_work(strategy, work) for work in works]
        return min(made, key=lambda each: each.step_ms if each.plan else math.inf)

    def with_work(strategy: Strategy, work: TrainSetup) -> Candidate:
        if strategy is Strategy.SHARDED and work.unshared:
            return Candidate(strategy, work, None, 0, 0, 0.0, 0.0, work.unshared)
        undecided, why = asked is None or asked.undecided, ""
        try:
            made = plan(dims, work, device, budget, times, asked)
            host = _host_bytes(made, dims, work, gpus)
            if room is not None and host > room and undecided:  # without what goes to the host
                why = f", as the host's memory has no room for what {gpus} ranks offload ({host / GIB:.1f} GiB)"
                made = plan(dims, work, device, budget, replace(times, copy=0.0), asked)
                host = _host_bytes(made, dims, work, gpus)
        except PlanDoesNotFit as error:
            least = int(plans_of(dims, work, times)[-1].predicted["process"])
            return Candidate(strategy, work, None, least, 0, 0.0, 0.0, f"{error.problem}{why}")
        process = int(made.predicted["process"])
        if room is not None and host > room:
            problem = f"{gpus} ranks keep {host / GIB:.1f} GiB in host memory, of {room / GIB:.1f} GiB"
            return Candidate(strategy, work, None, process, host, 0.0, 0.0, problem)
        exposed = communication_ms(dims, work, made, times, device.link, gpus, micro_batches)
        step = micro_batches * made.predicted["step_ms"] + exposed
        return Candidate(strategy, work, made, process, host, exposed, step, "")

    found = [candidate(each) for each in Strategy]
    copies, shards = found
    wanted = next((each for each in found if each.strategy is strategy), None)
    chosen = wanted or (copies if copies.plan or setup.unshared else shards)
    if chosen.plan is None:
        raise _refusal(chosen, dims, setup, times, gpus, budget, device.fp8)
    why = "asked for" if wanted else "every GPU has room for the whole model"
    if wanted is None and chosen is shards:
        why = f"copies don't fit: {copies.refusal}"
    return Choice(gpus, device.link, device.link_source, micro_batches, chosen, tuple(found), why)


def _work(dims: ModelDims, setup: TrainSetup, strategy: Strategy, gpus: int) -> TrainSetup:
    """Return how a rank trains; CUDA graphs don't reach weights that are gathered."""
    if strategy is Strategy.COPIES:
        return replace(setup, distributed=True, accumulates=True)
    accumulates = setup.accumulates or setup.method != "full"  # adapters' gradients are copied once more
    setup = replace(setup, fp8_experts=False)  # these multiply in the model's dtype then
    if setup.forward_in_fp8 and setup.method == "lora":  # of weights that multiply in 8 bits these alone are kept
        setup = replace(setup, linear_bytes=1.0, own_codes=True)
    return replace(setup, distributed=True, accumulates=accumulates, processes=gpus, graph=False)


def _host_bytes(made: Plan, dims: ModelDims, work: TrainSetup, gpus: int) -> int:
    """Count what all ranks keep in host memory: inputs that are offloaded, and optimisers' pages."""
    offloaded = followed(made.policies).count(Policy.OFFLOAD)
    return gpus * (offloaded * buffer_bytes(dims, work) + work.paged_bytes)


def communication_ms(
    dims: ModelDims, work: TrainSetup, made: Plan, times: StepTimes, link: float, gpus: int, micro_batches: int
) -> float:
    """Predict a step's milliseconds of communication that compute doesn't hide, by the formulas above.

    Args:
        link: bytes a second.
    """
    part = (gpus - 1) / gpus * 1e3 / link
    extra = [
        layer.extra(times.copy, made.buffers)[policy]
        for layer, policy in zip(times.layers, followed(made.policies), strict=True)
    ]
    forward = [layer.forward for layer in times.layers]
    backward = [layer.backward + more for layer, more in zip(times.layers, extra, strict=True)]
    full = work.method == "full"
    trained = (
        4 * dims.parameters if full else sum(work.adapters(layer) for layer in dims.layers) * work.adapter_itemsize
    )
    trained += work.trained_whole * work.itemsize
    if work.processes == 1:
        average = 2 * part * trained
        if trained <= AT_ONCE_BYTES or not full:
            return average
        return max(2 * part * BUCKET_BYTES, average - sum(backward))
    gather = [part * gathered_bytes(layer, work) for layer in dims.layers]
    downwards = [0.0, 0.0, *gather[-3::-1]]  # the last two layers are in the buffers
    after = 0.0
    if full:  # beside each layer's backward the gradients of the one before it are summed, after the next one's gather
        sums = [part * kept_bytes(layer, work) for layer in dims.layers]
        downwards = [g + r for g, r in zip(downwards, [0.0, 0.0, *sums[:1:-1]], strict=True)]
        head = 0 if dims.tied else dims.vocab * dims.hidden
        trained, after = 4 * (dims.outside - head), sums[0] + SLOWED * 2 * part * 4 * head
    slowed = SLOWED if full and not work.copy_trained else COPIED
    exposed = gather[0] + _pipelined(forward, gather, slowed) + _pipelined(backward[::-1], downwards, slowed) + after
    return micro_batches * exposed + 2 * part * trained


def _pipelined(compute: Sequence[float], gather: Sequence[float], slowed: float) -> float:
    """Return what is left over compute, and what that loses: beside each layer the next is gathered."""
    beside = list(zip(compute, [*gather[1:], 0.0], strict=False))
    return sum(max(0.0, more - work) + slowed * min(more, work) for work, more in beside)


def _refusal(
    least: Candidate, dims: ModelDims, setup: TrainSetup, times: StepTimes, gpus: int, budget: int, fp8: bool
) -> PlanDoesNotFit:
    """Make the error for a strategy that doesn't fit, with what would; `fp8` if the device has it."""

    def fits(strategy: Strategy, other: TrainSetup, count: int) -> bool:
        if strategy is Strategy.SHARDED and other.unshared:
            return False
        made = plans_of(dims, _work(dims, other, strategy, count), times)[-1]
        return made.predicted["process"] <= budget

    told = []
    if least.strategy is Strategy.COPIES and fits(Strategy.SHARDED, setup, gpus):
        told.append("--strategy sharded")
    if least.strategy is Strategy.SHARDED:
        more = next((n for n in (2**i for i in range(1, 8)) if n > gpus and fits(Strategy.SHARDED, setup, n)), None)
        told += [f"--gpus {more}"] if more else []
    if setup.method == "lora" and setup.linear_bytes is None and setup.expert_bytes is None:
        told += ["model.load_in_4bit: true"] if fits(least.strategy, replace(setup, method="qlora"), gpus) else []
    if setup.int8 and fp8:
        told += ["precision.compute: fp8"] if fits(least.strategy, setup.in_fp8, gpus) else []
    if setup.method == "full":
        lora = replace(setup, method="lora", ranks=None, trained_share=1.0, optimizer_bytes=None, unshared="")
        told += ["adapter.method: lora"] if fits(least.strategy, lora, gpus) else []
    rows = next(
        (setup.tokens // d for d in (2, 4, 8) if fits(least.strategy, replace(setup, tokens=setup.tokens // d), gpus)),
        0,
    )
    told += [f"rows of {rows:,} tokens"] if rows else []
    remedy = (
        f"fits: {', or '.join(told)}" if told else "use a larger GPU: none of more GPUs, 4 bits and shorter rows fits"
    )
    return PlanDoesNotFit(f"on {gpus} GPUs ({least.strategy.value}), {least.refusal}", remedy)
