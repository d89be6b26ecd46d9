"""The reference for products in 8 bits multiplies the very operands that layers do, by other code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.layers.weight_layout import GroupStorage
from pronghorn.parity import quantised
from pronghorn.parity.distance import relative_error
from pronghorn.parity.quantised import compared_products, quantised_products
from pronghorn.precision.compute import Compute
from pronghorn.precision.source import Activation
from support.tiny import in_4_bits, tiny_model


def group(base: str) -> list[Any]:
    """q, k and v of a tiny layer, with biases, frozen."""
    model = tiny_model("qwen2").to(torch.float16 if base == "fp16" else torch.bfloat16).requires_grad_(False)
    attention = (in_4_bits(model) if base == "nf4" else model).model.layers[0].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def product(linears: list[Any]) -> FusedLinear:
    dtype = torch.float16 if linears[0].weight.dtype is torch.float16 else torch.bfloat16
    return FusedLinear(GroupStorage(linears), dtype, Compute.FP8_EXACT.rule, exact=True)


@pytest.mark.parametrize("base", ["bf16", "fp16", "nf4"])
def test_outputs_and_the_input_gradient_are_those_of_the_product(base: str) -> None:
    """In the products' dtype; in float32 they are the sums that were rounded."""
    linears = group(base)
    linear = product(linears)
    x = torch.randn(2, 7, 64, dtype=linear.dtype)
    dys = [torch.randn(2, 7, each.out_features, dtype=linear.dtype) * 10.0**n for n, each in enumerate(linears)]
    y, _ = linear.forward(Activation(x.flatten(0, 1)))
    dx, _ = linear.input_grad(Activation(torch.cat(dys, -1).flatten(0, 1)), None)
    for dtype in (linear.dtype, torch.float32):
        given = x.to(dtype, copy=True).requires_grad_()
        with quantised_products([(linears, Compute.FP8_BOTH.rule)]):
            outputs = [each(given) for each in linears]
            torch.autograd.backward(outputs, [dy.to(dtype) for dy in dys])
        assert given.grad is not None and given.grad.dtype is dtype
        for ours, right in ((torch.cat(outputs, -1), y), (given.grad, dx)):
            error = relative_error(ours.flatten(0, 1).double(), right.double())
            assert error == 0 if dtype is linear.dtype else 0 < error < 2**-8


def test_linears_are_as_before_afterwards() -> None:
    linears, x = group("bf16"), torch.randn(3, 64).bfloat16()
    before = [each(x) for each in linears]
    with pytest.raises(ZeroDivisionError), quantised_products([(linears, Compute.FP8_BOTH.rule)]):
        assert not any(torch.equal(each(x), y) for each, y in zip(linears, before, strict=True))
        raise ZeroDivisionError
    assert all(torch.equal(each(x), y) for each, y in zip(linears, before, strict=True))
    assert not any("forward" in each.__dict__ for each in linears)


def test_an_input_given_again_is_multiplied_again() -> None:
    """As in a recomputation that stopped early, whose other outputs nobody took."""
    linears, x = group("bf16"), torch.randn(3, 64).bfloat16()
    with quantised_products([(linears, Compute.FP8_BOTH.rule)]):
        first = [linears[0](x), linears[1](x)]
        assert torch.equal(linears[0](x), first[0])
        other = linears[1](2 * x)
        assert torch.equal(linears[1](x), first[1]) and not torch.equal(other, first[1])


def test_sums_of_14_bits_are_allowed_where_they_are_asked_for_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", hidden_size=16384, num_hidden_layers=1, intermediate_size=64, vocab_size=16).bfloat16()
    linear = product([model.requires_grad_(False).model.layers[0].self_attn.q_proj])

    def fast(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, exact: bool) -> Tensor:
        sums = quantised.fast_sums(a.float(), b.float().t())
        return (sums * a_scales * b_scales).to(dtype)

    monkeypatch.setattr("pronghorn.precision.fp8.scaled_product", fast)
    worst = {mode: max(each.excess for each in compared_products(linear, "q", mode)) for mode in (True, False)}
    assert worst[True] <= 1 < worst[False], worst
