"""The gated activation of routed rows in Triton: one pass each way; a program a row backward, which sums dw."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.glu_triton import _activate
from pronghorn.kernels.moe_glu import Gate

BLOCK = 1024
_KINDS = {"silu": 0, "gelu_tanh": 1, "clamped": 2}


@triton.jit
def _gate_up(h_ptr, bias_ptr, row, expert, cols, inside, WIDTH, KIND: tl.constexpr, BIAS: tl.constexpr):
    """(g, u) of some columns of a row in float32."""
    if KIND == 2:
        first, second = 2 * cols, 2 * cols + 1
    else:
        first, second = cols, cols + WIDTH
    g = tl.load(h_ptr + row * 2 * WIDTH + first, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(h_ptr + row * 2 * WIDTH + second, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        g += tl.load(bias_ptr + expert * 2 * WIDTH + first, mask=inside, other=0.0).to(tl.float32)
        u += tl.load(bias_ptr + expert * 2 * WIDTH + second, mask=inside, other=0.0).to(tl.float32)
    return g, u, first, second


@triton.jit
def _gated(g, u, alpha, limit, KIND: tl.constexpr):
    """(a, ∂a/∂g, ∂a/∂u)."""
    if KIND == 2:
        low, mid = tl.minimum(g, limit), tl.minimum(tl.maximum(u, -limit), limit) + 1.0
        s = tl.sigmoid(alpha * low)
        f = low * s
        dg = tl.where(g <= limit, mid * s * (1.0 + alpha * low * (1.0 - s)), 0.0)
        du = tl.where((u >= -limit) & (u <= limit), f, 0.0)
    else:
        f, df = _activate(g, KIND == 1)
        mid, dg, du = u, u * df, f
    return f * mid, dg, du


@triton.jit
def _forward(
    h_ptr, bias_ptr, experts_ptr, a_ptr, WIDTH, alpha, limit,
    KIND: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    expert = tl.load(experts_ptr + row).to(tl.int64)
    g, u, _, _ = _gate_up(h_ptr, bias_ptr, row, expert, cols, inside, WIDTH, KIND, BIAS)
    a, _, _ = _gated(g, u, alpha, limit, KIND)
    tl.store(a_ptr + row * WIDTH + cols, a.to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_ptr, h_ptr, w_ptr, slots_ptr, bias_ptr, experts_ptr, dh_ptr, dw_ptr, WIDTH, alpha, limit,
    KIND: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.load(experts_ptr + row).to(tl.int64), tl.load(slots_ptr + row).to(tl.int64)
    w = tl.load(w_ptr + slot).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < WIDTH
        g, u, first, second = _gate_up(h_ptr, bias_ptr, row, expert, cols, inside, WIDTH, KIND, BIAS)
        d = tl.load(d_ptr + row * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
        a, dg, du = _gated(g, u, alpha, limit, KIND)
        dw += d * a
        tl.store(dh_ptr + row * 2 * WIDTH + first, (w * d * dg).to(dh_ptr.dtype.element_ty), mask=inside)
        tl.store(dh_ptr + row * 2 * WIDTH + second, (w * d * du).to(dh_ptr.dtype.element_ty), mask=inside)
        tl.store(d_ptr + row * WIDTH + cols, (w * a).to(d_ptr.dtype.element_ty), mask=inside)
    tl.store(dw_ptr + slot, tl.sum(dw, 0).to(dw_ptr.dtype.element_ty))


def forward(h: Tensor, gate: Gate, bias: Tensor | None, experts: Tensor) -> Tensor:
    """As `moe_glu.forward`."""
    rows, width = h.shape[0], h.shape[1] // 2
    a = h.new_empty(rows, width)
    _forward[(rows, triton.cdiv(width, BLOCK))](
        h, h if bias is None else bias.contiguous(), experts, a, width, gate.alpha, gate.limit,
        KIND=_KINDS[gate.kind], BIAS=bias is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return a


def backward_(
    d: Tensor, h: Tensor, weights: Tensor, slots: Tensor, gate: Gate, bias: Tensor | None, experts: Tensor
) -> tuple[Tensor, Tensor]:
    """As `moe_glu.backward_`."""
    rows, width = d.shape
    weights = weights.contiguous()
    dh, dw = torch.empty_like(h), torch.empty_like(weights)
    _backward[(rows,)](
        d, h, weights, slots, h if bias is None else bias.contiguous(), experts, dh, dw, width, gate.alpha, gate.limit,
        KIND=_KINDS[gate.kind], BIAS=bias is not None, BLOCK=min(BLOCK, triton.next_power_of_2(width)),
    )  # fmt: skip
    return dh, dw
