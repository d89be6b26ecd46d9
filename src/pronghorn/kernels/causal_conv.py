"""A causal convolution of each channel with SiLU, which stops at documents' starts.

p_t = Σ_j w_j x_{t−K+1+j}        y_t = silu(p_t)        over the tokens of t's document
dp_t = dy_t · silu'(p_t)         dx_t = Σ_j w_j dp_{t+K−1−j}         dw_j = Σ_t dp_t x_{t−K+1+j}

In Triton: a program computes a tile of tokens and channels. The backward writes dp over dy first. (Computing dp again
for each of the K tokens that a token reaches took 0.74 ms where the forward takes 0.11: 8,192 tokens and channels, one
H200.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from pronghorn.kernels.launch import by_device, cdiv, launch, tl, triton

ROWS, COLUMNS, WARPS = 32, 128, 4
"""Tokens and channels of a tile."""


def forward_reference(x: Tensor, weight: Tensor, document_ids: Tensor) -> Tensor:
    """Return y [T, C].

    Args:
        x: [T, C], columns of a wider tensor perhaps.
        weight: [C, K], contiguous.
        document_ids: int32 [T].
    """
    return silu(convolve_reference(x, weight, document_ids)).to(x.dtype)


def convolve_reference(x: Tensor, weight: Tensor, document_ids: Tensor) -> Tensor:
    """Return p [T, C] in float32 (float64), with autograd; arguments are `forward`'s."""
    wide, size = torch.promote_types(x.dtype, torch.float32), weight.shape[1]
    w, y = weight.to(wide), x.to(wide) * weight[:, -1].to(wide)
    for back in range(1, min(size, len(x))):
        same = (document_ids[back:] == document_ids[:-back])[:, None]
        before = torch.where(same, x[:-back].to(wide), 0.0)  # of another document it may be anything
        y = y + torch.nn.functional.pad(before * w[:, size - 1 - back], (0, 0, back, 0))
    return y


def backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor, document_ids: Tensor, weight_grad: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return (dx [T, C], dweight [C, K] or None).

    Args:
        dy, x: [T, C], columns of wider tensors perhaps; dy is overwritten.
        out: [T, C], where dx is written.
    """
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = forward_reference(*leaves, document_ids)
    dx, dw = torch.autograd.grad(y, leaves, dy)
    return dx if out is None else out.copy_(dx), dw if weight_grad else None


@triton.jit
def _convolved(
    x_ptr,  # [T, C], rows x_row apart
    w_ptr,  # [C, K]
    ids_ptr,  # int32 [T]
    rows, ids,  # [ROWS], tokens and their documents; −1 for one past the last
    cols,  # [COLUMNS]
    x_row, T, C, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return p [ROWS, COLUMNS]; 0 where a document is −1."""
    p = tl.zeros((ROWS, COLUMNS), tl.float32)
    for back in tl.static_range(K):
        before = rows - back
        same = (before >= 0) & (ids >= 0)
        same = same & (tl.load(ids_ptr + before, mask=same, other=-2) == ids)  # −2: no token's
        w = tl.load(w_ptr + cols * K + (K - 1 - back), mask=cols < C, other=0.0).to(tl.float32)
        inside = same[:, None] & (cols < C)[None, :]
        x = tl.load(x_ptr + before.to(tl.int64)[:, None] * x_row + cols[None, :], mask=inside, other=0.0)
        p += x.to(tl.float32) * w[None, :]
    return p


