"""Gather and combine in Triton, near the copy bandwidth: each row is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, next_power_of_2

BLOCK = 1024
WHOLE = 4096
"""The widest token that one program gathers."""


@triton.jit
def _gather(x_ptr, places_ptr, y_ptr, WIDTH, K: tl.constexpr, BLOCK: tl.constexpr):
    """A token, or a part of it, to its K rows: a program for each row would read tokens K times, and what is written
    meanwhile drives them out of the cache."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    x = tl.load(x_ptr + token * WIDTH + cols, mask=inside)
    for k in tl.static_range(K):
        row = tl.load(places_ptr + token * K + k).to(tl.int64)
        tl.store(y_ptr + row * WIDTH + cols, x, mask=inside)


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


def gather(x: Tensor, places: Tensor) -> Tensor:
    """As `moe_rows.gather`; places: [T, K]."""
    (tokens, k), width = places.shape, x.shape[1]
    y = x.new_empty(tokens * k, width)
    block = min(next_power_of_2(width), WHOLE)
    warps = max(block // 256, 1)  # 8 elements a thread
    launch(_gather, (tokens, cdiv(width, block)), x, places, y, width, K=k, BLOCK=block, num_warps=warps)
    return y


def combine(x: Tensor, rows: Tensor, weights: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    """As `moe_rows.combine`."""
    (tokens, k), width = rows.shape, x.shape[1]
    y = x.new_empty(tokens, width)
    weights = None if weights is None else weights.contiguous()
    bias = None if bias is None else bias.contiguous()
    launch(
        _combine, (tokens, cdiv(width, BLOCK)),
        x, rows, rows if weights is None else weights, x if bias is None else bias,
        rows if experts is None else experts.contiguous(), y, width,
        K=k, WEIGHT=weights is not None, BIAS=bias is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return y
