"""Measure candidates by turns, each in a process of its own: gate, A B A B ..., and what becomes of those that fail."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.candidates import CANDIDATES, Spec
from benchmarks.gate import judge
from benchmarks.reference import Reference
from benchmarks.timing import HEAD_START, STEPS_A_TURN, WARM_STEPS, Step, by_part, ratio, schedule
from benchmarks.worker import ROOT, OutOfMemory, Worker, WorkerError
from benchmarks.workload import Row

RELAUNCHED_TURNS = 2
"""Turns of each candidate where every turn starts a process: fewer and longer ones, since starting takes minutes."""


@dataclass
class CandidateResult:
    """What became of one candidate."""

    label: str
    spec: Spec
    python: str = sys.executable
    """The interpreter of its process."""
    tree: Path = ROOT
    """The checkout whose source its process imports."""
    gate: dict[str, Any] = field(default_factory=lambda: {"green": False, "reasons": []})
    turns: list[list[Step]] = field(default_factory=list)
    """Its timed steps, turn by turn."""
    memory: dict[str, int] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    """What its process returned when it had loaded; empty if it never did."""
    first_step_s: float | None = None
    paired_with: dict[str, Any] = field(default_factory=dict)
    """The first candidate's steps in the pair with this one, and how many times as long this one's take."""
    notes: list[str] = field(default_factory=list)
    finished: bool = False
    """Whether it was judged again after timed steps, and its launches counted."""

    @property
    def green(self) -> bool:
        """Tell whether the gate let it through."""
        return bool(self.gate["green"])

    @property
    def known(self) -> bool:
        """Tell whether anything became of it yet."""
        return bool(self.turns or self.gate["reasons"])

    def fail(self, reason: str) -> None:
        """Close the gate, and withhold what was measured."""
        self.gate = self.gate | {"green": False, "reasons": [*self.gate["reasons"], reason]}
        self.turns, self.memory, self.counts, self.paired_with = [], {}, {}, {}


class _Failed(Exception):
    """A candidate failed; its result says why."""


@dataclass
class PairedRunner:
    """Measure a first candidate by turns with each of the others, and hold their processes."""

    rows: Sequence[Row]
    """What everybody trains on; the gate judges on the first row."""
    reference: Reference
    folder: Path
    """For what the processes print."""
    repeats: int
    """Timed steps of each candidate in a pair."""
    device_bytes: int
    """Memory of the GPU, 0 without one."""
    log: Callable[[str], None]
    """Takes a line about what is being done."""
    on_result: Callable[[], None]
    """Called whenever one is done with, since a long run may be cut off."""
    _running: dict[str, tuple[Worker, Spec]] = field(default_factory=dict)
    _together: bool = True

    def run(self, first: CandidateResult, others: Sequence[CandidateResult]) -> None:
        """Gate and time the first with each of the others, or alone where no other can be timed."""
        try:
            with self._failures_logged():
                self._enter(first)
            for other in others:
                self._run_pair(first, other)
                self.on_result()
            with self._failures_logged():
                if first.green and not first.turns:
                    self._alternate([first])
                self._finish(first)
        finally:  # whatever happened, no process is left behind
            self._stop(*self._running)
        if not first.green:
            for other in others:
                other.paired_with = {}
        self.on_result()

    def _run_pair(self, first: CandidateResult, other: CandidateResult) -> None:
        with self._failures_logged():
            try:
                self._pair(first, other)
            except OutOfMemory:
                self._stop(*self._running)
                self._together = False
                other.notes.append(f"doesn't fit together with {first.label}: every turn in a new process")
                self._pair(first, other)
        with self._failures_logged():
            if other.green and not other.turns:  # the first failed on the way
                self._pair(first, other)
        self._stop(other.label)
        self._together = True

    def _pair(self, first: CandidateResult, other: CandidateResult) -> None:
        if not other.green:
            self._enter(other)
        if other.green:
            turns = self._alternate([first, other] if first.green else [other])
            if first.green:
                other.paired_with = {
                    "candidate": first.label,
                    "step_ms": by_part(turns[first.label])["step"],
                    "step_ratio": ratio(turns[other.label], turns[first.label]),
                }
            self._finish(other)

    def _enter(self, result: CandidateResult) -> None:
        """Load a candidate and judge it; a green one stays running, with a head start."""
        reason = unavailable(result.spec, result.python, self.device_bytes > 0)
        if reason is not None:
            return result.fail(reason)
        self.log(f"{result.label}: load and gate")
        self._ensure_running(result)
        measured = self._call(result, "gate", reference=self.reference)
        result.first_step_s = measured["first_step_s"]
        result.gate = judge(measured, self.reference)
        if result.green:
            self._call(result, "steps", count=HEAD_START, warm=0)
            self._call(result, "rest")
        else:
            self._stop(result.label)

    def _alternate(self, pair: Sequence[CandidateResult]) -> dict[str, list[list[Step]]]:
        """Time a pair by turns; nothing is kept of a pair that breaks off."""
        by_label = {result.label: result for result in pair}
        self.log(f"{' and '.join(by_label)}: {self.repeats} steps each, by turns")
        a_turn = STEPS_A_TURN if self._together else -(-self.repeats // RELAUNCHED_TURNS)
        turns: dict[str, list[list[Step]]] = {label: [] for label in by_label}
        for label, steps in schedule(list(by_label), self.repeats, a_turn):
            turns[label].append(self._turn(by_label[label], steps))
        for label, result in by_label.items():
            result.turns += turns[label]
        return turns

    def _turn(self, result: CandidateResult, steps: int) -> list[Step]:
        self._ensure_running(result)
        measured = self._call(result, "steps", count=steps, warm=WARM_STEPS)
        if measured["memory_retries"] and self._shares_memory(result):
            raise OutOfMemory(f"{result.label} had to free memory during a step", "run it alone")
        if not all(math.isfinite(loss) for loss in measured["losses"]):
            self._fail(result, f"losses of timed steps are not finite: {measured['losses']}")
        rest = self._call(result, "rest")
        result.loaded["notes"] = rest["notes"]
        if self.device_bytes:
            result.memory = {"resting": rest["resting"], "peak": max(measured["peak"], result.memory.get("peak", 0))}
        if not self._together:
            self._finish(result)
            self._stop(result.label)
        return measured["steps"]

    def _finish(self, result: CandidateResult) -> None:
        """Judge once more after the last timed step, since CUDA graphs are chosen after the gate; withhold if red.

        Then count launches and synchronisations: last, since a profiler leaves traces.
        """
        if not result.green or result.finished or result.label not in self._running:
            return
        result.finished = True
        worker, _ = self._running[result.label]
        try:
            if result.spec.method != "full":  # its weights have moved, and can't be set back as adapters can
                result.gate["after_steps"] = judge(worker.call("gate", reference=self.reference), self.reference)
                if reasons := result.gate["after_steps"]["reasons"]:
                    self._fail(result, *(f"after its steps: {reason}" for reason in reasons))
        except OutOfMemory as error:  # the steps had room for what they need
            result.notes.append(f"not judged again after its steps: {error.problem}")
        except WorkerError as error:
            self._fail(result, f"after its steps: {error.problem}")
        try:
            result.counts = worker.call("count")
        except WorkerError as error:  # no reason to withhold what was timed
            result.notes.append(f"launches and synchronisations could not be counted: {error.problem}")

    def _ensure_running(self, result: CandidateResult) -> None:
        """Start and load the candidate's process unless it runs; alone, unless this pair fits together."""
        if not self._together:
            self._stop(*(label for label in self._running if label != result.label))
        if result.label in self._running:
            return
        log = self.folder / f"{result.label.replace('/', '-')}.log"
        self._running[result.label] = Worker(log, result.python, result.tree), result.spec
        loaded = self._call(result, "load", spec=result.spec, rows=self.rows)
        first = {name: result.loaded[name] for name in ("import_s", "load_s") if name in result.loaded}
        result.loaded = loaded | first  # a later process finds its files in the host's memory, but may plan anew
        if result.green:
            self._call(result, "steps", count=HEAD_START, warm=0)

    def _call(self, result: CandidateResult, function: str, **arguments: Any) -> Any:
        """Call the candidate's process. Out of memory that it shares is raised, other errors are its failure."""
        try:
            return self._running[result.label][0].call(function, **arguments)
        except WorkerError as error:
            shares = self._shares_memory(result)
            self._stop(result.label)
            if isinstance(error, OutOfMemory) and shares:
                raise
            self.log(str(error))  # with its output, which is not part of a result
            self._fail(result, error.problem)

    def _shares_memory(self, result: CandidateResult) -> bool:
        """Tell whether another process may be why memory ran out: one runs, and limits don't keep them apart."""
        others = [spec.memory for label, (_, spec) in self._running.items() if label != result.label]
        limits = [math.inf if limit is None else limit for limit in (result.spec.memory, *others)]
        return bool(others) and sum(limits) > self.device_bytes

    def _fail(self, result: CandidateResult, *reasons: str) -> NoReturn:
        self._stop(result.label)
        for reason in reasons:
            result.fail(reason)
        raise _Failed(f"{result.label}: {result.gate['reasons'][0]}")

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Go on after a candidate that fails: its result says why."""
        try:
            yield
        except _Failed as failed:
            self.log(f"failed: {failed}")

    def _stop(self, *labels: str) -> None:
        for label in labels:
            if label in self._running:
                self._running.pop(label)[0].close()


def unavailable(spec: Spec, python: str, cuda: bool) -> str | None:
    """Return why a candidate can't be measured here, with what to do about it, or None."""
    candidate = CANDIDATES[spec.candidate]
    missing = [] if python != sys.executable else [
        package for module, package in candidate.requirements.items() if importlib.util.find_spec(module) is None
    ]  # fmt: skip
    if missing:
        return f"not installed: pip install {' '.join(dict.fromkeys(missing))}"
    if candidate.needs_gpu and not cuda:
        return "needs an NVIDIA GPU: there is none here"
    return None
