"""What a block adds to the residual stream, with the LoRA part of its last product (Hu et al. 2021, arXiv:2106.09685).

    out = x + y + s · xa bᵀ

Rounded once, where a product, an addmm and an add would round three times.
"""

from __future__ import annotations

from torch import Tensor

LowRank = tuple[Tensor, Tensor, float]
"""(xa [T, R], b [N, R], s) of s · xa bᵀ."""
MAX_RANK = 128
"""The rank up to which the Triton kernel makes the low-rank product on the way."""


def add_(y: Tensor, x: Tensor, low_rank: LowRank | None) -> Tensor:
    """x + y + s · xa bᵀ in x's dtype; in y's place where that is y's, too.

    Args:
        y: [T, N], contiguous, not needed afterwards; x: [T, N], contiguous, of the same or a wider dtype.
    """
    if low_rank is not None and not (y.is_cuda and low_rank[0].shape[1] <= MAX_RANK):
        xa, b, scale = low_rank
        y.addmm_(xa, b.t(), alpha=scale)
        low_rank = None
    if low_rank is None and y.dtype is x.dtype:
        return y.add_(x)
    if y.is_cuda:  # torch adds two dtypes at two thirds of the bandwidth
        from pronghorn.kernels.residual_triton import add_ as launch

        return launch(y, x, low_rank)
    return x + y
