"""Copies of many matrices in Triton: one launch over a table of their addresses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch

BLOCK = 1024
MOST_PARTS = 32
"""Programs a pair, as many as the largest is worth: the others' find nothing to do."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


@triton.jit
def _copy(
    table_ptr,  # int64 [5, N]: addresses of sources and targets, entries, columns, rows' distance in the target
    N,
    parts,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
