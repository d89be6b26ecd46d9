"""Whether CUDA graphs of the backbone (`models.graph`) pay: the first training forwards are timed without them, and
where the host takes long to launch these, some with them. Nothing here waits for the device.

What counts is the time from one forward's start to the next one's, as the host launches backwards, too. Forwards that
had no backward, as in an evaluation of one's own, tell nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MEASURED_FORWARDS = 10
"""Training forwards that are timed without a graph, the first three left out: they compile. That leaves 6 times from
one to the next, as many as of replays: where micro-batches are accumulated every n-th has an optimiser step in it,
and the medians of 6 that follow each other then take the same ones, whatever n is."""
HOST_BOUND = 0.7
"""Share of a forward's time on the device that the host takes to launch it, from which on a graph is tried: the device
also waits here and there where the host keeps up on the whole."""
MEASURED_REPLAYS = 6
"""Times from a replayed forward to the next one that are taken then; their median passes over a slow first one."""
LOOKED_AT = 32
"""Training forwards, of which a quarter have to find a graph that is there."""
WASTED = 4
"""Times in a row that graphs are given back before one was found again, from which on none are captured: each capture
takes as long as some ten forwards."""
PAYS = 0.97
"""Of the time from a forward to the next one without a graph, the most that it may take with one."""


@dataclass
class _Timed:
    """A training forward without a graph."""

    host_ms: float
    begin: torch.cuda.Event
    end: torch.cuda.Event
    backwards: int = 0
    """How many have begun."""

    def note(self, gradient: Tensor) -> None:
        self.backwards += 1


class GraphBenefit:
    """What is known so far of one model. All figures are medians."""

    def __init__(self) -> None:
        self.host_share: float | None = None
        """Of a forward's time on the device, what the host takes to launch it."""
        self.plain_ms = 0.0
        """From one of these forwards to the next."""
        self.gain: float | None = None
        """The time from a forward to the next one with a graph, where without one it is 1."""
        self.rare = False
        """Whether few did: rows of ever other sizes, or adapters that are switched between steps."""
        self.no_memory = False
        """Whether a capture ran out of memory."""
        self.repeated = False
        """Whether a forward had several backwards (`retain_graph`): a graph's overwrites what it reads."""
        self._found: list[bool] = []
        """Whether each training forward found a graph there."""
        self._wasted = 0
        """Times in a row that graphs were given back before one was found again."""
        self._timed: list[_Timed] = []
        self._last: tuple[int, torch.cuda.Event] | None = None
        """(number, begin) of the training forward before, if it was a replay."""
        self._replayed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """When a replayed forward and the next one began, with nothing but a backward between them."""

    @property
    def wanted(self) -> bool:
        """Whether a graph pays, as far as is known."""
        pays = self.host_share is not None and self.host_share >= HOST_BOUND and (self.gain or 0.0) <= PAYS
        return pays and not (self.no_memory or self.rare or self.repeated)

    @property
    def lost(self) -> bool:
        """Whether it is known that a graph doesn't pay."""
        return self.host_share is not None and not self.wanted

    @property
    def why(self) -> str:
        """What was found, in words."""
        if self.host_share is None:
            return "the first steps measure whether it pays"
        if self.rare:
            return "few forwards found one that was captured before: rows differ, or the model is changed in between"
        if self.repeated:
            return "a forward had several backwards, and a graph's runs once"
        if self.no_memory:
            return "there was no memory for one"
        words = f"launching takes the host {self.host_share:.0%} of a forward's time"
        if self.gain is not None:
            words += f", from one to the next it takes {self.gain:.0%} of the time with a graph"
        return words

    def plain(self, run: Callable[[], Any]) -> Any:
        """Return the outputs of `run`, a training forward without a graph, which is timed if need be."""
        self._last = None
        if self.host_share is not None:
            return run()
        backwards = self._timed[-1].backwards if self._timed else 1
        self.repeated = self.repeated or backwards > 1
        if not backwards:
            self._timed.clear()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        began = time.perf_counter()
        outputs = run()
        timed = _Timed((time.perf_counter() - began) * 1e3, begin, end)
        end.record()
        if outputs[0].requires_grad:  # not where adapters are merged
            outputs[0].register_hook(timed.note)
        self._timed.append(timed)
        done = [each for each in self._timed if each.end.query()][MEASURED_FORWARDS // 3 :]
        if len(done) >= MEASURED_FORWARDS - MEASURED_FORWARDS // 3:
            self.host_share = statistics.median(each.host_ms / each.begin.elapsed_time(each.end) for each in done)
            self.plain_ms = statistics.median(one.begin.elapsed_time(other.begin) for one, other in pairwise(done))
            self._timed.clear()
        return outputs

    def looked_for(self, there: bool) -> None:
        """Note that a training forward looked for a graph: `there`, or none for such rows yet."""
        self._found.append(there)
        self._wasted = 0 if there else self._wasted

    def given_back(self) -> None:
        """Note that graphs were given back, as the model changed since they were captured."""
        self._wasted += 1
        self.rare = self.rare or self._wasted >= WASTED

    def replay_begins(self, number: int) -> None:
        """Note that a training forward is about to be replayed.

        Args:
            number: of forwards and backwards before it: two more than at the last one if only its backward was between.
        """
        if self.gain is not None:
            return
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        if self._last is not None and self._last[0] == number - 2:
            self._replayed.append((self._last[1], begin))
        self._last = number, begin

    def judge(self) -> None:
        """Know what graphs gain, once enough replays were timed, and whether they are replayed at all."""
        if len(self._found) == LOOKED_AT:
            self.rare = sum(self._found) < LOOKED_AT // 4
            self._found.clear()
        times = [one.elapsed_time(other) for one, other in self._replayed if other.query()]
        if len(times) >= MEASURED_REPLAYS:
            self.gain = statistics.median(times) / self.plain_ms
            self._replayed.clear()
