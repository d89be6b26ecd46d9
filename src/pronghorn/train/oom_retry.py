"""An out-of-memory error in a training step is survived: the step is repeated under a tighter plan.

Gradients of an accumulation window are added up, so after an error some of the failed micro-batch's may be among them.
All are dropped and the window is run again from its first micro-batch, each with the random state that it had: no
gradient is ever copied, and what is kept while nothing fails is a reference to each batch and a few bytes of state.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from traceback import clear_frames, walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pronghorn.device import is_out_of_memory, processes
from pronghorn.environment import restarts
from pronghorn.errors import ConfigError, MemoryRanOut, PronghornError, TrainingError, UnsupportedError, causes
from pronghorn.memory.plan import CODES_WRITTEN, WRITTEN_ONCE, Plan, Policy
from pronghorn.models.attach import attached
from pronghorn.models.families import recomputes_layers
from pronghorn.text import counted

MAX_RETRIES = 3
"""Out-of-memory errors of one training that are survived."""
_KEY, _SURVIVED = "pronghorn: out of memory", "pronghorn: out of memory, survived"


@dataclass(frozen=True)
class OutOfMemory:
    """One error that was survived."""

    step: int
    micro_batch: int
    """From 1, within the step."""
    used_bytes: int | None
    """Device memory in use when it came, and what there is; None on the CPU."""
    total_bytes: int | None
    plan: str
    """What layers do from then on."""
    process: int = 0
    """The number of the process that it came to."""
    restarted: bool = False
    """Whether all processes were started again for it, as others waited in the step for this one."""

    def __str__(self) -> str:
        share = _share(self.used_bytes, self.total_bytes)
        again = "and is repeated" if processes() == 1 else f"in process {self.process}, which repeats it"
        if self.restarted:
            again = f"in process {self.process}, so that all were started again"
        return f"step {self.step} ran out of memory{share} {again}; layers from here on: {self.plan}"


_TIGHTER = {
    Policy.KEEP: Policy.RECOMPUTE_MLP,
    Policy.RECOMPUTE_NORMS: Policy.RECOMPUTE_MLP,
    Policy.RECOMPUTE_MLP: Policy.RECOMPUTE_LAYER,
    Policy.RECOMPUTE_LAYER: Policy.OFFLOAD,
    Policy.OFFLOAD: Policy.OFFLOAD,
}
"""The cheap parts alone would free too little for one of `MAX_RETRIES`; these reach from the first to the last."""


def tighten(plan: Plan) -> Plan | None:
    """Put every layer under a policy that keeps much less, after weights that were kept as they are written out; None
    if nothing is left."""
    if plan.written_once:
        return replace(plan, written_once=False, predicted={})
    policies = tuple(_TIGHTER[policy] for policy in plan.policies)
    return None if policies == plan.policies else replace(plan, policies=policies, predicted={})


class OomRetry:
    """Runs the micro-batches of one training.

    Args:
        on_retry: called with every error that was survived, before the step is repeated; in the other processes, when
            they follow.
        tighter: the plan to go on with after one that ran out of memory, or None.
    """

    def __init__(
        self, on_retry: Callable[[OutOfMemory], None], tighter: Callable[[Plan], Plan | None] = tighten
    ) -> None:
        self._on_retry, self._tighter = on_retry, tighter
        self.begin(waits_for_others=processes() > 1)

    def begin(self, waits_for_others: bool) -> None:
        """Begin a training.

        Args:
            waits_for_others: the backward averages gradients with other processes, so that none can repeat it by
                itself.
        """
        self._survived, self._before = 0, _survived()
        self._restarts = restarts()
        self._alone = not waits_for_others
        self._window: list[tuple[Any, _RandomState]] = []
        self._devices: list[torch.device] | None = None

    def run(self, model: Any, step: int, last: bool, inputs: Any, micro_batch: Callable[[Any], Tensor]) -> Tensor:
        """Return the loss of `micro_batch(inputs)`, a forward and a backward; repeated where memory runs out.

        Args:
            step: the optimiser step that the micro-batch belongs to, from 1.
            last: it is the step's last one.
        Raises:
            TrainingError: no plan is tighter, or it was the fourth time.
            MemoryRanOut: other processes wait for this one.
        """
        if self._devices is None:
            self._devices = sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)
        if not self._window:
            self._follow_others(model)
        self._window.append((inputs, _RandomState(self._devices)))
        found = self._attempt(micro_batch, [inputs])
        while not isinstance(found, Tensor):
            model.zero_grad(set_to_none=True)
            _free(self._devices)
            plan, applied = _tighter_plan(model, self._tighter)
            used, rank = (found.used_bytes, found.total_bytes), dist.get_rank() if processes() > 1 else 0
            event = None
            if plan is not None and applied and self._survived < MAX_RETRIES:
                event = OutOfMemory(step, len(self._window), *used, _words(plan), rank, restarted=not self._alone)
            if event is None or event.restarted:
                problem = f"step {step} ran out of memory{_share(*used)}"
                if not self._alone:
                    problem += f" in process {rank} of {processes()}, which can't repeat it alone"
                if self._survived == MAX_RETRIES:
                    problem += f", after {MAX_RETRIES} times that were survived"
                raise self._stop(problem, plan, event) from found.error
            self._survived += 1
            if processes() > 1:
                number = self._before + self._survived
                _store().set(f"{_SURVIVED} {number}", json.dumps(asdict(event)))
                _store().set(_SURVIVED, str(number))
            _free(self._devices)  # what the plan before held: CUDA graphs, buffers
            self._on_retry(event)
            found = self._attempt(micro_batch, self._replayed())
        if last:
            self._window.clear()
        return found

    def _follow_others(self, model: Any) -> None:
        """Keep as little as the process that keeps least: memory that ran out there will soon run out here.

        So do all that were started again because it ran out. Asking takes a twentieth of a millisecond, and no device
        waits.
        """
        events = self._restarts[self._survived :]
        if self._alone and processes() > 1:
            numbers = range(self._before + self._survived, _survived())
            events = [json.loads(_store().get(f"{_SURVIVED} {number + 1}")) for number in numbers]
        for event in events:
            self._survived += 1
            _tighter_plan(model, self._tighter)
            self._on_retry(OutOfMemory(**event))

    def _replayed(self) -> Iterator[Any]:
        """Yield the window's batches, each with the random state of its first time."""
        for inputs, state in self._window:
            state.restore()
            yield inputs

    def _attempt(self, micro_batch: Callable[[Any], Tensor], batches: Iterable[Any]) -> Tensor | _Failure:
        """Return the last batch's loss (the others' are counted already), or how memory ran out."""
        try:
            for batch in batches:
                loss = micro_batch(batch)
            return loss
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = _Failure(error, *_fullest(self._devices or []))
            _forget(error)
            return failure

    def explained(self, error: RuntimeError, model: Any, step: int) -> TrainingError | None:
        """Return what an error that ended the training means, if memory is why, or None.

        It ran out in the optimiser, which may have updated a part of the weights and so can't go again, or in another
        process.
        """
        if isinstance(error, PronghornError):
            return None
        if is_out_of_memory(error):
            if not any(isinstance(frame.f_locals.get("self"), Optimizer) for frame, _ in walk_tb(error.__traceback__)):
                return None
            filled = _fullest(self._devices or [])
            _forget(error)
            where = "in the optimiser, which may have updated a part of the weights"
            return self._stop(
                f"step {step} ran out of memory{_share(*filled)} {where}", _tighter_plan(model, self._tighter)[0]
            )
        return None if processes() == 1 else _heard() or _late(error)

    def _stop(self, problem: str, plan: Plan | None, event: OutOfMemory | None = None) -> TrainingError:
        """Return the error to raise, and leave it where other processes look when they wonder why this one is gone.

        Args:
            event: what all processes may survive when they are started again.
        """
        less = "fewer rows a micro-batch, shorter rows or a quantised base"
        remedy = f"no plan keeps less: train with {less}"
        if plan is not None:
            remedy = f"start again, from the last checkpoint if there is one, with the plan {_words(plan)!r} or {less}"
        if processes() > 1:
            _store().set(_KEY, json.dumps([problem, remedy, None if event is None else asdict(event)]))
        return TrainingError(problem, remedy) if event is None else MemoryRanOut(problem, remedy, asdict(event))


