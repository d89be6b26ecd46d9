"""L2 norms of many tensors at once, each its own.

    n_i = (Σ_j x_ij²)^(1/2)

Sums are in float32 (float64 for float64), of 16 bits too: in float32 a norm is zero where no entry exceeds 1e-23, and
not finite where one exceeds 1e19. torch's own `_foreach_norm` makes a tensor for each: hundreds of small ones take the
host longer to allocate, and to stack, than the device to read.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norms(tensors: list[Tensor]) -> Tensor:
    """[N] in float32 (float64): the norm of each of N tensors.

    Args:
        tensors: at least one; on one device, of one dtype and contiguous if they are to be served by one kernel.
    """
    first = tensors[0]
    if first.is_cuda and first.dtype is not torch.float64 and alike(tensors):
        from pronghorn.kernels.norms_triton import norms as launch

        return launch(tensors)
    return norms_reference(tensors)


def norms_reference(tensors: list[Tensor]) -> Tensor:
    """As `norms`, by torch: of any layout; tensors on several devices have their norms on the first one's."""
    kinds = {tensor.dtype for tensor in tensors}
    if any(kind.itemsize == 2 for kind in kinds):  # fp16's own range is too small
        each = torch._foreach_norm(tensors, 2, torch.float64 if torch.float64 in kinds else torch.float32)
    else:
        each = torch._foreach_norm(tensors)
    return torch.stack([norm.to(tensors[0].device) for norm in each])


def alike(tensors: list[Tensor]) -> bool:
    """Whether all are contiguous, of one dtype and on one device."""
    kinds = {tensor.dtype for tensor in tensors}, {tensor.get_device() for tensor in tensors}
    return all(len(kind) == 1 for kind in kinds) and all(map(Tensor.is_contiguous, tensors))
