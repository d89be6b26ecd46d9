"""Which rows an optimiser step has, and which process computes which of them.

A step is drawn from one order that depends on the seed and the epoch alone, and never on how many processes there are:
the same run on one GPU and on four has the same rows in every step. Inside a step rows are dealt to processes so that
their costs differ least; rows are all of one length, so what differs is attention, which grows with the square of each
document. A step of padded documents is stock's; they are dealt by length (`ByLength`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import Sampler

LOOK_AHEAD, WORTH_REGROUPING = 16, 0.02
"""Steps that are regrouped where nobody says how many, and the share of waiting from which they are."""


class Unsupervised(NamedTuple):
    """The index of a row that takes part without labels: a process whose share of an epoch's last step is smaller."""

    row: int


@dataclass(frozen=True)
class Share:
    """What one process computes of every step."""

    process: int
    processes: int
    rows: int
    """Of a micro-batch."""
    micro_batches: int
    """Of a step."""

    @property
    def step_rows(self) -> int:
        """Return the rows of a step, of all processes."""
        return self.rows * self.micro_batches * self.processes


def deal(costs: Sequence[float], processes: int, each: int) -> list[list[int]]:
    """Deal items to processes, at most `each` to one, so that their sums differ little.

    The dearest first, each to the process with the least so far; of equal ones the first. Returns the indices of every
    process in ascending order, so that one process has them as they were.
    """
    hands: list[list[int]] = [[] for _ in range(processes)]
    sums = [0.0] * processes
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min((p for p in range(processes) if len(hands[p]) < each), key=lambda p: (sums[p], p))
        hands[least].append(index)
        sums[least] += costs[index]
    return [sorted(hand) for hand in hands]


def order(rows: int, seed: int, epoch: int, shuffled: bool = True) -> list[int]:
    """Return an epoch's order of rows."""
    indices = list(range(rows))
    if shuffled:
        random.Random(f"{seed} {epoch}").shuffle(indices)
    return indices


def steps(
    indices: Sequence[int], costs: Sequence[float], step_rows: int, look_ahead: int, seed: int
) -> list[list[int]]:
    """Cut an epoch's order into the rows of each step.

    With `look_ahead` above 1 the rows of so many whole steps are regrouped by their costs, so that a step's rows take
    alike long, and these steps come in a random order. The last step may have fewer rows.
    """
    cut = [list(indices[i : i + step_rows]) for i in range(0, len(indices), step_rows)]
    whole = [step for step in cut if len(step) == step_rows]
    if look_ahead == 1:
        return cut
    regrouped: list[list[int]] = []
    for begin in range(0, len(whole), look_ahead):
        window = sorted((row for step in whole[begin : begin + look_ahead] for row in step), key=lambda row: costs[row])
        alike = [window[i : i + step_rows] for i in range(0, len(window), step_rows)]
        random.Random(f"{seed} {begin} {len(costs)}").shuffle(alike)
        regrouped += alike
    return regrouped + cut[len(whole) :]