@dataclass(frozen=True)
class _Failure:
    error: RuntimeError
    used_bytes: int | None
    total_bytes: int | None


class _RandomState:
    """The state of torch's random generators, of the CPU and of `devices`: reading it makes no device wait."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.cuda.set_rng_state(state, device)


def _tighter_plan(model: Any, tighter: Callable[[Plan], Plan | None]) -> tuple[Plan | None, bool]:
    """Return the next tighter plan that attach serves, and whether the model follows it now (a sharded one can't)."""
    handle = attached(model)
    plan = None if handle is None else handle.plan
    if handle is not None and plan is None:  # transformers' arguments decided
        plan = Plan.recompute() if recomputes_layers(handle.model) else Plan.keep()
    while handle is not None and plan is not None:
        plan = tighter(plan)
        if plan is not None:
            try:
                handle.replan(plan)
            except UnsupportedError:
                continue
            except ConfigError:
                return plan, False
            return plan, True
    return None, False


def _forget(error: BaseException) -> None:
    """Drop what the frames that an error came through hold: a forward's and a backward's tensors."""
    for each in causes(error):
        clear_frames(each.__traceback__)


def _free(devices: list[torch.device]) -> None:
    gc.collect()  # reference cycles through autograd's functions
    if devices:
        torch.cuda.empty_cache()


def _fullest(devices: list[torch.device]) -> tuple[int, int] | tuple[None, None]:
    """Return the bytes in use and in all of the fullest device, within this process's share of it."""
    found = []
    for device in devices:
        free, total = torch.cuda.mem_get_info(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        used = total - free if share == 1 else torch.cuda.memory_reserved(device)
        found.append((used, int(share * total)))
    return max(found, key=lambda each: each[0] / each[1], default=(None, None))


def _share(used: int | None, total: int | None) -> str:
    return "" if used is None or total is None else f" ({used / 2**30:.1f} of {total / 2**30:.1f} GiB)"


def _words(plan: Plan) -> str:
    counts = Counter(plan.policies)
    told = [policy if len(counts) == 1 else f"{policy} ({counted(n, 'layer')})" for policy, n in counts.items()]
    ways = [CODES_WRITTEN] * plan.codes_written + [WRITTEN_ONCE] * plan.written_once
    return ", ".join([*told, *ways])


def _store() -> Any:
    """Return the store that the processes of a group share besides their collectives (torch names it only so)."""
    return dist.distributed_c10d._get_default_store()


def _survived() -> int:
    """Count the errors that all processes together have survived, of earlier trainings too."""
    if processes() == 1 or not _store().check([_SURVIVED]):
        return 0
    return int(_store().get(_SURVIVED))


def _late(error: RuntimeError) -> TrainingError | None:
    """Return the error of a process that waited too long for another one."""
    if "timed out" not in str(error).lower():
        return None
    return TrainingError(
        f"process {dist.get_rank()} of {processes()} waited for another one that did not answer in time",
        "look for the process that hangs; launch.timeout_minutes (ddp_timeout) says how long is waited",
    )


def _heard() -> TrainingError | None:
    """Return the error that another process left behind, or None."""
    try:
        if _store().check([_KEY]):
            problem, remedy, event = json.loads(_store().get(_KEY))
            return TrainingError(problem, remedy) if event is None else MemoryRanOut(problem, remedy, event)
    except dist.DistError:  # the process that holds the store is the one that is gone
        return None
    return None
