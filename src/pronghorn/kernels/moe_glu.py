"""The gated activation of routed rows: as `glu`, and gpt-oss's, with the experts' biases and the router's weights.

    h' = h + b_e                a = f(g) ∘ u                                  silu, gelu_tanh: g, u side by side in h'
                                a = g̅·σ(α·g̅) ∘ (u̅ + 1)                        clamped: g, u take turns in h',
                                g̅ = min(g, limit), u̅ = clamp(u, ±limit)

The layer's output is Σ w·(a Wᵀ + c), so with d = dy W, *not* weighted by w, the backward needs neither a Wᵀ nor a
weighted copy of dy: dw = <d, a> (without c's part) and dh = w · d ∘ ∂a/∂h. (The same regrouping as SonicMoE's,
arXiv:2512.14080.) Everything is computed in float32 (float64 for float64) and rounded once.

The gated activation of routed rows in Triton: one pass each way; a program a row backward, which sums dw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from pronghorn.kernels.glu import _activate
from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton
from pronghorn.kernels.quantise import RowCodes, larger, store_codes_of_parts


@dataclass(frozen=True)
class Gate:
    """Which gated activation."""

    kind: Literal["silu", "gelu_tanh", "clamped"]
    alpha: float = 1.702
    limit: float = 7.0


def forward_reference(h: Tensor, gate: Gate, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Activate rows.

    Args:
        h: [S, 2·I], contiguous.
        bias: [E, 2·I] or None; experts: int32 [S], the expert of each row.
    Returns:
        a: [S, I].
    """
    return _activate_reference(_biased(h, bias, experts), gate).to(h.dtype)


