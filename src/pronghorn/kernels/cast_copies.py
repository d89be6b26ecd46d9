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
from pronghorn.kernels.launch import cdiv, launch, tl, triton


def table(targets: list[Tensor], sources: list[Tensor]) -> Tensor:
    """Make the table of addresses and sizes: int64 [5, N] on the host, as `_copy` reads it."""
    rows = [
        [s.data_ptr() for s in sources],
        [t.data_ptr() for t in targets],
        [s.numel() for s in sources],
        [s.shape[1] for s in sources],
        [t.stride(0) for t in targets],
    ]
    return torch.frombuffer(array("q", [value for row in rows for value in row]), dtype=torch.int64)


BLOCK = 1024
MOST_PARTS = 32
"""Programs a pair, as many as the largest is worth: the others' find nothing to do."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


@triton.jit
def _copy(
    table_ptr,  # int64 [5, N]: addresses of sources and targets, entries, columns, rows' distance in the target
    N,  # pairs
    parts,  # programs a pair
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a part of a pair."""
    pair, part = tl.program_id(0), tl.program_id(1)
    source = tl.load(table_ptr + pair).to(tl.pointer_type(SOURCE))
    target = tl.load(table_ptr + N + pair).to(tl.pointer_type(TARGET))
    size = tl.load(table_ptr + 2 * N + pair)
    columns = tl.load(table_ptr + 3 * N + pair)
    stride = tl.load(table_ptr + 4 * N + pair)
    for start in range(part.to(tl.int64) * BLOCK, size, parts * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < size
        x = tl.load(source + at, mask=inside, other=0.0)
        tl.store(target + (at // columns) * stride + at % columns, x.to(TARGET), mask=inside)


def copy(table: Tensor, count: int, largest: int, source: torch.dtype, target: torch.dtype) -> None:
    """Copy the pairs of a table (see `_copy`); `largest`: entries of the largest pair."""
    parts = min(max(cdiv(largest, 4 * BLOCK), 1), MOST_PARTS)
    with torch.cuda.device_of(table):
        launch(_copy, (count, parts), table, count, parts, SOURCE=TYPES[source], TARGET=TYPES[target], BLOCK=BLOCK)


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
            copy(self._table, len(self.targets), self._largest, self.sources[0].dtype, self.targets[0].dtype)
        elif self.targets:
            torch._foreach_copy_(self.targets, self.sources)
