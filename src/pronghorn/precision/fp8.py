"""Frozen weights that multiply in 8 bits.

    y  = s_x · (codes_x codes_Wᵀ) · s_W                    x ≈ codes_x · s_x by rows, W ≈ codes_W · s_W by rows
    dx = s_g · (codes_g codes_W)                           g = dy · s_W, by columns; g ≈ codes_g · s_g by rows

Where both are in 8 bits they read the same codes of W (the second one transposed), so dx is the gradient of the very y
that was computed; or dx alone is (`BackwardSource`). LoRA's part is added in the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pronghorn.errors import UnsupportedError
from pronghorn.kernels.fp8_blocks import FP8Tensor
from pronghorn.kernels.nf4 import NF4Weight, write_codes, write_out
from pronghorn.kernels.packed import PackedTensor
from pronghorn.kernels.quantise import (
    DTYPE,
    ROW_SCALES,
    RowCodes,
    quantise_rows,
    transposed,
    weight_scales,
    write_codes_across,
)
from pronghorn.precision.compute import MULTIPLE
from pronghorn.precision.source import Activation, LowRankGrad, WeightSource


@dataclass(frozen=True, eq=False)
class FP8Weight:
    """W [N, K] in 8 bits."""

    codes: Tensor | None
    """e4m3 [N, K]; None where no forward multiplies them."""
    scales: Tensor
    """s, float32 [N]."""
    kept_across: Tensor | None
    """The codes as [K, N]; None where they are turned for each product, as those that other processes share."""

    @classmethod
    def of(cls, weights: Sequence[Tensor], forward: bool = True) -> FP8Weight:
        """Quantise weights [N_i, K], one below the other, for both products or for the input gradient's alone.

        Packed ones are written out one by one.
        """
        rows, first = [len(weight) for weight in weights], weights[0]
        scales = torch.empty(sum(rows), device=first.device)
        codes = torch.empty(sum(rows), first.shape[1], dtype=DTYPE, device=first.device)
        for weight, part, each in zip(weights, codes.split(rows), scales.split(rows), strict=True):
            quantise_weight(weight, part, each)
        return cls(codes if forward else None, scales, transposed(codes))

    @property
    def width(self) -> int:
        """K."""
        if self.kept_across is not None:
            return len(self.kept_across)
        assert self.codes is not None
        return self.codes.shape[1]

    @property
    def across(self) -> Tensor:
        """Return the codes as [K, N]."""
        if self.kept_across is None:
            assert self.codes is not None
            return transposed(self.codes)
        return self.kept_across

    @cached_property
    def columns(self) -> Tensor:
        """s as the factor of a gradient's columns: in bfloat16, or as it is where it is not a bfloat16 number."""
        narrow = self.scales.bfloat16()
        return narrow if torch.equal(narrow.float(), self.scales) else self.scales

    def dequantise(self) -> Tensor:
        """Return codes · s in float32 [N, K]."""
        return self.across.t().float() * self.scales[:, None]


def is_nf4(weight: Any) -> bool:
    """Tell whether a weight is bitsandbytes' in 4 bits."""
    return getattr(weight, "quant_state", None) is not None


def dense_weight(weight: Any) -> Tensor:
    """Return a frozen weight [N, K] as it is or as it is written out, of bitsandbytes' 4 bits in float32."""
    if not is_nf4(weight):
        return weight.dequantise() if isinstance(weight, PackedTensor) else weight.detach()
    few = NF4Weight.of(weight)
    out = torch.empty(few.shape, device=weight.device)
    write_out(few, out)
    return out


def row_scales(weight: Any) -> Tensor:
    """Return the scales of a frozen weight's rows in 8 bits, float32 [N]; those that were kept, if any were."""
    kept: Tensor | None = getattr(weight, ROW_SCALES, None)
    if kept is not None:
        return kept
    return NF4Weight.of(weight).row_scales() if is_nf4(weight) else weight_scales(dense_weight(weight).abs().amax(1))


def quantise_weight(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write a frozen weight's codes [N, K] and the scales [N] of its rows; a packed weight is written out first."""
    dense = dense_weight(weight)
    scales.copy_(weight_scales(dense.abs().amax(1)))
    codes.copy_(dense.float() * (1 / scales)[:, None])


def as_codes(weight: Tensor, device: torch.device) -> FP8Tensor:
    """Return a frozen weight [N, K] in the codes that 8-bit products of it multiply, and nothing else, on `device`."""
    codes = torch.empty(weight.shape, dtype=DTYPE, device=device)
    scales = torch.empty(len(weight), device=device)
    quantise_weight(weight.to(device), codes, scales)
    return FP8Tensor([codes, scales[:, None]], weight.shape, weight.dtype, 1, weight.shape[1])


def scaled_product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, exact: bool) -> Tensor:
    """Return (a · a_scales) (b · b_scales)ᵀ [M, N] in `dtype`.

    Args:
        a: e4m3 [M, K]; a_scales: float32 [M, 1].
        b: e4m3 [N, K]; b_scales: float32 [N].
        exact: sums in float32 all the way, where the tensor cores' own sums keep some 14 bits.
    """
    if not a.is_cuda:
        return ((a.float() * a_scales) @ (b.float() * b_scales[:, None]).t()).to(dtype)
    rows = functional.ScalingType.RowWise
    product: Tensor = functional.scaled_mm(
        a, b.t(), a_scales, rows, b_scales.view(1, -1), rows, output_dtype=dtype, use_fast_accum=not exact
    )
    return product


