"""L2 norms of many tensors at once, each its own.

    n_i = (Σ_j x_ij²)^(1/2)

Sums are in float32 (float64 for float64), of 16 bits too: in float32 a norm is zero where no entry exceeds 1e-23, and
not finite where one exceeds 1e19. torch's own `_foreach_norm` makes a tensor for each: hundreds of small ones take the
host longer to allocate, and to stack, than the device to read. In Triton it is one launch over a table of addresses.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, tl, triton


def norms_reference(tensors: list[Tensor]) -> Tensor:
    """Do what `norms` does, in plain torch: for any layout; of several devices, the first tensor's has the norms."""
    kinds = {tensor.dtype for tensor in tensors}
    if any(kind.itemsize == 2 for kind in kinds):  # fp16's own range is too small
        each = torch._foreach_norm(tensors, 2, torch.float64 if torch.float64 in kinds else torch.float32)
    else:
        each = torch._foreach_norm(tensors)
    return torch.stack([norm.to(tensors[0].device) for norm in each])


def alike(tensors: list[Tensor]) -> bool:
    """Tell whether all are contiguous, of one dtype and on one device."""
    kinds = {tensor.dtype for tensor in tensors}, {tensor.get_device() for tensor in tensors}
    return all(len(kind) == 1 for kind in kinds) and all(map(Tensor.is_contiguous, tensors))


BLOCK = 4096
PART = 16 * BLOCK
"""Entries that a program reads at least, where a tensor has them."""
MOST_PARTS = 256
"""Programs a tensor, as many as the largest is worth: the others' find nothing to do."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _sums(
    table_ptr,  # int64 [2, N]: addresses and sizes
    sums_ptr,  # float32 [N, parts]
    N, parts, TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the squares of a part of a tensor."""
    tensor, part = tl.program_id(0), tl.program_id(1)
    x_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(TYPE))
    size = tl.load(table_ptr + N + tensor)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(part.to(tl.int64) * BLOCK, size, parts * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums_ptr + tensor * parts + part, tl.sum(total))


def norms_triton(tensors: list[Tensor]) -> Tensor:
    """Do what `norms` does, by the kernel; tensors are `alike`.

    The host never waits: the table goes to the device from pinned memory.
    """
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


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each of N tensors: [N] in float32 (float64).

    Args:
        tensors: at least one; on one device, of one dtype and contiguous if they are to be served by one kernel.
    """
    first = tensors[0]
    if first.is_cuda and first.dtype is not torch.float64 and alike(tensors):
        return norms_triton(tensors)
    return norms_reference(tensors)
