"""Frozen weights that multiply in 8-bit integers, rotated (`kernels.int8`).

    y  = x Wᵀ      codes of x · f and of W / f         f: root mean square of W's columns, the largest 1
    dx = dy W      codes of dy · g and of Wᵀ / g       g: the same of W's rows

Each product has codes of its own of W, so dx is not to the bit the gradient of the y that was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.int8 import int8_product, quantise_rotated
from pronghorn.kernels.nf4 import NF4Weight
from pronghorn.kernels.nf4_int8 import fits, write_rotated
from pronghorn.precision.fp8 import dense_weight, is_nf4
from pronghorn.precision.source import Activation, LowRankGrad, WeightSource

LEAST = 2.0**-20
"""The least factor, so that x · f stays in float16's range."""


class RotatedWeight(NamedTuple):
    """W [N, K], sizes multiples of 64."""

    factors: Tensor
    """f [K] in x's dtype, of its columns."""
    codes: Tensor | None
    """int8 [N, K], of W / f; None where they are written out for each product."""
    scales: Tensor
    """float32 [N]."""

    @classmethod
    def of(
        cls, weights: Sequence[Any], across: bool, dtype: torch.dtype, factors: Tensor | None = None
    ) -> RotatedWeight:
        """Quantise weights [N_i, K], one below the other, or Wᵀ if `across`; those of few bits are written out first.

        Args:
            dtype: of the rows that they are multiplied by, 16 bits.
            factors: those of the same weights, if they are known.
        """
        whole = whole_weight(weights)
        whole = whole.t() if across else whole
        factors = column_factors(whole).to(dtype) if factors is None else factors
        inverse = 1 / factors.float()
        if whole.dtype is not dtype:  # rounded once, after the division
            whole, inverse = (whole * inverse).to(dtype), torch.ones_like(inverse)
        codes, scales = quantise_rotated(whole.contiguous(), inverse)
        return cls(factors, codes, scales.view(-1))


def whole_weight(weights: Sequence[Any]) -> Tensor:
    """Return weights [N_i, K], one below the other."""
    dense = [dense_weight(weight) for weight in weights]
    return dense[0] if len(dense) == 1 else torch.cat(dense)


def column_factors(weight: Tensor) -> Tensor:
    """Return the factors [K] of weights [N, K] or, of all experts together, [E, N, K], in their dtype."""
    lengths = torch.linalg.vector_norm(weight, dim=(*range(weight.dim() - 1),), dtype=torch.float32)
    factors = (lengths / lengths.amax().clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=LEAST)
    return factors.to(weight.dtype)


class Int8Source(WeightSource):
    """W in 8-bit integers, resident, for one of its products.

    Args:
        weight: W for the forward, Wᵀ for the input gradient.
    """

    def __init__(self, weight: RotatedWeight) -> None:
        self.weight = weight

    def codes(self) -> Tensor:
        """Return the codes [N, K]."""
        assert self.weight.codes is not None
        return self.weight.codes

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        y = self._multiply(x.dense)
        return y if bias is None else y.add_(bias)

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        dx = self._multiply(dy.dense)
        return dx if low_rank is None else dx.addmm_(low_rank.dya, low_rank.a)

    def _multiply(self, x: Tensor) -> Tensor:
        codes, scales = quantise_rotated(x, self.weight.factors)
        return int8_product(codes, scales, self.codes(), self.weight.scales, x.dtype)


class WrittenInt8Source(Int8Source):
    """Weights in few bits, whose codes are written out for each product.

    Args:
        weights: [N_i, K], one below the other.
        rows: every N_i.
        rotated: of all, without codes; of Wᵀ if `across`.
    """

    def __init__(self, weights: Sequence[Any], rows: list[int], rotated: RotatedWeight, across: bool) -> None:
        super().__init__(rotated)
        self._across, self._weights, self._rows = across, list(weights), rows
        few = [NF4Weight.of(weight) for weight in weights if is_nf4(weight)]
        self._few = few if len(few) == len(weights) and all(map(fits, few)) else None
        self.inverse = 1 / rotated.factors.float(), 1 / rotated.scales

    def codes(self) -> Tensor:
        factors, _, scales = self.weight
        if self._few is None:
            made = RotatedWeight.of(self._weights, self._across, factors.dtype, factors).codes
            assert made is not None
            return made
        whole = torch.empty(len(scales), len(factors), dtype=torch.int8, device=scales.device)
        by, scale = self.inverse
        parts = whole.split(self._rows, 1 if self._across else 0)
        of_rows = (by if self._across else scale).split(self._rows)
        for weight, part, own in zip(self._few, parts, of_rows, strict=True):
            columns, rows = (own, scale) if self._across else (by, own)
            write_rotated(weight, columns, rows, part, factors.dtype, self._across)
        return whole
