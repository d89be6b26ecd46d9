"""The gated activation of decoder MLPs: SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202).

    a = f(g) ∘ u        f = silu, or gelu by its tanh approximation
    du = da ∘ f(g)      dg = da ∘ u ∘ f′(g)

g and u lie side by side in one tensor, as one product of gate and up leaves them. The backward computes a again instead
of keeping it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

Activation = Literal["silu", "gelu_tanh"]
MAX_RANK = 128
"""Ranks of gate and up together up to which the Triton kernel adds LoRA's part."""


def forward(gate_up: Tensor, activation: Activation) -> Tensor:
    """Args: gate_up: [T, 2·I], contiguous, g in the first I columns. Returns a: [T, I]."""
    if gate_up.is_cuda:
        from pronghorn.kernels.glu_triton import forward as launch

        return launch(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    return _activate(gate, activation) * up


def forward_with_low_rank_(
    gate_up: Tensor, xa: Tensor, b: Tensor, scale: float, activation: Activation, ranks: tuple[int, int]
) -> Tensor:
    """`forward`, after adding s · xa bᵀ to `gate_up` in place: in one pass where the ranks allow it.

    Args:
        xa: [T, R]; b: [2·I, R], contiguous, in gate_up's dtype.
        ranks: of gate's adapter and of up's, R together; 0 for one without. xa's first columns and b's first rows are
            gate's: what b holds beside these two blocks is never read.
    """
    if gate_up.is_cuda and xa.shape[1] <= MAX_RANK:
        from pronghorn.kernels.glu_triton import forward_with_low_rank_ as launch

        return launch(gate_up, xa, b, scale, activation, ranks)
    width, rank = gate_up.shape[1] // 2, ranks[0]
    gate_up[:, :width].addmm_(xa[:, :rank], b[:width, :rank].t(), alpha=scale)
    gate_up[:, width:].addmm_(xa[:, rank:], b[width:, rank:].t(), alpha=scale)
    return forward(gate_up, activation)


def backward_(da: Tensor, gate_up: Tensor, activation: Activation, donated: bool = False) -> Tensor:
    """d gate_up [T, 2·I] from da [T, I], contiguous, whose place a, computed again, takes.

    Args:
        donated: nobody needs `gate_up` any more: its place may be taken.
    """
    if gate_up.is_cuda:
        from pronghorn.kernels.glu_triton import backward_ as launch

        return launch(da, gate_up, activation, donated)
    with torch.enable_grad():
        leaf = gate_up.detach().requires_grad_()
        a = forward(leaf, activation)
    (grad,) = torch.autograd.grad(a, leaf, da)
    da.copy_(a.detach())
    return grad


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    return silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
