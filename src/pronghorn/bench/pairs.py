"""Contenders by turns, each in a process of its own: gate, A B A B ..., and what becomes of those that fail."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pronghorn.bench.contenders import CONTENDERS, Spec
from pronghorn.bench.gate import judge
from pronghorn.bench.process import OutOfMemory, Worker, WorkerError
from pronghorn.bench.reference import Reference
from pronghorn.bench.timing import HEAD_START, STEPS_A_TURN, WARM_STEPS, Series, alternate, ratio

RELAUNCHED_TURNS = 2
"""Turns of each contender where every turn starts a process: fewer and longer ones, since starting takes minutes."""


@dataclass
class Outcome:
    """What became of one contender."""

    label: str
    spec: Spec
    gate: dict[str, Any] = field(default_factory=lambda: {"green": False, "reasons": []})
    series: Series = field(default_factory=Series)
    memory: dict[str, int] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    """What its process told when it had loaded; empty if it never did."""
    first_step_s: float | None = None
    beside: dict[str, Any] = field(default_factory=dict)
    """The first contender's steps in the pair with this one, and how many times as long this one's take."""
    notes: list[str] = field(default_factory=list)
    finished: bool = False
    """Whether it was judged again after timed steps, and its launches counted."""

    @property
    def green(self) -> bool:
        """Whether the gate let it through."""
        return bool(self.gate["green"])

    @property
    def told(self) -> bool:
        """Whether anything became of it yet."""
        return bool(self.series.turns or self.gate["reasons"])

    def fail(self, reason: str) -> None:
        """Close the gate, and withhold what was measured."""
        self.gate = self.gate | {"green": False, "reasons": [*self.gate["reasons"], reason]}
        self.series, self.memory, self.counts, self.beside = Series(), {}, {}, {}


class _Failed(Exception):
    """A contender failed, its outcome says why."""


class Pairs:
    """The running processes, and whose turn it is.

    Args:
        rows, reference: files that every process reads.
        folder: for what the processes print.
        environment: of the processes.
        repeats: timed steps of each contender in a pair.
        device_bytes: memory of the GPU, 0 without one.
        say: told what is being done.
        keep: called whenever one is done with, since a long run may be cut off.
    """

    def __init__(
        self,
        rows: Path,
        reference: Path,
        folder: Path,
        environment: Mapping[str, str],
        repeats: int,
        device_bytes: int,
        say: Callable[[str], None],
        keep: Callable[[], None],
    ) -> None:
        self._rows, self._reference_path, self._reference = rows, reference, Reference.read(reference)
        self._folder, self._environment, self._repeats = folder, environment, repeats
        self._device_bytes, self._say, self._keep = device_bytes, say, keep
        self._running: dict[str, Worker] = {}
        self._limits: dict[str, int | None] = {}
        self._together = True

    def measure(self, first: Outcome, others: Sequence[Outcome]) -> None:
        """Gate and time the first with each of the others, or alone where no other can be timed."""
        try:
            self._measure(first, others)
        finally:  # whatever happened, no process is left behind
            self._stop_all_but()
        if not first.green:
            for other in others:
                other.beside = {}
        self._keep()

    def _measure(self, first: Outcome, others: Sequence[Outcome]) -> None:
        with self._recorded():
            self._enter(first)
        for other in others:
            with self._recorded():
                try:
                    self._pair(first, other)
                except OutOfMemory:
                    self._stop_all_but()
                    self._together = False
                    other.notes.append(f"doesn't fit beside {first.label}: every turn in a new process")
                    self._pair(first, other)
            with self._recorded():
                if other.green and not other.series.turns:  # the first failed on the way
                    self._pair(first, other)
            self._stop(other)
            self._together = True
            self._keep()
        with self._recorded():
            if first.green and not first.series.turns:
                self._alternate([first])
            self._finish(first)

    def _pair(self, first: Outcome, other: Outcome) -> None:
        if not other.green:
            self._enter(other)
        if other.green:
            pair = [first, other] if first.green else [other]
            series = self._alternate(pair)
            if first.green:
                a, b = series[first.label], series[other.label]
                other.beside = {"contender": first.label, "step_ms": a.parts["step"], "step_ratio": ratio(b, a)}
            self._finish(other)

    def _enter(self, outcome: Outcome) -> None:
        """Load a contender and judge it; a green one stays running, with a head start."""
        refused = _refusal(outcome.spec, self._device_bytes > 0)
        if refused is not None:
            return outcome.fail(refused)
        self._say(f"{outcome.label}: load and gate")
        self._ready(outcome)
        found = self._ask(outcome, "gate", reference=str(self._reference_path))
        outcome.first_step_s = found["first_step_s"]
        outcome.gate = judge(found, self._reference)
        if outcome.green:
            self._ask(outcome, "steps", count=HEAD_START, warm=0)
            self._ask(outcome, "rest")
        else:
            self._stop(outcome)

    def _alternate(self, pair: Sequence[Outcome]) -> dict[str, Series]:
        """Time a pair by turns; nothing is kept of a pair that breaks off."""
        by_label = {outcome.label: outcome for outcome in pair}
        self._say(f"{' and '.join(by_label)}: {self._repeats} steps each, by turns")
        a_turn = STEPS_A_TURN if self._together else -(-self._repeats // RELAUNCHED_TURNS)
        series = alternate(
            list(by_label), self._repeats, lambda label, steps: self._turn(by_label[label], steps), a_turn
        )
        for label, outcome in by_label.items():
            outcome.series.turns += series[label].turns
        return series

    def _turn(self, outcome: Outcome, steps: int) -> list[dict[str, float]]:
        self._ready(outcome)
        found = self._ask(outcome, "steps", count=steps, warm=WARM_STEPS)
        if found["memory_retries"] and self._beside(outcome):
            raise OutOfMemory(f"{outcome.label} had to free memory during a step", "run it alone")
        if not all(math.isfinite(loss) for loss in found["losses"]):
            outcome.fail(f"losses of timed steps are not finite: {found['losses']}")
            self._stop(outcome)
            raise _Failed(f"{outcome.label}: {outcome.gate['reasons'][-1]}")
        rest = self._ask(outcome, "rest")
        outcome.loaded["notes"] = rest["notes"]
        if self._device_bytes:
            outcome.memory = {"resting": rest["resting"], "peak": max(found["peak"], outcome.memory.get("peak", 0))}
        if not self._together:
            self._finish(outcome)
            self._stop(outcome)
        return found["steps"]

    def _finish(self, outcome: Outcome) -> None:
        """After the last timed step: judge once more, since CUDA graphs are chosen after the gate, and count launches
        and synchronisations; last, since a profiler leaves traces. Nothing is kept of one that is red now."""
        if not outcome.green or outcome.finished or outcome.label not in self._running:
            return
        outcome.finished = True
        if outcome.spec.method != "full":  # whose weights have moved, and can't be set back as adapters can
            self._judge_again(outcome)
        try:
            outcome.counts = self._running[outcome.label].ask("count")
        except WorkerError as error:  # no reason to withhold what was timed
            outcome.notes.append(f"launches and synchronisations could not be counted: {error.problem}")

    def _judge_again(self, outcome: Outcome) -> None:
        try:
            found = self._running[outcome.label].ask("gate", reference=str(self._reference_path))
        except OutOfMemory as error:  # the steps had room for what they need
            outcome.notes.append(f"not judged again after its steps: {error.problem}")
            return
        except WorkerError as error:
            reasons = [error.problem]
        else:
            again = judge(found, self._reference)
            outcome.gate["after_steps"], reasons = again, again["reasons"]
        for reason in reasons:
            outcome.fail(f"after its steps: {reason}")
        if reasons:
            self._stop(outcome)
            raise _Failed(f"{outcome.label}: {outcome.gate['reasons'][0]}")

    def _ready(self, outcome: Outcome) -> None:
        """Have the contender's process run, loaded; alone, unless this pair fits together."""
        if not self._together:
            self._stop_all_but(outcome)
        if outcome.label in self._running:
            return
        log = self._folder / f"{outcome.label.replace('/', '-')}.log"
        self._limits[outcome.label] = outcome.spec.memory
        self._running[outcome.label] = Worker("contender", self._environment, log)
        loaded = self._ask(outcome, "load", spec=asdict(outcome.spec), rows=str(self._rows))
        first = {name: outcome.loaded[name] for name in ("import_s", "load_s") if name in outcome.loaded}
        outcome.loaded = loaded | first  # a later process finds its files in the host's memory, but may plan anew
        if outcome.green:
            self._ask(outcome, "steps", count=HEAD_START, warm=0)

    def _ask(self, outcome: Outcome, command: str, **arguments: Any) -> dict[str, Any]:
        """Ask the contender's process. Out of memory beside another is raised, other errors are its failure."""
        try:
            return self._running[outcome.label].ask(command, **arguments)
        except WorkerError as error:
            self._stop(outcome)
            if isinstance(error, OutOfMemory) and self._beside(outcome):
                raise
            outcome.fail(error.problem)  # the remedy shows its output, which is no part of a result
            raise _Failed(f"{outcome.label}: {error}") from error

    def _beside(self, outcome: Outcome) -> bool:
        """Whether another process may be why its memory ran out: one runs, and limits don't keep them apart."""
        others = [self._limits[label] for label in self._running if label != outcome.label]
        limits = [math.inf if limit is None else limit for limit in (outcome.spec.memory, *others)]
        return bool(others) and sum(limits) > self._device_bytes

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """A contender that fails doesn't end the run: its outcome says why."""
        try:
            yield
        except _Failed as failed:
            self._say(f"failed: {failed}")

    def _stop(self, outcome: Outcome) -> None:
        if outcome.label in self._running:
            self._running.pop(outcome.label).close()

    def _stop_all_but(self, kept: Outcome | None = None) -> None:
        for label in [label for label in self._running if kept is None or label != kept.label]:
            self._running.pop(label).close()


def _refusal(spec: Spec, cuda: bool) -> str | None:
    """Why a contender can't be measured here, with what to do about it, or None."""
    contender = CONTENDERS[spec.contender]
    missing = [
        package for module, package in contender.requirements.items() if importlib.util.find_spec(module) is None
    ]
    if missing:
        return f"not installed: pip install {' '.join(dict.fromkeys(missing))}"
    if contender.needs_gpu and not cuda:
        return "needs an NVIDIA GPU: there is none here"
    return None
