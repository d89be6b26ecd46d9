"""Copies of many matrices in another dtype, by one launch: the adapters of all layers, once a model forward.

    target_i[r, c] = source_i[r, c]        for every pair i

Sources are contiguous; a target may be columns of a wider tensor. The addresses are looked up in a table on the device,
which is made once. torch's `_foreach_copy_` takes the host 5 µs a pair between dtypes: 2 ms for 28 layers.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from pronghorn.device import has_triton


class CastCopies:
    """Pairs of matrices, ready to be copied.

    Args:
        targets, sources: [R_i, C_i] each, pair by pair of the same shape; they must stay where they are.
        by_table: use the one launch where it serves. Not in a CUDA graph, whose replays would read the table when this
            object, which holds it, is gone.
    """

    def __init__(self, targets: list[Tensor], sources: list[Tensor], by_table: bool = True) -> None:
        self.targets, self.sources = targets, sources
        pairs = list(zip(targets, sources, strict=True))
        kinds = {(t.dtype, s.dtype, t.device) for t, s in pairs}
        alike = len(kinds) == 1 and all(s.is_contiguous() and t.stride(1) == 1 for t, s in pairs)
        self._table: Tensor | None = None
        if by_table and alike and targets[0].is_cuda and has_triton():
            self._table = table(targets, sources).pin_memory().to(targets[0].device, non_blocking=True)
            self._largest = max(map(Tensor.numel, sources))

    def run(self) -> None:
        """Copy every source to its target, on the current stream."""
        if self._table is not None:
            from pronghorn.kernels.cast_copies_triton import copy

            copy(self._table, len(self.targets), self._largest, self.sources[0].dtype, self.targets[0].dtype)
        elif self.targets:
            torch._foreach_copy_(self.targets, self.sources)


def table(targets: list[Tensor], sources: list[Tensor]) -> Tensor:
    """Make the table of addresses and sizes: int64 [5, N] on the host, as `cast_copies_triton._copy` reads it."""
    rows = [
        [s.data_ptr() for s in sources],
        [t.data_ptr() for t in targets],
        [s.numel() for s in sources],
        [s.shape[1] for s in sources],
        [t.stride(0) for t in targets],
    ]
    return torch.frombuffer(array("q", [value for row in rows for value in row]), dtype=torch.int64)
