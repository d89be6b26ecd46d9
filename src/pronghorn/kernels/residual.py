"""What a block adds to the residual stream, with the LoRA part of its last product (Hu et al. 2021, arXiv:2106.09685).

    out = x + m · (y + s · xa bᵀ)

Rounded once, where a product, an addmm and an add would round three times.

The residual sum with LoRA's part in Triton: one pass, a small product on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, next_power_of_2, tl, triton

LowRank = tuple[Tensor, Tensor, float]
"""(xa [T, R], b [N, R], s) of s · xa bᵀ."""
MAX_RANK = 128
"""The rank up to which the Triton kernel makes the low-rank product on the way."""
TILE = 64, 64, 4
"""Rows, columns and warps: on a H200 96 % of a copy at rank 16, 93 at 64 (8,192 tokens, 4,096 columns)."""


@triton.jit(do_not_specialize=["T"])  # it differs from row to row, the instructions don't
def _add(
    y_ptr, x_ptr, xa_ptr, b_ptr, out_ptr, T, N, scale, multiplier,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add a tile: y, x, out [T, N]; xa [T, RANK]; b [N, RANK]."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < T)[:, None] & (cols < N)[None, :]
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    y = tl.load(y_ptr + at, mask=inside)
    x = tl.load(x_ptr + at, mask=inside)
    if RANK == 0:
        out = x.to(tl.float32) + multiplier * y.to(tl.float32)
    else:
        k = tl.arange(0, R)
        ranks = k < RANK
        xa = tl.load(xa_ptr + rows[:, None] * RANK + k[None, :], mask=(rows < T)[:, None] & ranks[None, :], other=0.0)
        b = tl.load(b_ptr + cols[None, :] * RANK + k[:, None], mask=ranks[:, None] & (cols < N)[None, :], other=0.0)
        # x and y go to where the product will be before it is made: after it that takes two barriers more
        out = x.to(tl.float32) + multiplier * (y.to(tl.float32) + scale * tl.dot(xa, b, input_precision="ieee"))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def add_triton_(y: Tensor, x: Tensor, low_rank: LowRank | None, multiplier: float = 1.0) -> Tensor:
    """Do what `add_` does, by its Triton kernels."""
    tokens, width = y.shape
    xa, b, scale = low_rank or (y, y, 0.0)  # which nobody reads
    rank = 0 if low_rank is None else xa.shape[1]
    out = y if y.dtype is x.dtype else torch.empty_like(x)
    rows, cols, warps = TILE
    launch(
        _add, (cdiv(width, cols), cdiv(tokens, rows)),
        y, x, xa, b, out, tokens, width, scale, multiplier,
        RANK=rank, R=max(16, next_power_of_2(rank)), ROWS=rows, COLS=cols, num_warps=warps,
    )  # fmt: skip
    return out


def add_(y: Tensor, x: Tensor, low_rank: LowRank | None, multiplier: float = 1.0) -> Tensor:
    """Return x + m · (y + s · xa bᵀ) in x's dtype; in y's place where that is y's, too.

    Args:
        y: [T, N], contiguous, not needed afterwards; x: [T, N], contiguous, of the same or a wider dtype.
    """
    if low_rank is not None and not (y.is_cuda and low_rank[0].shape[1] <= MAX_RANK):
        xa, b, scale = low_rank
        y.addmm_(xa, b.t(), alpha=scale)
        low_rank = None
    if low_rank is None and y.dtype is x.dtype:
        return torch.add(x, y, alpha=multiplier, out=y)
    if y.is_cuda:  # torch adds two dtypes at two thirds of the bandwidth
        return add_triton_(y, x, low_rank, multiplier)
    return torch.add(x, y, alpha=multiplier)
