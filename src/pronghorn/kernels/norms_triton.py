"""Norms of many tensors in Triton: one launch over a table of their addresses."""

from __future__ import annotations

from array import array

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch

BLOCK = 4096
PART = 16 * BLOCK
"""Entries that a program reads at least, where a tensor has them."""
MOST_PARTS = 256
"""Programs a tensor, as many as the largest is worth: the others' find nothing to do."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _sums(table_ptr, sums_ptr, N, parts, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    tensor, part = tl.program_id(0), tl.program_id(1)
    x_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(TYPE))
    size = tl.load(table_ptr + N + tensor)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(part.to(tl.int64) * BLOCK, size, parts * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums_ptr + tensor * parts + part, tl.sum(total))


def norms(tensors: list[Tensor]) -> Tensor:
    """As `norms.norms`; tensors are `alike`. The host never waits: the table goes there from pinned memory."""
    first, count = tensors[0], len(tensors)
    sizes = list(map(Tensor.numel, tensors))
    # of a list torch would make it four times as slowly
    table = torch.frombuffer(array("q", [*map(Tensor.data_ptr, tensors), *sizes]), dtype=torch.int64)
    if first.is_cuda:
        table = table.pin_memory().to(first.device, non_blocking=True)
    parts = min(max(cdiv(max(sizes), PART), 1), MOST_PARTS)
    sums = torch.empty(count, parts, device=first.device)
    with torch.cuda.device_of(first):
        launch(_sums, (count, parts), table, sums, count, parts, TYPE=TYPES[first.dtype], BLOCK=BLOCK)
    return sums.sum(1).sqrt()
