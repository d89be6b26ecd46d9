"""Frozen weights that multiply in 8-bit integers, turned (`kernels.int8`).

    y  = x Wᵀ      codes of x · f and of W / f, along K        f: root mean square of W's columns
    dx = dy W      codes of dy · g and of Wᵀ / g, along N      g: root mean square of W's rows

Each product has codes of its own of W, so dx is not to the bit the gradient of the y that was computed; both are nearer
to the products in 16 bits than e4m3's are. LoRA's part is added in the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.int8 import int8_product, quantise_turned
from pronghorn.precision.source import Activation, LowRankGrad, WeightSource

LEAST = 2.0**-20
"""The least factor, of the largest, which is 1: so that x · f stays in float16's range."""


class Turned(NamedTuple):
    """W [N, K] for one product."""

    factors: Tensor
    """f, float32 [K], of the other operand's columns."""
    codes: Tensor
    """int8 [N, K]."""
    scales: Tensor
    """float32 [N]."""

    @classmethod
    def of(cls, weight: Tensor) -> Turned:
        """Quantise a weight [N, K], whose sizes are multiples of 64."""
        lengths = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32)
        factors = (lengths / lengths.amax().clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=LEAST)
        codes, scales = quantise_turned(weight, 1 / factors)
        return cls(factors, codes, scales.view(-1))

    def multiply(self, x: Tensor, u: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + u v [T, N] of x [T, K], u [T, R] and v [R, N]."""
        codes, scales = quantise_turned(x, self.factors)
        return int8_product(codes, scales, self.codes, self.scales, x.dtype, u, v)


class Int8Weight(NamedTuple):
    """W [N, K] for both products, two bytes a weight, or for the input gradient's alone."""

    forward: Turned | None
    """None where the forward multiplies W as it is."""
    across: Turned
    """Of Wᵀ [K, N]."""

    @classmethod
    def of(cls, weights: Sequence[Tensor], forward: bool) -> Int8Weight:
        """Quantise weights [N_i, K], one below the other."""
        whole = torch.cat([weight.detach() for weight in weights])
        return cls(Turned.of(whole) if forward else None, Turned.of(whole.t().contiguous()))


class Int8Source(WeightSource):
    """W in 8-bit integers, resident.

    Args:
        plain: gives the forward where `weight` has no codes for it.
    """

    def __init__(self, weight: Int8Weight, plain: WeightSource) -> None:
        self.weight, self.plain = weight, plain

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        if self.weight.forward is None:
            return self.plain.forward(x, bias)
        y = self.weight.forward.multiply(x.dense)
        return y if bias is None else y.add_(bias)

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        if low_rank is None:
            return self.weight.across.multiply(dy.dense)
        return self.weight.across.multiply(dy.dense, low_rank.dya, low_rank.a)