def imbalance(costs: Sequence[float], cut: Sequence[Sequence[int]], processes: int, dealt: bool) -> float:
    """Return the share of all processes' time that they wait for the slowest, by costs; rows dealt in turn, or `deal`t.

    0 is perfect; 0.5 on two processes means that one always waits.
    """
    busy = waited = 0.0
    for step in cut:
        step_costs = [costs[row] for row in step]
        each = -(-len(step) // processes)
        hands = (
            deal(step_costs, processes, each)
            if dealt
            else [list(range(p, len(step), processes)) for p in range(processes)]
        )
        sums = [sum(step_costs[i] for i in hand) for hand in hands]
        busy += sum(sums)
        waited += max(sums) * processes
    return 1 - busy / waited if waited else 0.0


class DealtRows(Sampler):
    """The micro-batches of one process, as lists of row indices.

    Every process has equally many in each step. Where an epoch's last step has too few rows for all, what is missing
    is an `Unsupervised` row.

    Args:
        costs: of each row, in any unit.
        seed: of the order, with the epoch (`set_epoch`).
        shuffled: whether an epoch's order is random.
        look_ahead: steps whose rows are regrouped by cost; see `steps`. None: `LOOK_AHEAD` where processes that compute
            one row of a step each would wait long for each other. So it is the same on any number of processes. What
            isn't shuffled keeps its order.
        drop_last: leave out what doesn't fill a micro-batch of every process.
    """

    def __init__(
        self,
        costs: Sequence[float],
        share: Share,
        seed: int,
        shuffled: bool = True,
        look_ahead: int | None = 1,
        drop_last: bool = False,
    ) -> None:
        self.costs, self.share, self.look_ahead = costs, share, look_ahead or 1
        self._seed, self._shuffled, self._epoch = seed, shuffled, 0
        self._rows = len(costs) - (len(costs) % (share.rows * share.processes) if drop_last else 0)
        if look_ahead is None and shuffled:
            waiting = imbalance(costs, self.steps(), share.step_rows, dealt=False)
            self.look_ahead = LOOK_AHEAD if waiting > WORTH_REGROUPING else 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self._epoch = epoch

    def steps(self, look_ahead: int | None = None) -> list[list[int]]:
        """Return the rows of this epoch's steps, of all processes; with its own `look_ahead`, or another."""
        indices = order(len(self.costs), self._seed, self._epoch, self._shuffled)[: self._rows]
        seed = self._seed + self._epoch
        return steps(indices, self.costs, self.share.step_rows, look_ahead or self.look_ahead, seed)

    def waiting(self, look_ahead: int | None = None) -> tuple[float, float]:
        """Return the share of this epoch's time that processes wait for the slowest, with rows dealt in turn and as
        they are dealt here, or would be with another `look_ahead`."""
        cut = self.steps(look_ahead)
        in_turn, dealt = (imbalance(self.costs, cut, self.share.processes, dealt=by_cost) for by_cost in (False, True))
        return in_turn, dealt

    def __iter__(self) -> Iterator[list[int | Unsupervised]]:
        share = self.share
        for step in self.steps():
            micro_batches = self._micro_batches(len(step))
            costs = [self.costs[row] for row in step]
            own: list[int | Unsupervised] = [
                step[i] for i in deal(costs, share.processes, micro_batches * share.rows)[share.process]
            ]
            spare = Unsupervised(min(step, key=lambda row: (self.costs[row], row)))
            own += [spare] * (micro_batches - -(-len(own) // share.rows)) * share.rows
            for i in range(0, len(own), share.rows):
                yield own[i : i + share.rows]

    def __len__(self) -> int:
        whole, rest = divmod(self._rows, self.share.step_rows)
        return whole * self.share.micro_batches + self._micro_batches(rest)

    def _micro_batches(self, rows: int) -> int:
        """Return how many micro-batches each process has of a step of so many rows."""
        return -(-rows // (self.share.rows * self.share.processes))


class ByLength(Sampler):
    """Another sampler's order, in which the documents of each step are sorted by length: less of a batch is padding.

    Who cuts it into micro-batches and gives them to the processes in turn, as accelerate does, has in each step the
    documents that the other order would have. A process has the longest first: where memory runs out it does so at the
    beginning of a step, and shorter batches fit into what longer ones have left.

    Args:
        sampler: of the order.
        read_lengths: returns the tokens of each document; called when lengths are first needed.
        share: of any process.
        drop_last: leave out what doesn't fill a micro-batch of every process. Otherwise several processes begin again
            at the epoch's first documents until all are filled.
    """

    def __init__(
        self, sampler: Any, read_lengths: Callable[[], Sequence[int]], share: Share, drop_last: bool = False
    ) -> None:
        self.sampler, self.share, self._read_lengths, self._drop_last = sampler, share, read_lengths, drop_last

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Return the tokens of each document."""
        return self._read_lengths()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return self._sorted(self._first(len(self)))

    def _first(self, rows: int) -> list[int]:
        return list(islice(cycle(self.sampler), rows))

    def _sorted(self, order: list[int]) -> Iterator[int]:
        share = self.share
        for begin in range(0, len(order), share.step_rows):
            step = sorted(order[begin : begin + share.step_rows], key=lambda row: -self.lengths[row])
            batches = [step[i : i + share.rows] for i in range(0, len(step), share.rows)]
            padded = [float(len(batch) * self.lengths[batch[0]]) for batch in batches]
            hands = deal(padded, share.processes, -(-len(batches) // share.processes))
            for index in chain(*zip(*hands, strict=True)):
                yield from batches[index]

    def text_shares(self, steps: int = 100) -> tuple[float, float]:
        """Return how much of padded batches is text, in an epoch's first steps: in the other order, and in this one."""
        order, rows = self._first(min(len(self), steps * self.share.step_rows)), self.share.rows

        def text(order: list[int]) -> float:
            lengths = [self.lengths[row] for row in order]
            batches = [lengths[i : i + rows] for i in range(0, len(order), rows)]
            return sum(lengths) / max(sum(len(batch) * max(batch) for batch in batches), 1)

        return text(order), text(list(self._sorted(order)))

    def __len__(self) -> int:
        rows, each = len(self.sampler), self.share.rows * self.share.processes
        if self._drop_last:
            return rows - rows % each
        return rows if self.share.processes == 1 else rows + -rows % each
