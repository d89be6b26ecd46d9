"""The residual sum with LoRA's part in Triton: one pass, a small product on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, next_power_of_2
from pronghorn.kernels.residual import LowRank

TILE = 64, 64, 4
"""Rows, columns and warps: on a H200 96 % of a copy at rank 16, 93 at 64 (8,192 tokens, 4,096 columns)."""


@triton.jit(do_not_specialize=["T"])  # it differs from row to row, the instructions don't
def _add(
    y_ptr, x_ptr, xa_ptr, b_ptr, out_ptr, T, N, scale,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < T)[:, None] & (cols < N)[None, :]
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    y = tl.load(y_ptr + at, mask=inside)
    x = tl.load(x_ptr + at, mask=inside)
    if RANK == 0:
        out = x.to(tl.float32) + y.to(tl.float32)
    else:
        k = tl.arange(0, R)
        ranks = k < RANK
        xa = tl.load(xa_ptr + rows[:, None] * RANK + k[None, :], mask=(rows < T)[:, None] & ranks[None, :], other=0.0)
        b = tl.load(b_ptr + cols[None, :] * RANK + k[:, None], mask=ranks[:, None] & (cols < N)[None, :], other=0.0)
        # x and y go to where the product will be before it is made: after it that takes two barriers more
        out = x.to(tl.float32) + (y.to(tl.float32) + scale * tl.dot(xa, b, input_precision="ieee"))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def add_(y: Tensor, x: Tensor, low_rank: LowRank | None) -> Tensor:
    """As `residual.add_`."""
    tokens, width = y.shape
    xa, b, scale = low_rank or (y, y, 0.0)  # which nobody reads
    rank = 0 if low_rank is None else xa.shape[1]
    out = y if y.dtype is x.dtype else torch.empty_like(x)
    rows, cols, warps = TILE
    launch(
        _add, (cdiv(width, cols), cdiv(tokens, rows)),
        y, x, xa, b, out, tokens, width, scale,
        RANK=rank, R=max(16, next_power_of_2(rank)), ROWS=rows, COLS=cols, num_warps=warps,
    )  # fmt: skip
    return out
