"""transformers' linears with products in 8 bits, as `precision.fp8` states them and computed another way.

    y = q(x) Wqᵀ + b        dx = q(dy · s_W) (Wq / s_W)        Wq = codes_W · s_W,  q: to e4m3 and back, a scale a row

Where the forward isn't in 8 bits, y is the linear's own; in 8-bit integers rows are rotated (`kernels.int8`).
The operands are quantised by the plain references of the kernels and then multiplied in float32; results have the
pass's dtype. W is read and quantised anew in each forward, so nothing is stale here. `compared_products` gives one
built product rows that need no other part of the model, so that its own error shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.fp8_blocks import has_own_codes
from pronghorn.kernels.int8 import quantise_rotated_reference
from pronghorn.kernels.nf4 import NF4Weight, write_codes_reference
from pronghorn.kernels.packed import PackedTensor
from pronghorn.kernels.quantise import DTYPE, quantise_rows_reference, weight_scales
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.layers.linears import products_dtype
from pronghorn.parity.distance import Distance, distance
from pronghorn.precision.compute import Numbers, Rule
from pronghorn.precision.int8 import column_factors, whole_weight
from pronghorn.precision.source import Activation

ROWS = 64
"""Random rows that a product is judged on."""
TOGETHER, DROPPED = 32, 10
"""Columns that tensor cores sum up at once, and the bits of float32 that their fast sums drop (Hopper keeps 14:
arXiv:2412.19437, section 3.3.2)."""


@contextmanager
def quantised_products(products: Sequence[tuple[Sequence[Any], Rule]]) -> Iterator[None]:
    """Let frozen linears multiply in 8 bits while the block runs, by a forward of their instances' own.

    Args:
        products: the base linears of each product, and in what it multiplies. Those of one product share an input, and
            the rows of their outputs' gradients, side by side, share a scale.
    """
    for linears, rule in products:
        product = _Product(linears, rule)
        for index, linear in enumerate(linears):
            linear.forward = partial(product.output, index)
    try:
        yield
    finally:
        for linears, _ in products:
            for linear in linears:
                del linear.forward


class _Product:
    """The linears of one input. The first that is called computes the outputs of all."""

    def __init__(self, linears: Sequence[Any], rule: Rule) -> None:
        self._linears, self._rule = linears, rule
        self._x: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, index: int, x: Tensor) -> Tensor:
        """Return the output of one linear."""
        if self._x is not x or index not in self._outputs:
            wide, integers = x.to(products_dtype(x)), Numbers.INT8 in self._rule
            if integers:
                weights = [whole_weight([linear.weight for linear in self._linears])]
            else:
                weights = [part for pair in quantised_weights(self._linears) for part in pair]
            own = self._linears if self._rule.forward is Numbers.DTYPE else None  # they multiply x themselves
            outputs = _Multiply.apply(wide.flatten(0, -2), own, integers, *weights)
            if integers and own is None:
                outputs = outputs[0].split([linear.out_features for linear in self._linears], 1)
            self._x, self._outputs = x, dict(enumerate(outputs))
        y = self._outputs.pop(index)
        if not self._outputs:
            self._x = None
        y, bias = y.view(*x.shape[:-1], -1), self._linears[index].bias
        return y if bias is None or self._rule.forward is Numbers.DTYPE else y + bias.to(y.dtype)


class _Multiply(torch.autograd.Function):
    """(x [T, K], linears that multiply x themselves or None, whether in integers, weights) → y_i [T, N_i] of each, with
    the bias where a linear gives it; in integers y [T, N] of all without a bias.

    Weights are codes [N_i, K] and scales [N_i] of each, in integers W [N, K] of all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Sequence[Any] | None, integers: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*weights)
        ctx.integers = integers
        if own is not None:
            return tuple(type(linear).forward(linear, x) for linear in own)
        if integers:
            return (multiplied_rotated(x, *weights),)
        operand = dequantised(x)
        with torch.autocast(x.device.type, enabled=False):
            pairs = zip(weights[::2], weights[1::2], strict=True)
            return tuple((operand @ (codes.float() * scales[:, None]).t()).to(x.dtype) for codes, scales in pairs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        weights, dy = ctx.saved_tensors, torch.cat(dys, 1)
        if ctx.integers:
            dx = multiplied_rotated(dy, weights[0].t().contiguous())
        else:
            with torch.autocast(dy.device.type, enabled=False):
                codes, scales = torch.cat(weights[::2]), torch.cat(weights[1::2])
                dx = (dequantised(dy, scales) @ codes.float()).to(dy.dtype)
        return dx, None, None, *[None] * len(weights)


def multiplied_rotated(x: Tensor, weight: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return x Wᵀ [T, N] of x [T, K] and W [N, K] by 8-bit integers of rotated rows, with W's own factors or those
    given."""
    with torch.autocast(x.device.type, enabled=False):
        left, right, factors = rotated_operands(x, weight, factors)
        return ((left @ right.t()) * factors).to(x.dtype)


def rotated_operands(x: Tensor, weight: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of x [T, K] and of W [N, K] in float32, and what their product is multiplied by [T, N].

    Args:
        factors: of columns [K]; None for W's own.
    """
    factors = column_factors(weight).to(x.dtype) if factors is None else factors
    codes, scales = quantise_rotated_reference(x, factors)
    divided = (weight * (1 / factors.float())).to(x.dtype)
    of_weight, weight_scales = quantise_rotated_reference(divided, torch.ones_like(factors))
    return codes.float(), of_weight.float(), scales * weight_scales.t()


def dequantised(x: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return what the codes of x [T, K] stand for, or of x · columns, in float32."""
    codes, scales = quantise_rows_reference(x, columns)
    return codes.float() * scales


def quantised_weights(linears: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """Return (codes e4m3 [N_i, K], scales float32 [N_i]) of each frozen weight of one product: a checkpoint's own,
    where all of them have codes with a scale a row."""
    weights = [linear.weight for linear in linears]
    if all(map(has_own_codes, weights)):
        return [(weight.parts[0], weight.row_scales()) for weight in weights]
    return [_quantised(weight) for weight in weights]


def _quantised(weight: Any) -> tuple[Tensor, Tensor]:
    """Quantise a weight by rows, in 16 bits or written out of fewer."""
    if hasattr(weight, "quant_state"):
        packed = NF4Weight.of(weight)
        scales = packed.row_scales()
        codes = torch.empty(packed.shape, dtype=DTYPE, device=scales.device)
        write_codes_reference(packed, 1 / scales, codes, across=False)
        return codes, scales
    weight = weight.dequantise() if isinstance(weight, PackedTensor) else weight.detach()
    scales = weight_scales(weight.abs().amax(1))
    return (weight.float() * (1 / scales)[:, None]).to(DTYPE), scales


def compared_products(linear: FusedLinear, name: str, fast: bool) -> list[Distance]:
    """Compare what a product in 8 bits gives with exact sums of the same operands: the forward, where it is in 8 bits,
    and the input gradient.

    Plain is these sums rounded to the products' dtype, and of so many bits as tensor cores' own have where they are
    `fast`.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = linear.bases[0].in_features, sum(linear.widths)
    x, dy = (random_rows(size, generator).to(linear.bases[0].weight.device, linear.dtype) for size in sizes)
    compared = []
    for what, numbers, given in (("forward", linear.rule.forward, x), ("input gradient", linear.rule.backward, dy)):
        if numbers is Numbers.DTYPE:
            continue
        forward, rows = given is x, Activation(given)
        ours = linear.source.forward(rows, None) if forward else linear.source.input_grad(rows, None)
        left, right, factors = _operands(linear.bases, given, forward, numbers)
        exact = (left @ right) * factors
        rounded = fast_sums(left, right) * factors if fast and numbers is Numbers.E4M3 else exact
        compared.append(distance(f"{name} ({what})", ours, rounded.to(linear.dtype), exact))
    return compared


def _operands(bases: Sequence[Any], given: Tensor, forward: bool, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of rows and of W, transposed as they are multiplied, and what the product is multiplied by."""
    if numbers is Numbers.INT8:
        whole = whole_weight([base.weight for base in bases])
        left, right, factors = rotated_operands(given, whole if forward else whole.t().contiguous())
        return left.double(), right.double().t(), factors  # sums of integers go beyond float32's
    pairs = quantised_weights(bases)
    codes, scales = torch.cat([each for each, _ in pairs]).float(), torch.cat([each for _, each in pairs])
    rows, factors = quantise_rows_reference(given, None if forward else scales)
    left = rows.float()  # numbers of 4 bits: right in TF32, too
    return (left, codes.t(), factors * scales) if forward else (left, codes, factors)


def random_rows(size: int, generator: torch.Generator, rows: int = ROWS) -> Tensor:
    """Draw rows, some columns and rows of which are far larger than others, as activations have them."""
    spread = torch.randn(size, generator=generator).exp() * torch.randn(rows, 1, generator=generator).exp()
    return torch.randn(rows, size, generator=generator) * spread


def fast_sums(left: Tensor, right: Tensor) -> Tensor:
    """Multiply as tensor cores do by fast accumulation: the sum keeps 14 bits after every 32 columns."""
    total = left.new_zeros(len(left), right.shape[1])
    for columns, rows in zip(left.split(TOGETHER, 1), right.split(TOGETHER), strict=True):
        total = ((total + columns @ rows).view(torch.int32) >> DROPPED << DROPPED).view(torch.float32)
    return total
