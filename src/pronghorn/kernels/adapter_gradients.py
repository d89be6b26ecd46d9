"""The two products of LoRA adapters' gradients (Hu et al. 2021, arXiv:2106.09685) that read dy, which is wide.

    dya  = s · dy B              and from it dA = dyaᵀ x
    dB_i = s · dy_iᵀ xa_i        dy_i: adapter i's columns of dy, xa_i: its columns of xa = x Aᵀ

B holds the adapters' own along its diagonal. By torch each product reads dy; the Triton kernel reads it once for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.device import HOPPER
from pronghorn.ranges import ADAPTERS, in_part

MAX_RANK = 32
"""The rank up to which one reading pays: what it writes in parts grows with the rank."""
MAX_ADAPTERS = 3
"""The most that a group has: of q, k and v."""


def suits(dy: Tensor, xa: Tensor, columns: list[slice], ranks: list[int]) -> bool:
    """Whether the Triton kernel serves: in 16 bits, adapters of one small rank, on Hopper (not measured elsewhere)."""
    if not dy.is_cuda or torch.cuda.get_device_capability(dy.device) != HOPPER:
        return False
    laid_out = dy.dtype in (torch.bfloat16, torch.float16) and dy.stride(1) == 1 and xa.is_contiguous()
    laid_out = laid_out and dy.stride(0) % 8 == 0  # rows begin where 16 bytes do: else it is slower than torch
    return laid_out and len(columns) <= MAX_ADAPTERS and len(set(ranks)) == 1 and ranks[0] <= MAX_RANK


@in_part(ADAPTERS)
def products(
    dy: Tensor,
    b: Tensor,
    xa: Tensor,
    columns: list[slice],
    ranks: list[int],
    scale: float,
    dtype: torch.dtype,
    both: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """(dya [T, R] in dy's dtype, each dB [N_i, r_i] in `dtype`), summed in float32.

    Args:
        dy: [T, N]; b: [N, R], contiguous, and xa: [T, R], in dy's dtype.
        columns: each adapter's of dy; ranks: the adapters', R together.
        scale: s.
        both: [T, N + R], contiguous; dy and dya are written there side by side, where adapters have all columns.
    """
    if suits(dy, xa, columns, ranks):
        from pronghorn.kernels.adapter_gradients_triton import products as launch

        return launch(dy, b, xa, columns, ranks, scale, dtype, both)
    dya = torch.addmm(dy.new_empty(1, 1), dy, b, beta=0, alpha=scale)
    if both is not None:
        torch.cat([dy, dya], 1, out=both)
    parts = zip(columns, xa.split(ranks, 1), strict=True)
    found = [matmul(dy[:, mine].t(), part, dtype) for mine, part in parts]
    return dya, found if scale == 1 else [db.mul_(scale) for db in found]


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, summed in float32 and rounded to `dtype` only."""
    if a.is_cuda and dtype is torch.float32 and a.dtype is not dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
