"""SwiGLU and GeGLU in Triton: one pass each way, near the copy bandwidth."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.glu import LowRank
from pronghorn.kernels.tanh_triton import tanh


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
def _gate_and_up(
    gu_ptr, xa_ptr, b_ptr, rows, cols, T, WIDTH, rank, scale, LOW: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """g and u [rows, cols] in float32, their low-rank part added; their addresses, and which are inside."""
    here = rows[:, None].to(tl.int64) * 2 * WIDTH + cols[None, :]
    inside = (rows < T)[:, None] & (cols < WIDTH)[None, :]
    g = tl.load(gu_ptr + here, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + here + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if LOW:
        k = tl.arange(0, R)
        xa = tl.load(
            xa_ptr + rows[:, None] * rank + k[None, :], mask=(rows < T)[:, None] & (k < rank)[None, :], other=0.0
        )
        b_inside = (k < rank)[:, None] & (cols < WIDTH)[None, :]
        b = b_ptr + cols[None, :].to(tl.int64) * rank + k[:, None]
        g += scale * tl.dot(xa, tl.load(b, mask=b_inside, other=0.0), input_precision="ieee")
        u += scale * tl.dot(xa, tl.load(b + WIDTH * rank, mask=b_inside, other=0.0), input_precision="ieee")
    return g, u, here, inside


@triton.jit
def _forward(
    gu_ptr, xa_ptr, b_ptr, a_ptr, T, WIDTH, rank, scale,
    GELU: tl.constexpr, LOW: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    g, u, _, inside = _gate_and_up(gu_ptr, xa_ptr, b_ptr, rows, cols, T, WIDTH, rank, scale, LOW, R)
    f, _ = _activate(g, GELU)
    there = rows[:, None].to(tl.int64) * WIDTH + cols[None, :]
    tl.store(a_ptr + there, (f * u).to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    da_ptr, gu_ptr, xa_ptr, b_ptr, dgu_ptr, a_ptr, T, WIDTH, rank, scale,
    GELU: tl.constexpr, LOW: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    g, u, here, inside = _gate_and_up(gu_ptr, xa_ptr, b_ptr, rows, cols, T, WIDTH, rank, scale, LOW, R)
    there = rows[:, None].to(tl.int64) * WIDTH + cols[None, :]
    da = tl.load(da_ptr + there, mask=inside, other=0.0).to(tl.float32)
    f, df = _activate(g, GELU)
    tl.store(dgu_ptr + here, (da * u * df).to(dgu_ptr.dtype.element_ty), mask=inside)
    tl.store(dgu_ptr + here + WIDTH, (da * f).to(dgu_ptr.dtype.element_ty), mask=inside)
    tl.store(a_ptr + there, (f * u).to(a_ptr.dtype.element_ty), mask=inside)


def forward(gate_up: Tensor, activation: str, low_rank: LowRank | None) -> Tensor:
    """As `glu.forward`; ranks up to MAX_RANK."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    a = gate_up.new_empty(tokens, width)
    grid, options = _launch(tokens, width, activation, low_rank)
    xa, b, rank, scale = _arguments(gate_up, low_rank)
    _forward[grid](gate_up, xa, b, a, tokens, width, rank, scale, **options)
    return a


def backward(da: Tensor, gate_up: Tensor, activation: str, low_rank: LowRank | None) -> tuple[Tensor, Tensor]:
    """As `glu.backward`; ranks up to MAX_RANK."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    dgu, a = torch.empty_like(gate_up), gate_up.new_empty(tokens, width)
    grid, options = _launch(tokens, width, activation, low_rank)
    xa, b, rank, scale = _arguments(gate_up, low_rank)
    _backward[grid](da, gate_up, xa, b, dgu, a, tokens, width, rank, scale, **options)
    return dgu, a


def _arguments(gate_up: Tensor, low_rank: LowRank | None) -> tuple[Tensor, Tensor, int, float]:
    if low_rank is None:
        return gate_up, gate_up, 0, 0.0
    return low_rank.xa, low_rank.b, low_rank.xa.shape[1], low_rank.scale


def _launch(
    tokens: int, width: int, activation: str, low_rank: LowRank | None
) -> tuple[tuple[int, int], dict[str, Any]]:
    rank = 16 if low_rank is None else max(16, triton.next_power_of_2(low_rank.xa.shape[1]))
    rows, cols = (1, 1024) if low_rank is None else (64, 64)
    options = {"GELU": activation == "gelu_tanh", "LOW": low_rank is not None, "R": rank, "ROWS": rows, "COLS": cols}
    return (triton.cdiv(tokens, rows), triton.cdiv(width, cols)), options
