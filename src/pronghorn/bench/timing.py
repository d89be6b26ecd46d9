"""Timing without a device in sight: clocks, who runs when, and what the repeats say. Pure but for the clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

STEPS_A_TURN = 4
HEAD_START = 20
"""Untimed steps before a contender's first turn: with the gate's more than Pronghorn needs to choose CUDA graphs."""
WARM_STEPS = 2
"""Untimed steps at the start of a turn: memory was freed since the last one and must be had from the driver again."""
PARTS = ("forward", "backward", "optimizer")


class HostClock:
    """For the CPU, where work is done when the call returns."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        return self._now()

    def milliseconds(self, marks: Sequence[float]) -> list[float]:
        return [(b - a) * 1e3 for a, b in pairwise(marks)]


class CudaClock:
    """CUDA events: the device's own time, whatever the host does meanwhile."""

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, marks: Sequence[Any]) -> list[float]:
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]


Clock = HostClock | CudaClock
"""Marks points in the device's work, and tells the milliseconds from each to the next once the last is reached."""


def timed_step(works: Sequence[Callable[[], Any]], clock: Clock) -> dict[str, float]:
    """Run forward, backward and the optimiser's step in order: milliseconds of each, and of the `step` in all."""
    marks = [clock.mark()]
    for work in works:
        work()
        marks.append(clock.mark())
    times = clock.milliseconds(marks)
    return dict(zip(PARTS, times, strict=True)) | {"step": sum(times)}


def schedule(contenders: Sequence[str], repeats: int, steps_a_turn: int = STEPS_A_TURN) -> Iterator[tuple[str, int]]:
    """Whose turn it is and how many steps are timed in it: A B A B ..., `repeats` steps each in all.

    Alternating, so that a slow change of the machine (heat, neighbours) falls on all of them alike.
    """
    while repeats > 0:
        steps = min(steps_a_turn, repeats)
        yield from ((contender, steps) for contender in contenders)
        repeats -= steps


@dataclass
class Series:
    """One contender's timed steps, turn by turn."""

    turns: list[list[dict[str, float]]] = field(default_factory=list)

    @property
    def parts(self) -> dict[str, list[float]]:
        """Every repeat in milliseconds, by part."""
        steps = [step for turn in self.turns for step in turn]
        return {part: [step[part] for step in steps] for part in (*PARTS, "step") if steps}


def alternate(
    contenders: Sequence[str],
    repeats: int,
    run_turn: Callable[[str, int], list[dict[str, float]]],
    steps_a_turn: int = STEPS_A_TURN,
) -> dict[str, Series]:
    """Run the schedule; `run_turn(contender, steps)` gives the times of so many steps."""
    series = {contender: Series() for contender in contenders}
    for contender, steps in schedule(contenders, repeats, steps_a_turn):
        series[contender].turns.append(run_turn(contender, steps))
    return series


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest."""
    return statistics.median(values), min(values), max(values)


def ratio(other: Series, first: Series) -> tuple[float, float, float]:
    """How many times as long the other's step takes: median, least and greatest over neighbouring turns, each compared
    by its median. Its spread is what the machine's noise does to the comparison."""
    pairs = zip(other.turns, first.turns, strict=True)
    return spread([statistics.median(s["step"] for s in b) / statistics.median(s["step"] for s in a) for b, a in pairs])
