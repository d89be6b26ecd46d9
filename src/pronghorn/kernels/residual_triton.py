"""The residual sum with LoRA's part in Triton: one pass, a small product on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.low_rank_triton import load, places, product, product_cols, product_rows

TILE = 64, 64, 4
"""Rows, columns and warps, as the low-rank kernel of `glu`."""


@triton.jit
def _add(
    y_ptr, x_ptr, xa_ptr, b_ptr, out_ptr, T, N, rank, scale,
    R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    col, row = tl.program_id(0) * COLS, tl.program_id(1) * ROWS
    rows, cols = places(row, col, ROWS, COLS)
    inside, at = (rows < T) & (cols < N), rows * N + cols
    y = tl.load(y_ptr + at, mask=inside).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside).to(tl.float32)
    xa = load(xa_ptr, product_rows(row, ROWS, WARPS), T, rank, 0, rank, R)
    b = load(b_ptr, product_cols(col, COLS), N, rank, 0, rank, R)
    low = product(xa, b, ROWS, COLS, WARPS)
    tl.store(out_ptr + at, (x + (y + scale * low)).to(out_ptr.dtype.element_ty), mask=inside)


def add_(y: Tensor, x: Tensor, xa: Tensor, b: Tensor, scale: float) -> Tensor:
    """As `residual.add_`."""
    (tokens, width), rank = y.shape, xa.shape[1]
    out = y if y.dtype is x.dtype else torch.empty_like(x)
    rows, cols, warps = TILE
    _add[(triton.cdiv(width, cols), triton.cdiv(tokens, rows))](
        y, x, xa, b, out, tokens, width, rank, scale,
        R=max(16, triton.next_power_of_2(rank)), ROWS=rows, COLS=cols, WARPS=warps, num_warps=warps,
    )  # fmt: skip
    return out
