"""4-bit weights written out: bitsandbytes' bits, and the 8-bit codes made of them."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit

from pronghorn.kernels.nf4 import NF4Weight, write_codes, write_codes_reference, write_out, write_out_reference
from pronghorn.kernels.quantise import DTYPE


def made(rows: int, cols: int, nested: bool, device: str = "cpu", spread: float = 1.0) -> Params4bit:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 0.02
    weight[0] *= spread
    return Params4bit(weight, quant_type="nf4", compress_statistics=nested).to(device)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (3, 192), (1, 64), (1000, 128), (7, 96), (513, 4160)])
def test_bits_are_those_of_bitsandbytes(nested: bool, shape: tuple[int, int], device: str) -> None:
    parameter = made(*shape, nested, device)
    expected = dequantize_4bit(parameter.data, parameter.quant_state)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.full(shape, float("nan"), dtype=dtype, device=device)
        write_out(NF4Weight.of(parameter), out)
        if dtype is torch.float32 or device == "cpu":
            assert torch.equal(out, expected.to(dtype))
        again = torch.empty_like(out)
        write_out_reference(NF4Weight.of(parameter), again)
        assert torch.equal(out, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", [(40, 128), (70, 4160)])
def test_codes_stand_for_the_weight(across: bool, shape: tuple[int, int], device: str) -> None:
    weight = NF4Weight.of(made(*shape, True, device, spread=1e4))
    values = torch.empty(weight.shape, device=device)
    write_out(weight, values)
    scales = weight.row_scales()
    assert torch.equal(scales, scales.bfloat16().float())
    out = torch.empty(weight.shape[::-1] if across else weight.shape, dtype=DTYPE, device=device)
    write_codes(weight, 1 / scales, out, across)
    codes = out.float().t() if across else out.float()
    assert codes.abs().amax(1).min() > 400 and codes.isfinite().all()  # each row uses the range
    again = torch.empty_like(out)
    write_codes_reference(weight, 1 / scales, again, across)
    assert torch.equal(out.float(), again.float())
    error = (codes * scales[:, None] - values).abs()
    assert (error <= values.abs() * 2**-4 + scales[:, None] * 2**-10).all()