@triton.jit
def _forward(
    x_ptr,  # [T, C], rows x_row apart
    w_ptr,  # [C, K]
    ids_ptr,  # int32 [T]
    y_ptr,  # [T, C]
    x_row, T, C, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write y of a tile."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ids = tl.load(ids_ptr + rows, mask=rows < T, other=-1)
    p = _convolved(x_ptr, w_ptr, ids_ptr, rows, ids, cols, x_row, T, C, K, ROWS, COLUMNS)
    inside = (rows < T)[:, None] & (cols < C)[None, :]
    y = p * tl.sigmoid(p)
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _through_silu(
    dy_ptr,  # [T, C], rows dy_row apart: dy, and then dp
    x_ptr,  # [T, C], rows x_row apart
    w_ptr,  # [C, K]
    ids_ptr,  # int32 [T]
    dw_ptr,  # float32 [tiles of tokens, K, C]; written with WEIGHT only
    dy_row, x_row, T, C,
    K: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dp of a tile over its dy, and its part of dw."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ids = tl.load(ids_ptr + rows, mask=rows < T, other=-1)
    p = _convolved(x_ptr, w_ptr, ids_ptr, rows, ids, cols, x_row, T, C, K, ROWS, COLUMNS)
    inside = (rows < T)[:, None] & (cols < C)[None, :]
    # dp = dy · silu'(p)
    at = dy_ptr + rows.to(tl.int64)[:, None] * dy_row + cols[None, :]
    s = tl.sigmoid(p)
    dp = tl.load(at, mask=inside, other=0.0).to(tl.float32) * s * (1 + p * (1 - s))
    tl.store(at, dp.to(dy_ptr.dtype.element_ty), mask=inside)
    # dw_j = Σ_t dp_t x_{t−K+1+j} over the tile's tokens, j = K − 1 − back
    if WEIGHT:
        for back in tl.static_range(K):
            before = rows - back
            same = (before >= 0) & (ids >= 0)
            same = same & (tl.load(ids_ptr + before, mask=same, other=-2) == ids)
            seen = same[:, None] & (cols < C)[None, :]
            x = tl.load(x_ptr + before.to(tl.int64)[:, None] * x_row + cols[None, :], mask=seen, other=0.0)
            out = (tl.program_id(0).to(tl.int64) * K + (K - 1 - back)) * C + cols
            tl.store(dw_ptr + out, tl.sum(dp * x.to(tl.float32), 0), mask=cols < C)


@triton.jit
def _backward(
    dp_ptr,  # [T, C], rows dp_row apart
    w_ptr,  # [C, K]
    ids_ptr,  # int32 [T]
    dx_ptr,  # [T, C], rows dx_row apart
    dp_row, dx_row, T, C, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dx of a tile."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ids = tl.load(ids_ptr + rows, mask=rows < T, other=-1)
    # dx_t = Σ_j w_j dp_{t+K−1−j}, j = K − 1 − ahead
    dx = tl.zeros((ROWS, COLUMNS), tl.float32)
    for ahead in tl.static_range(K):
        # the tokens that x_t reaches: those of its document only
        later = rows + ahead
        same = later < T
        same = same & (tl.load(ids_ptr + later, mask=same, other=-2) == ids)
        w = tl.load(w_ptr + cols * K + (K - 1 - ahead), mask=cols < C, other=0.0).to(tl.float32)
        inside = same[:, None] & (cols < C)[None, :]
        dp = tl.load(dp_ptr + later.to(tl.int64)[:, None] * dp_row + cols[None, :], mask=inside, other=0.0)
        dx += dp.to(tl.float32) * w[None, :]
    inside = (rows < T)[:, None] & (cols < C)[None, :]
    at = rows.to(tl.int64)[:, None] * dx_row + cols[None, :]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def forward_triton(x: Tensor, weight: Tensor, document_ids: Tensor) -> Tensor:
    """Do what `forward` does, by its Triton kernel."""
    tokens, channels = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(
        _forward, (cdiv(tokens, ROWS), cdiv(channels, COLUMNS)),
        x, weight, document_ids, y, x.stride(0), tokens, channels,
        K=weight.shape[1], ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return y


def backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor, document_ids: Tensor, weight_grad: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Do what `backward` does, by its Triton kernel."""
    tokens, channels = x.shape
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    tiles = cdiv(tokens, ROWS)
    parts = torch.empty(tiles, weight.shape[1], channels, dtype=torch.float32, device=x.device) if weight_grad else dx
    grid, tile = (tiles, cdiv(channels, COLUMNS)), {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    launch(
        _through_silu, grid, dy, x, weight, document_ids, parts, dy.stride(0), x.stride(0), tokens, channels,
        K=weight.shape[1], WEIGHT=weight_grad, **tile,
    )  # fmt: skip
    launch(
        _backward, grid, dy, weight, document_ids, dx, dy.stride(0), dx.stride(0), tokens, channels,
        K=weight.shape[1], **tile,
    )  # fmt: skip
    return dx, parts.sum(0).t().to(weight.dtype) if weight_grad else None


forward = by_device(forward_reference, forward_triton, float64=False)
backward = by_device(backward_reference, backward_triton, at=1, float64=False)
