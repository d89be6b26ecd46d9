"""transformers' experts with products in 8 bits, as `kernels.grouped_codes` states them and computed another way.

    y = q(x) q(W) + b        dx = q(dy) q'(W)ᵀ          q: to e4m3 and back, a scale a row of x, a column of W;
                                                      q': a scale a row of W [K, N]

Expert by expert, in float32, from the plain reference of `kernels.quantise`; W is read and quantised anew each time.
In 8-bit integers q is `kernels.int8`'s, of rotated rows, with one factor a column for the W of all experts.
LoRA's part is computed beside, from x as it is. The router's weights w multiply before the second product, y = (w a) W:
a row's codes don't depend on w, and dw = <dy Wᵀ, a> has the input gradient's operands, as in `moe.experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.grouped_codes import multiply_coded
from pronghorn.kernels.quantise import quantise_rows_reference
from pronghorn.layers.expert_codes import LentCodes
from pronghorn.layers.linears import products_dtype
from pronghorn.models.experts import low_rank_weights
from pronghorn.parity.distance import Distance, distance
from pronghorn.parity.quantised import (
    ROWS,
    dequantised,
    fast_sums,
    multiplied_rotated,
    random_rows,
    rotated_operands,
)
from pronghorn.precision.compute import Numbers, Rule
from pronghorn.precision.int8 import column_factors


@contextmanager
def quantised_experts(modules: Iterable[Any], rule: Rule) -> Iterator[None]:
    """Let frozen experts multiply in 8 bits while the block runs, by a forward of their instances' own.

    Args:
        rule: in what they multiply.
    """
    modules = list(modules)
    for module in modules:
        module.forward = partial(_output, module, rule)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _output(
    module: Any, rule: Rule, hidden_states: Tensor, top_k_index: Tensor | None = None,
    top_k_weights: Tensor | None = None, **named: Tensor,
) -> Tensor:  # fmt: skip
    """Compute what an experts module gives: hidden [T, H], indices and weights [T, K]; returns [T, H]."""
    index = named["router_indices"] if top_k_index is None else top_k_index
    routed = named["routing_weights"] if top_k_weights is None else top_k_weights
    dtype = products_dtype(hidden_states)
    with torch.autocast(hidden_states.device.type, enabled=False):
        x = hidden_states.to(dtype)
        out, parts = torch.zeros_like(x), list(low_rank_weights(module))
        of_columns = [_factors(module, weight) if Numbers.INT8 in rule else (None, None) for weight, *_ in parts]
        for e in index.unique().tolist():
            tokens, slots = (index == e).nonzero(as_tuple=True)
            h, y, w = x[tokens], x, routed[tokens, slots].unsqueeze(1).to(dtype)
            for number, (weight, adapter, bias) in enumerate(parts):
                dense = weight[e].detach() if module.is_transposed else weight[e].detach().t()
                y = _Multiply.apply(h, dense, rule, of_columns[number])
                if adapter is not None:
                    a, b = adapter.a[e].to(dtype), adapter.b[e].to(dtype)
                    y = y + adapter.scale * (h @ a.t()) @ b.t()
                if bias is not None:
                    y = y + (bias[e].to(dtype) if number == 0 else w * bias[e].to(dtype))
                if number == 0:
                    h = w * module._apply_gate(y)
            out = out.index_add(0, tokens, y)
        return out.to(hidden_states.dtype)


def _factors(module: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of x's columns and of dy's, from the weight of all experts."""
    whole = weight.detach() if module.is_transposed else weight.detach().mT
    return column_factors(whole.mT), column_factors(whole)


class _Multiply(torch.autograd.Function):
    """(x [T, K], W [K, N], its rule, factors of x's columns and of dy's or Nones) → y [T, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rule: Rule, factors: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.rule, ctx.factors = rule, factors
        if rule.forward is Numbers.DTYPE:
            return x @ weight.to(x.dtype)
        return _multiplied(x, weight.t(), rule.forward, factors[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _multiplied(dy, weight, ctx.rule.backward, ctx.factors[1]), None, None, None


def _multiplied(x: Tensor, weight: Tensor, numbers: Numbers, factors: Tensor | None) -> Tensor:
    """Return x Wᵀ [T, N] of x [T, K] and W [N, K] in 8 bits."""
    if numbers is Numbers.INT8:
        return multiplied_rotated(x, weight, factors)
    return (dequantised(x) @ dequantised(weight).t()).to(x.dtype)


def compared_experts(lent: LentCodes, name: str, fast: bool) -> list[Distance]:
    """Compare what both grouped products in 8 bits give with exact sums of the same operands: forward, where it is in
    8 bits, and input gradient, of random rows that go to all experts in turn."""
    compared, module = [], lent.module
    transposed: Any = module.is_transposed
    for codes, stored, what in zip(lent.codes, lent.weights, ("gate and up", "down"), strict=True):
        weight = (stored if transposed else stored.mT).detach()
        generator, dtype = torch.Generator().manual_seed(0), weight.dtype
        count, device = len(weight), weight.device
        offsets = torch.arange(1, count + 1, device=device, dtype=torch.int32) * max(ROWS // count, 1)
        owners = torch.arange(count, device=device).repeat_interleave(max(ROWS // count, 1)).tolist()
        for backward, side in ((False, weight.mT), (True, weight)):
            if (own := codes.side(backward)) is None:
                continue
            integers = own.factors is not None
            of_columns = column_factors(side) if integers else None
            size = side.shape[2]
            x = random_rows(size, generator, len(owners)).to(device, dtype)
            ours = multiply_coded(x, codes, offsets, dtype, transposed=backward)
            exact, plain = [], []
            for e in dict.fromkeys(owners):
                rows = [number for number, owner in enumerate(owners) if owner == e]
                if integers:  # whose sums go beyond float32's
                    left, right, factors = rotated_operands(x[rows], side[e], of_columns)
                    left, right = left.double(), right.double()
                else:
                    (left, x_scales), (right, w_scales) = map(quantise_rows_reference, (x[rows], side[e]))
                    left, right, factors = left.float(), right.float(), x_scales * w_scales.t()
                sums = left @ right.t()
                exact.append(sums * factors)
                plain.append((fast_sums(left, right.t()) if fast and not integers else sums) * factors)
            label = f"{name}.{what} ({'input gradient' if backward else 'forward'})"
            compared.append(distance(label, ours, torch.cat(plain).to(dtype), torch.cat(exact)))
    return compared
