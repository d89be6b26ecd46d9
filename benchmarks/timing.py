"""Read clocks, say whose turn it is, and compare series of steps. Nothing here needs a device but `CudaClock`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

STEPS_A_TURN = 4
HEAD_START = 20
"""Untimed steps before a candidate's first turn: with the gate's, more than Pronghorn needs to choose CUDA graphs."""
WARM_STEPS = 2
"""Untimed steps at the start of a turn: memory was freed since the last one and must be had from the driver again."""
PARTS = ("forward", "backward", "optimizer")
Step = dict[str, float]
"""Milliseconds of each part, and of the `step` in all."""


class HostClock:
    """Time work on the CPU, which is done when the call returns."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """Mark this moment."""
        return self._now()

    def milliseconds(self, marks: Sequence[float]) -> list[float]:
        """Return the milliseconds from each mark to the next."""
        return [(b - a) * 1e3 for a, b in pairwise(marks)]


class CudaClock:
    """Time the device's own work by CUDA events, whatever the host does meanwhile."""

    def mark(self) -> Any:
        """Mark this point of the current stream's work."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the milliseconds from each mark to the next, once the device has reached the last."""
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]


Clock = HostClock | CudaClock


def timed_step(works: Sequence[Callable[[], Any]], clock: Clock) -> Step:
    """Run forward, backward and the optimiser's step in order, and time each."""
    marks = [clock.mark()]
    for work in works:
        work()
        marks.append(clock.mark())
    times = clock.milliseconds(marks)
    return dict(zip(PARTS, times, strict=True)) | {"step": sum(times)}


def schedule(names: Sequence[str], repeats: int, steps_a_turn: int = STEPS_A_TURN) -> Iterator[tuple[str, int]]:
    """Say whose turn it is and how many steps it times: A B A B ..., `repeats` steps each in all.

    Turns alternate, so that a slow change of the machine (heat, neighbours) falls on all candidates alike.
    """
    while repeats > 0:
        steps = min(steps_a_turn, repeats)
        yield from ((name, steps) for name in names)
        repeats -= steps


def by_part(turns: Sequence[Sequence[Step]]) -> dict[str, list[float]]:
    """Return every repeat of all turns in milliseconds, by part."""
    steps = [step for turn in turns for step in turn]
    return {part: [step[part] for step in steps] for part in (*PARTS, "step") if steps}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, minimum and maximum."""
    return statistics.median(values), min(values), max(values)


def ratio(other: Sequence[Sequence[Step]], first: Sequence[Sequence[Step]]) -> tuple[float, float, float]:
    """Return how many times as long the other's step takes: median, minimum and maximum over neighbouring turns.

    Each pair of turns is compared by its medians. The spread is what the machine's noise does to the comparison.
    """
    medians = ([statistics.median(step["step"] for step in turn) for turn in turns] for turns in (other, first))
    return spread([b / a for b, a in zip(*medians, strict=True)])
