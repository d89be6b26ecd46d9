"""The gated activation of routed rows: as `glu`, and gpt-oss's, with the experts' biases and the router's weights.

    h' = h + b_e                a = f(g) ∘ u                                  silu, gelu_tanh: g, u side by side in h'
                                a = g̅·σ(α·g̅) ∘ (u̅ + 1)                        clamped: g, u take turns in h',
                                g̅ = min(g, limit), u̅ = clamp(u, ±limit)

The layer's output is Σ w·(a Wᵀ + c), so with d = dy W, *not* weighted by w, the backward needs neither a Wᵀ nor a
weighted copy of dy: dw = <d, a> (without c's part) and dh = w · d ∘ ∂a/∂h. (The same regrouping as SonicMoE's,
arXiv:2512.14080.) Everything is computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


@dataclass(frozen=True)
class Gate:
    """Which gated activation."""

    kind: Literal["silu", "gelu_tanh", "clamped"]
    alpha: float = 1.702
    limit: float = 7.0


def forward(h: Tensor, gate: Gate, bias: Tensor | None, experts: Tensor) -> Tensor:
    """The activation.

    Args:
        h: [S, 2·I], contiguous.
        bias: [E, 2·I] or None; experts: int32 [S], the expert of each row.
    Returns:
        a: [S, I].
    """
    if h.is_cuda:
        from pronghorn.kernels.moe_glu_triton import forward as launch

        return launch(h, gate, bias, experts)
    return _activate(_biased(h, bias, experts), gate).to(h.dtype)


def backward_(
    d: Tensor, h: Tensor, weights: Tensor, slots: Tensor, gate: Gate, bias: Tensor | None, experts: Tensor
) -> tuple[Tensor, Tensor]:
    """(dh, dw), and w·a in the place of d.

    Args:
        d: [S, I], contiguous, overwritten: the gradient before it is weighted.
        weights: [T, K]; slots: int32 [S], where in it each row's weight lies.
    Returns:
        dh: [S, 2·I] in h's dtype; dw: [T, K] in the weights'.
    """
    if h.is_cuda:
        from pronghorn.kernels.moe_glu_triton import backward_ as launch

        return launch(d, h, weights, slots, gate, bias, experts)
    index = slots.long()
    with torch.enable_grad():
        leaf = _biased(h, bias, experts).detach().requires_grad_()
        a = _activate(leaf, gate)
    wide = d.to(a.dtype)
    w = weights.flatten()[index].to(a.dtype).unsqueeze(1)
    (dh,) = torch.autograd.grad(a, leaf, wide * w)
    dw = torch.empty_like(weights.flatten())
    dw[index] = (wide * a.detach()).sum(1).to(dw.dtype)
    d.copy_(a.detach() * w)
    return dh.to(h.dtype), dw.view_as(weights)


def _biased(h: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    return wide if bias is None else wide + bias.to(wide.dtype)[experts]


def _activate(h: Tensor, gate: Gate) -> Tensor:
    if gate.kind == "clamped":
        g, u = h[:, ::2].clamp(max=gate.limit), h[:, 1::2].clamp(-gate.limit, gate.limit)
        return g * torch.sigmoid(gate.alpha * g) * (u + 1)
    g, u = h.chunk(2, -1)
    return (silu(g) if gate.kind == "silu" else gelu(g, approximate="tanh")) * u
