"""Let the GPUs of one host copy trained layers' weights and gradients out of each other's memory.

    begin of a forward    meet · each rounds its parts of products to 16 bits, where all read them · meet
    a layer's gradients   meet · each writes them where all read them · meet · each adds up what falls into its part

Between two meetings nobody writes what others read. A meeting is a sum of one number by NCCL, on the stream of the
copies: compute doesn't wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pronghorn.parallel import peers
from pronghorn.parallel.unit import MASTER_BYTES, NARROW, Unit


class Meeting:
    """Where the processes of a group wait for each other, on the current stream."""

    def __init__(self, device: torch.device, group: Any) -> None:
        self._group, self._token = group, torch.zeros(1, device=device)

    def __call__(self) -> None:
        """Let what comes next on the stream begin when all processes are here."""
        dist.all_reduce(self._token, group=self._group)


class ShownWeights:
    """Products' parts in 16 bits, which others read; as they were when `show` was called.

    Args:
        units: of trained products.
        whole: bytes that others read; kept, as their memory is.
    """

    def __init__(self, units: Sequence[Unit], whole: peers.Mapped, group: Any) -> None:
        self._units, self._meet, self._whole = units, Meeting(whole.own.device, group), whole
        begin = 0
        for unit in units:
            end = begin + len(unit.part) // MASTER_BYTES * NARROW.itemsize
            unit.narrow_peers = [peer[begin:end].view(NARROW) for peer in whole.peers]
            begin = end

    @staticmethod
    def size(units: Sequence[Unit]) -> int:
        """Return the bytes that `whole` must have."""
        return sum(len(unit.part) // MASTER_BYTES * NARROW.itemsize for unit in units)

    def show(self) -> None:
        """Let others read the weights as they are now. All processes call it."""
        self._meet()
        for unit in self._units:
            unit.show()
        self._meet()


class ShownGradients:
    """One layer's gradients, of products or of what else it trains, which others read.

    Args:
        whole: bytes that others read, with room for the largest layer; kept, as their memory is.
    """

    def __init__(self, whole: peers.Mapped, part: int, rank: int, group: Any) -> None:
        self._whole, self._peers = whole, [peer.view(torch.float32) for peer in whole.peers]
        self.own, self._rank = self._peers[rank], rank
        """What this process writes between `meet` and `sum`."""
        self._stage = torch.empty(part, device=whole.own.device)
        self.meet = Meeting(whole.own.device, group)

    @property
    def bytes(self) -> int:
        """Return the bytes beside what others read."""
        return self._stage.nbytes

    def sum(self, out: Tensor) -> None:
        """Write the sum of all processes' numbers of this one's part into `out` [part]."""
        self.meet()
        first, stage = self._rank * len(out), self._stage[: len(out)]
        for rank, peer in enumerate(self._peers):  # in the order of ranks, whoever adds up
            mine = peer[first : first + len(out)]
            if not rank:
                out.copy_(mine)
            elif rank == self._rank:
                out.add_(mine)
            else:
                out.add_(stage.copy_(mine))