def backward_reference_(
    d: Tensor, h: Tensor, weights: Tensor, slots: Tensor, gate: Gate, bias: Tensor | None, experts: Tensor,
    activated: bool = True, codes: RowCodes | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (dh, dw), and put w·a in the place of d if it is wanted.

    Args:
        d: [S, I], contiguous: the gradient before it is weighted.
        weights: [T, K]; slots: int32 [S], where in it each row's weight lies.
        activated: whether anybody reads w·a; if not, d keeps what it had.
        codes: where dh's are written, if they are wanted.
    Returns:
        dh: [S, 2·I] in h's dtype; dw: [T, K] in the weights'.
    """
    index = slots.long()
    with torch.enable_grad():
        leaf = _biased(h, bias, experts).detach().requires_grad_()
        a = _activate_reference(leaf, gate)
    wide = d.to(a.dtype)
    w = weights.flatten()[index].to(a.dtype).unsqueeze(1)
    (dh,) = torch.autograd.grad(a, leaf, wide * w)
    dw = torch.empty_like(weights.flatten())
    dw[index] = (wide * a.detach()).sum(1).to(dw.dtype)
    if activated:
        d.copy_(a.detach() * w)
    dh = dh.to(h.dtype)
    if codes is not None:
        codes.fill_reference(dh)
    return dh, dw.view_as(weights)


def _biased(h: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    return wide if bias is None else wide + bias.to(wide.dtype)[experts]


def _activate_reference(h: Tensor, gate: Gate) -> Tensor:
    if gate.kind == "clamped":
        g, u = h[:, ::2].clamp(max=gate.limit), h[:, 1::2].clamp(-gate.limit, gate.limit)
        return g * torch.sigmoid(gate.alpha * g) * (u + 1)
    g, u = h.chunk(2, -1)
    return (silu(g) if gate.kind == "silu" else gelu(g, approximate="tanh")) * u


BLOCK = 1024
BACK_BLOCK = 256
"""Columns at a time of a row's backward, by two warps: rows of 768 leave a quarter of 1,024 idle."""
_KINDS = {"silu": 0, "gelu_tanh": 1, "clamped": 2}


@triton.jit
def _columns(start, WIDTH, BLOCK: tl.constexpr):
    """Return columns of the activation from `start` on and which are inside; the same of gate·up that take turns."""
    cols, pairs = start + tl.arange(0, BLOCK), 2 * start + tl.arange(0, 2 * BLOCK)
    return cols, cols < WIDTH, pairs, pairs < 2 * WIDTH


@triton.jit
def _gate_up(h_ptr, bias_ptr, row, expert, start, WIDTH, KIND: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Return (g, u) of BLOCK columns of a row in float32. Turns are read side by side and parted in registers."""
    cols, inside, pairs, both = _columns(start, WIDTH, BLOCK)
    h_ptr += row * 2 * WIDTH
    bias_ptr += expert * 2 * WIDTH
    if KIND == 2:
        h = tl.load(h_ptr + pairs, mask=both, other=0.0).to(tl.float32)
        if BIAS:
            h += tl.load(bias_ptr + pairs, mask=both, other=0.0).to(tl.float32)
        g, u = tl.split(tl.reshape(h, (BLOCK, 2)))
    else:
        g = tl.load(h_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(h_ptr + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            g += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            u += tl.load(bias_ptr + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    return g, u


@triton.jit
def _gated(g, u, alpha, limit, KIND: tl.constexpr):
    """Return (a, ∂a/∂g, ∂a/∂u)."""
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
    """Activate a part of a row: h [S, 2·WIDTH]; bias [E, 2·WIDTH]; experts [S]; a [S, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    cols, inside, _, _ = _columns(start, WIDTH, BLOCK)
    expert = tl.load(experts_ptr + row).to(tl.int64)
    g, u = _gate_up(h_ptr, bias_ptr, row, expert, start, WIDTH, KIND, BIAS, BLOCK)
    a, _, _ = _gated(g, u, alpha, limit, KIND)
    tl.store(a_ptr + row * WIDTH + cols, a.to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_ptr, h_ptr, w_ptr, slots_ptr, bias_ptr, experts_ptr, dh_ptr, dw_ptr, codes_ptr, scales_ptr, WIDTH, alpha, limit,
    KIND: tl.constexpr, BIAS: tl.constexpr, ACTIVATED: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's dh and the gradient of its weight; with ACTIVATED w·a over d, with CODES those of dh.

    d: [S, WIDTH]; h, dh, codes: [S, 2·WIDTH]; w, dw: [T, K]; slots, experts, scales: [S]; bias: [E, 2·WIDTH].
    """
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.load(experts_ptr + row).to(tl.int64), tl.load(slots_ptr + row).to(tl.int64)
    w = tl.load(w_ptr + slot).to(tl.float32)
    dw, most = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    dh = dh_ptr + row * 2 * WIDTH
    for start in range(0, WIDTH, BLOCK):
        cols, inside, pairs, both = _columns(start, WIDTH, BLOCK)
        g, u = _gate_up(h_ptr, bias_ptr, row, expert, start, WIDTH, KIND, BIAS, BLOCK)
        d = tl.load(d_ptr + row * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
        a, dg, du = _gated(g, u, alpha, limit, KIND)
        dw += d * a
        dg, du = (w * d * dg).to(dh_ptr.dtype.element_ty), (w * d * du).to(dh_ptr.dtype.element_ty)
        if KIND == 2:
            tl.store(dh + pairs, tl.interleave(dg, du), mask=both)
        else:
            tl.store(dh + cols, dg, mask=inside)
            tl.store(dh + WIDTH + cols, du, mask=inside)
        if ACTIVATED:
            tl.store(d_ptr + row * WIDTH + cols, (w * a).to(d_ptr.dtype.element_ty), mask=inside)
        if CODES:
            most = larger(larger(most, dg.to(tl.float32)), du.to(tl.float32))
    tl.store(dw_ptr + slot, tl.sum(dw, 0).to(dw_ptr.dtype.element_ty))
    if CODES:
        codes, scale = codes_ptr + row * 2 * WIDTH, scales_ptr + row
        store_codes_of_parts(dh, dh, codes, scale, most, 2 * WIDTH, COLUMNS=False, BLOCK=2 * BLOCK)


def forward_triton(h: Tensor, gate: Gate, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Do what `forward` does, by its Triton kernels."""
    rows, width = h.shape[0], h.shape[1] // 2
    a = h.new_empty(rows, width)
    launch(
        _forward, (rows, cdiv(width, BLOCK)),
        h, h if bias is None else bias.contiguous(), experts, a, width, gate.alpha, gate.limit,
        KIND=_KINDS[gate.kind], BIAS=bias is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return a


def backward_triton_(
    d: Tensor, h: Tensor, weights: Tensor, slots: Tensor, gate: Gate, bias: Tensor | None, experts: Tensor,
    activated: bool = True, codes: RowCodes | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do what `backward_` does, by its Triton kernels."""
    rows, width = d.shape
    weights = weights.contiguous()
    dh, dw = torch.empty_like(h), torch.empty_like(weights)
    launch(
        _backward, (rows,),
        d, h, weights, slots, h if bias is None else bias.contiguous(), experts, dh, dw, *(codes or (dh, dh)), width,
        gate.alpha, gate.limit, KIND=_KINDS[gate.kind], BIAS=bias is not None, ACTIVATED=activated,
        CODES=codes is not None, BLOCK=min(BACK_BLOCK, next_power_of_2(width)), num_warps=2,
    )  # fmt: skip
    return dh, dw


forward = by_device(forward_reference, forward_triton)
backward_ = by_device(backward_reference_, backward_triton_, at=1)
