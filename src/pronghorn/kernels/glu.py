"""The gated activation of decoder MLPs: SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202), with LoRA's part of g and u.

    (g, u) = gate_up + s · (x Aᵀ) Bᵀ        a = f(g) ∘ u        f = silu, or gelu by its tanh approximation
    du = da ∘ f(g)                          dg = da ∘ u ∘ f′(g)

g and u lie side by side in one tensor, as one product of gate and up leaves them. Their low-rank part is added here, in
the pass that reads them anyway, instead of in one more pass over the largest tensor of a layer. The backward computes a
again instead of keeping it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

Activation = Literal["silu", "gelu_tanh"]
MAX_RANK = 128
"""Ranks of gate and up together up to which the Triton kernel adds their part."""


@dataclass(frozen=True)
class LowRank:
    """s · xa bᵀ: xa [T, R] and b [2·I, R] in the activations' dtype."""

    xa: Tensor
    b: Tensor
    scale: float

    def added_to(self, gate_up: Tensor) -> Tensor:
        """gate_up + s · xa bᵀ, rounded once."""
        return torch.addmm(gate_up, self.xa, self.b.t(), alpha=self.scale)


def forward(gate_up: Tensor, activation: Activation, low_rank: LowRank | None = None) -> Tensor:
    """Args: gate_up: [T, 2·I], contiguous, g in the first I columns. Returns a: [T, I]."""
    if gate_up.is_cuda:
        from pronghorn.kernels.glu_triton import forward as launch

        return launch(gate_up, activation, low_rank)
    gate, up = (gate_up if low_rank is None else low_rank.added_to(gate_up)).chunk(2, -1)
    return _activate(gate, activation) * up


def backward(
    da: Tensor, gate_up: Tensor, activation: Activation, low_rank: LowRank | None = None
) -> tuple[Tensor, Tensor]:
    """(d gate_up: [T, 2·I], a: [T, I] computed again) from da: [T, I], contiguous."""
    if gate_up.is_cuda:
        from pronghorn.kernels.glu_triton import backward as launch

        return launch(da, gate_up, activation, low_rank)
    with torch.enable_grad():
        leaf = (gate_up if low_rank is None else low_rank.added_to(gate_up)).detach().requires_grad_()
        a = forward(leaf, activation)
    (grad,) = torch.autograd.grad(a, leaf, da)
    return grad, a.detach()


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    return silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
