"""SwiGLU and GeGLU in Triton: one pass each way, near the copy bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.low_rank_triton import load, places, product, product_cols, product_rows
from pronghorn.kernels.tanh_triton import tanh

BLOCK = 1024
TILE = 64, 64, 4
"""Rows, columns and warps of the low-rank kernel. Each row of tiles reads all of b, each column of tiles all of xa."""


@triton.jit
def _activate(g, GELU: tl.constexpr):
    """(f(g), f′(g)) in float32."""
    if GELU:
        c = 0.7978845608028654  # sqrt(2/π)
        t = tanh(c * (g + 0.044715 * g * g * g))
        f = 0.5 * g * (1.0 + t)
        df = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * g * g)
    else:
        s = tl.sigmoid(g)
        f = g * s
        df = s * (1.0 + g * (1.0 - s))
    return f, df


@triton.jit
def _forward(gu_ptr, a_ptr, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    g = tl.load(gu_ptr + row * 2 * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + row * 2 * WIDTH + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    f, _ = _activate(g, GELU)
    tl.store(a_ptr + row * WIDTH + cols, (f * u).to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _forward_with_low_rank(
    gu_ptr, xa_ptr, b_ptr, a_ptr, T, WIDTH, ranks, gate_rank, up_rank, scale,
    GELU: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    col, row = tl.program_id(0) * COLS, tl.program_id(1) * ROWS
    rows, cols = places(row, col, ROWS, COLS)
    inside = (rows < T) & (cols < WIDTH)
    here = gu_ptr + rows * 2 * WIDTH + cols
    # all loads before the first store, which none of them could be moved across
    g = tl.load(here, mask=inside)
    u = tl.load(here + WIDTH, mask=inside)
    tokens, outputs = product_rows(row, ROWS, WARPS), product_cols(col, COLS)
    xa = load(xa_ptr, tokens, T, ranks, 0, gate_rank, R)
    b = load(b_ptr, outputs, WIDTH, ranks, 0, gate_rank, R)
    up_xa = load(xa_ptr, tokens, T, ranks, gate_rank, up_rank, R)
    up_b = load(b_ptr + WIDTH * ranks, outputs, WIDTH, ranks, gate_rank, up_rank, R)
    g = (g.to(tl.float32) + scale * product(xa, b, ROWS, COLS, WARPS)).to(gu_ptr.dtype.element_ty)
    u = (u.to(tl.float32) + scale * product(up_xa, up_b, ROWS, COLS, WARPS)).to(gu_ptr.dtype.element_ty)
    tl.store(here, g, mask=inside)
    tl.store(here + WIDTH, u, mask=inside)
    f, _ = _activate(g.to(tl.float32), GELU)
    tl.store(a_ptr + rows * WIDTH + cols, (f * u.to(tl.float32)).to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(da_ptr, gu_ptr, dgu_ptr, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    here = row * 2 * WIDTH + cols
    g = tl.load(gu_ptr + here, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + here + WIDTH, mask=inside, other=0.0).to(tl.float32)
    da = tl.load(da_ptr + row * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    f, df = _activate(g, GELU)
    tl.store(dgu_ptr + here, (da * u * df).to(dgu_ptr.dtype.element_ty), mask=inside)
    tl.store(dgu_ptr + here + WIDTH, (da * f).to(dgu_ptr.dtype.element_ty), mask=inside)
    tl.store(da_ptr + row * WIDTH + cols, (f * u).to(da_ptr.dtype.element_ty), mask=inside)


def forward(gate_up: Tensor, activation: str) -> Tensor:
    """As `glu.forward`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    a = gate_up.new_empty(tokens, width)
    _forward[(tokens, triton.cdiv(width, BLOCK))](gate_up, a, width, GELU=activation == "gelu_tanh", BLOCK=BLOCK)
    return a


def forward_with_low_rank_(
    gate_up: Tensor, xa: Tensor, b: Tensor, scale: float, activation: str, ranks: tuple[int, int]
) -> Tensor:
    """As `glu.forward_with_low_rank_`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    a = gate_up.new_empty(tokens, width)
    rows, cols, warps = TILE
    _forward_with_low_rank[(triton.cdiv(width, cols), triton.cdiv(tokens, rows))](
        gate_up, xa, b, a, tokens, width, xa.shape[1], *ranks, scale, GELU=activation == "gelu_tanh",
        R=max(16, triton.next_power_of_2(max(ranks))), ROWS=rows, COLS=cols, WARPS=warps, num_warps=warps,
    )  # fmt: skip
    return a


def backward_(da: Tensor, gate_up: Tensor, activation: str, donated: bool = False) -> Tensor:
    """As `glu.backward_`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    dgu = gate_up if donated else torch.empty_like(gate_up)
    grid = (tokens, triton.cdiv(width, BLOCK))
    _backward[grid](da, gate_up, dgu, width, GELU=activation == "gelu_tanh", BLOCK=BLOCK)
    return dgu
