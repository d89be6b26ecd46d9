"""Products in 8 bits: exact on what they are given, and layers whose frozen weights multiply so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit

from pronghorn.kernels.nf4 import NF4Weight, write_out
from pronghorn.kernels.quantise import quantise_rows
from pronghorn.models.lora import add_lora
from pronghorn.precision.fp8 import FP8Source, FP8Weight, NF4CodesSource
from pronghorn.precision.source import Activation, LowRankGrad
from support.tiny import tiny_model


def sources() -> list[tuple[str, Any, torch.Tensor]]:
    """Each kind of source with the weight that it stands for, in float64."""
    weights = [torch.randn(32, 64) * 0.02, torch.randn(16, 64)]
    dense = FP8Weight.of(weights)
    packed = [Params4bit(weight, quant_type="nf4").to("cpu") for weight in weights]
    written = [torch.empty(weight.shape) for weight in weights]
    for weight, out in zip(packed, written, strict=True):
        write_out(NF4Weight.of(weight), out)
    from_four = NF4CodesSource(packed, True)
    codes = from_four._codes(False).double()
    assert torch.equal(from_four._codes(True).double(), codes.t())
    meant = codes * from_four._scales.double()[:, None]
    assert ((meant - torch.cat(written)).abs() <= torch.cat(written).abs() * 2**-4 + 1e-4).all()
    return [("resident", FP8Source(dense, True), dense.dequantise().double()), ("from NF4", from_four, meant)]


@pytest.mark.parametrize("index", [0, 1])
def test_products_are_exact_on_their_operands(index: int) -> None:
    _, source, weight = sources()[index]
    x, dy = torch.randn(7, 64).bfloat16(), torch.randn(7, 48).bfloat16()
    codes, scales = quantise_rows(x)
    bias = torch.randn(48).bfloat16()
    exact = (codes.double() * scales.double()) @ weight.t()
    assert ((source.forward(Activation(x), None).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert torch.equal(source.forward(Activation(x), bias), source.forward(Activation(x), None) + bias)
    assert torch.equal(source.forward(Activation(x, codes, scales), None), source.forward(Activation(x), None))

    by_columns = source._columns.float()
    codes, scales = quantise_rows(dy, by_columns)
    exact = (codes.double() * scales.double()) @ (weight / by_columns.double()[:, None])
    got = source.input_grad(Activation(dy), None)
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()
    given = LowRankGrad(torch.randn(7, 4).bfloat16(), torch.randn(4, 64).bfloat16(), None)
    added = source.input_grad(Activation(dy), given).double()
    assert ((added - exact - given.dya.double() @ given.a.double()).abs() <= added.abs() * 2**-7 + 0.05).all()


def adapted(family: str) -> Any:
    model = add_lora(tiny_model(family).bfloat16(), r=4, lora_alpha=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return model.train()