def check_float16(device: torch.device) -> None:
    """Refuse products in float16 where torch gives those of 8 bits in bfloat16 only (off Hopper, before it had both).

    Raises:
        UnsupportedError: a small product fails.
    """
    a, ones = torch.zeros(MULTIPLE, MULTIPLE, device=device).to(DTYPE), torch.ones(MULTIPLE, device=device)
    try:
        scaled_product(a, ones[:, None], a, ones, torch.float16, exact=False)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UnsupportedError(
            f"8-bit products for a model in float16: {reason}", "load it in bfloat16 (dtype), or leave compute out"
        ) from error


class CodesSource(WeightSource):
    """W as e4m3 codes. A subclass has them, and the scales [N] of their rows."""

    wants_codes = wants_gradient_codes = True

    def __init__(self, scales: Tensor, columns: Tensor, width: int, exact: bool) -> None:
        self._scales, self.columns, self._exact = scales, columns, exact
        self._ones = torch.ones(width, device=scales.device)

    def codes(self, across: bool) -> Tensor:
        """Return W's codes as [N, K], or as [K, N] if `across`."""
        raise NotImplementedError

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        codes, scales = _codes(x)
        y = scaled_product(codes, scales, self.codes(False), self._scales, x.dense.dtype, self._exact)
        return y if bias is None else y.add_(bias)

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        codes, scales = _codes(dy, self.columns)
        dx = scaled_product(codes, scales, self.codes(True), self._ones, dy.dense.dtype, self._exact)
        return dx if low_rank is None else dx.addmm_(low_rank.dya, low_rank.a)


class FP8Source(CodesSource):
    """W in 8 bits, resident in both layouts, or gathered and turned."""

    def __init__(self, weight: FP8Weight, exact: bool) -> None:
        super().__init__(weight.scales, weight.columns, weight.width, exact)
        self.weight = weight

    def codes(self, across: bool) -> Tensor:
        if across:
            return self.weight.across
        assert self.weight.codes is not None
        return self.weight.codes


class WrittenCodesSource(CodesSource):
    """Weights that are written out as 8-bit codes for each product: of bitsandbytes' 4 bits, or of more bits for input
    gradients alone.

    Args:
        weights: one below the other; blocks of `Params4bit` cross no row.
    """

    def __init__(self, weights: Sequence[Any], exact: bool) -> None:
        self._weights = [NF4Weight.of(weight) if is_nf4(weight) else weight for weight in weights]
        self._rows, self._width = [weight.shape[0] for weight in self._weights], self._weights[0].shape[1]
        scales = [row_scales(weight) for weight in weights]
        self._inverse = [1 / each for each in scales]
        whole = torch.cat(scales)
        super().__init__(whole, whole.bfloat16(), self._width, exact)

    def codes(self, across: bool) -> Tensor:
        shape = (sum(self._rows), self._width)
        whole = torch.empty(shape[::-1] if across else shape, dtype=DTYPE, device=self._scales.device)
        parts = whole.split(self._rows, 1 if across else 0)
        for weight, inverse, part in zip(self._weights, self._inverse, parts, strict=True):
            if isinstance(weight, NF4Weight):
                write_codes(weight, inverse, part, across)
            else:
                assert across
                write_codes_across(dense_weight(weight), inverse, part)
        return whole


class BackwardSource(WeightSource):
    """W as codes for input gradients; the forward multiplies it as it is, or other codes.

    Args:
        plain: gives the forward.
        coded: gives the input gradient.
    """

    def __init__(self, plain: WeightSource, coded: WeightSource) -> None:
        self.plain, self.coded, self.columns = plain, coded, coded.columns
        self.wants_gradient_codes = coded.wants_gradient_codes

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        return self.plain.forward(x, bias)

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        return self.coded.input_grad(dy, low_rank)


def _codes(x: Activation, columns: Tensor | None = None) -> RowCodes:
    """Return x's codes, made by whoever made x, or now."""
    return quantise_rows(x.dense, columns) if x.codes is None else x.codes
