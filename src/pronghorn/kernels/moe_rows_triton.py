"""Gather and combine in Triton: each output row is written once, near the copy bandwidth."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
GATHERED = 4
"""Rows that a program gathers."""


@triton.jit
def _gather(x_ptr, rows_ptr, y_ptr, S, WIDTH, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Some rows a program, so that each thread has several loads under way."""
    to = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows_ptr + to, mask=to < S, other=0).to(tl.int64)
    inside = (to < S)[:, None] & (cols < WIDTH)[None, :]
    rows = tl.load(x_ptr + source[:, None] * WIDTH + cols[None, :], mask=inside)
    tl.store(y_ptr + to[:, None] * WIDTH + cols[None, :], rows, mask=inside)


@triton.jit
def _combine(
    x_ptr, rows_ptr, w_ptr, bias_ptr, experts_ptr, y_ptr, WIDTH,
    K: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows_ptr + token * K + k).to(tl.int64)
        x = tl.load(x_ptr + row * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(experts_ptr + token * K + k).to(tl.int64)
            x += tl.load(bias_ptr + expert * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            x *= tl.load(w_ptr + token * K + k).to(tl.float32)
        total += x
    tl.store(y_ptr + token * WIDTH + cols, total.to(y_ptr.dtype.element_ty), mask=inside)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """As `moe_rows.gather`."""
    count, width = len(rows), x.shape[1]
    y = x.new_empty(count, width)
    grid = triton.cdiv(count, GATHERED), triton.cdiv(width, BLOCK)
    _gather[grid](x, rows, y, count, width, ROWS=GATHERED, BLOCK=BLOCK)
    return y


def combine(x: Tensor, rows: Tensor, weights: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    """As `moe_rows.combine`."""
    (tokens, k), width = rows.shape, x.shape[1]
    y = x.new_empty(tokens, width)
    weights = None if weights is None else weights.contiguous()
    bias = None if bias is None else bias.contiguous()
    _combine[(tokens, triton.cdiv(width, BLOCK))](
        x, rows, rows if weights is None else weights, x if bias is None else bias,
        rows if experts is None else experts.contiguous(), y, width,
        K=k, WEIGHT=weights is not None, BIAS=bias is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return y
