"""Rows of tokens to the experts and back; nothing is added up in memory.

    gather    x'_i = x_{tokens_i}                     a token is read once and written to each of its rows
    combine   y_t = Σ_k w_tk · (x_{rows_tk} + b_{e_tk})

Sums are in float32 (float64 for float64), over k in order: equal bits every time. The Triton kernels are near the copy
bandwidth: each row is read once and written once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton


class Rows(NamedTuple):
    """S = T·K rows made of T tokens', each K times; int32."""

    tokens: Tensor
    """[S], the token of each row."""
    places: Tensor
    """[T, K], the rows of each token: the inverse."""


def gather_reference(x: Tensor, rows: Rows) -> Tensor:
    """Do what `gather` does, in plain torch."""
    return x.index_select(0, rows.tokens)


def combine_reference(
    x: Tensor, rows: Tensor, weights: Tensor | None = None, bias: Tensor | None = None, experts: Tensor | None = None
) -> Tensor:
    """Add up each token's rows.

    Args:
        x: [S, H], contiguous.
        rows: int32 [T, K], which rows of x are a token's.
        weights: [T, K], any float dtype; None for ones.
        bias: [E, H], added to each row by its expert before it is weighted, with experts: integers [T, K].
    Returns:
        [T, H] in x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    picked = x[rows].to(wide)
    if bias is not None and experts is not None:
        picked = picked + bias.to(wide)[experts]
    if weights is not None:
        picked = picked * weights.to(wide).unsqueeze(-1)
    return picked.sum(1).to(x.dtype)


BLOCK = 1024
WHOLE = 4096
"""The widest token that one program gathers."""


@triton.jit
def _gather(
    x_ptr,  # [T, WIDTH]
    places_ptr,  # int32 [T, K]
    y_ptr,  # [S, WIDTH]
    WIDTH, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a token, or a part of it, to its K rows.

    A program for each row would read tokens K times, and what is written meanwhile drives them out of the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    x = tl.load(x_ptr + token * WIDTH + cols, mask=inside)
    for k in tl.static_range(K):
        row = tl.load(places_ptr + token * K + k).to(tl.int64)
        tl.store(y_ptr + row * WIDTH + cols, x, mask=inside)


@triton.jit
def _combine(
    x_ptr,  # [S, WIDTH]
    rows_ptr,  # int32 [T, K]
    w_ptr,  # [T, K]; read with WEIGHT only
    bias_ptr,  # [E, WIDTH]; read with BIAS only
    experts_ptr,  # integers [T, K]; read with BIAS only
    y_ptr,  # [T, WIDTH]
    WIDTH,
    K: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up a token's rows, or a part of them."""
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


def gather_triton(x: Tensor, places: Tensor) -> Tensor:
    """Do what `gather` does, by its Triton kernel; places: [T, K]."""
    (tokens, k), width = places.shape, x.shape[1]
    y = x.new_empty(tokens * k, width)
    block = min(next_power_of_2(width), WHOLE)
    warps = max(block // 256, 1)  # 8 elements a thread
    launch(_gather, (tokens, cdiv(width, block)), x, places, y, width, K=k, BLOCK=block, num_warps=warps)
    return y


def combine_triton(
    x: Tensor, rows: Tensor, weights: Tensor | None = None, bias: Tensor | None = None, experts: Tensor | None = None
) -> Tensor:
    """Do what `combine` does, by its Triton kernel."""
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


def gather(x: Tensor, rows: Rows) -> Tensor:
    """Return each row's token, [S, H]; x: [T, H], contiguous."""
    if x.is_cuda:
        return gather_triton(x, rows.places)
    return gather_reference(x, rows)


combine = by_device(combine_reference, combine_triton)
