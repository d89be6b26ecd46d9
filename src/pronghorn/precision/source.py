"""Weight sources: how the weights of one merged product multiply.

    y = x Wᵀ (+ b)        dx = dy W + (s · dy B) A

A layer asks its source to multiply and never holds a weight tensor for the backward itself: the backward asks again. So
weights may be a view, be written out from 4 bits for each product, or be gathered from shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.nf4 import NF4Weight, write_out


class Lifetime(StrEnum):
    """How long the tensor that a product reads is there."""

    RESIDENT = "resident"
    PER_FORWARD = "from a forward to its backward"
    PER_USE = "for one product"


class Activation(NamedTuple):
    """What a product is given: [T, K] in the products' dtype and, where the kernel that made it wrote them, codes."""

    dense: Tensor
    codes: Tensor | None = None
    """[T, K] in 8 bits."""
    scales: Tensor | None = None
    """float32 [T, 1]: dense ≈ codes · scales."""


class LowRankGrad(NamedTuple):
    """What LoRA adds to dx: (s · dy B) A."""

    dya: Tensor
    """[T, R], s · dy B."""
    a: Tensor
    """[R, K]."""
    both: Tensor | None
    """[T, N + R], dy and dya side by side, where the source asked for them."""


class WeightSource:
    """One merged weight W [N, K]. A subclass multiplies; a source is static and knows nothing of a batch."""

    lifetime: Lifetime
    side_by_side: bool = False
    """`input_grad` wants dy and s · dy B in one tensor, since A lies below W."""

    def begin(self) -> tuple[WeightSource, Tensor | None]:
        """Return the source for one forward and its backward, and a tensor that must live as long (or None)."""
        return self, None

    def resume(self, saved: Tensor | None) -> WeightSource:
        """Return the source for a backward, from the tensor that `begin` gave for its forward."""
        return self

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b [T, N] of x [T, K]."""
        raise NotImplementedError

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        """Return dx [T, K] of dy [T, N], with LoRA's part."""
        raise NotImplementedError


class DenseSource(WeightSource):
    """W in the products' dtype, where it lies.

    Args:
        storage: [N, K], or [N + R, K] with room for LoRA's A below W.
        rows: N.
    """

    lifetime = Lifetime.RESIDENT

    def __init__(self, storage: Tensor, rows: int) -> None:
        self.storage = storage
        self.weight = storage[:rows]
        self._transposed = self.weight.t()
        self.side_by_side = len(storage) > rows

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        return x.dense @ self._transposed if bias is None else torch.addmm(bias, x.dense, self._transposed)

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        if low_rank is not None and low_rank.both is not None:
            return low_rank.both @ self.storage
        dx = dy.dense @ self.weight
        return dx if low_rank is None else dx.addmm_(low_rank.dya, low_rank.a)


class CopiedSource(WeightSource):
    """Float32 weights that are trained, copied to the products' dtype for each forward."""

    lifetime = Lifetime.PER_FORWARD

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._weights, self._dtype = list(weights), dtype

    def begin(self) -> tuple[WeightSource, Tensor | None]:
        rows = [len(weight) for weight in self._weights]
        copy = self._weights[0].new_empty(sum(rows), self._weights[0].shape[1], dtype=self._dtype)
        for part, weight in zip(copy.split(rows), self._weights, strict=True):
            part.copy_(weight.detach())  # one by one: all in one launch goes at two thirds of the bandwidth
        return DenseSource(copy, len(copy)), copy

    def resume(self, saved: Tensor | None) -> WeightSource:
        assert saved is not None
        return DenseSource(saved, len(saved))


class NF4Source(WeightSource):
    """bitsandbytes' 4-bit weights, written out for each product.

    Args:
        weights: `Params4bit`, one below the other.
        below: R, rows of LoRA's A that come below W when dx is computed; 0 for none.
    """

    lifetime = Lifetime.PER_USE

    def __init__(self, weights: Sequence[Any], dtype: torch.dtype, below: int) -> None:
        self._weights, self._below = [NF4Weight.of(weight) for weight in weights], below
        self._stored, self._dtype = weights[0].quant_state.dtype, dtype
        self.side_by_side = below > 0

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        weight = self._written_out(0).t()
        return x.dense @ weight if bias is None else torch.addmm(bias, x.dense, weight)

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        if low_rank is not None and low_rank.both is not None:
            whole = self._written_out(self._below)
            whole[-self._below :] = low_rank.a
            return low_rank.both @ whole
        dx = dy.dense @ self._written_out(0)
        return dx if low_rank is None else dx.addmm_(low_rank.dya, low_rank.a)

    def _written_out(self, more: int) -> Tensor:
        """Return W [N + more, K] in the products' dtype, the last rows uninitialised."""
        rows = [weight.shape[0] for weight in self._weights]
        first = self._weights[0]
        whole = first.packed.new_empty(sum(rows) + more, first.shape[1], dtype=self._stored)
        for weight, part in zip(self._weights, whole.split([*rows, more]), strict=False):
            write_out(weight, part)
        return whole.to(self._dtype)
