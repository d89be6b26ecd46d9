"""4-bit weights written out: bitsandbytes' bits, and the 8-bit codes made of them."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn import Params4bit

from pronghorn.kernels.nf4 import NF4Weight, write_codes, write_codes_reference, write_out, write_out_reference
from pronghorn.kernels.quantise import DTYPE
from support.marks import needs_triton
from support.nf4 import dequantised


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
    expected = dequantised(parameter.data, parameter.quant_state)
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


@needs_triton
@pytest.mark.parametrize("capability", [90, *(pytest.param(card, marks=pytest.mark.slow) for card in (80, 89, 120))])
def test_compiled_for_other_cards(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pronghorn.kernels import nf4, quantise

    floats, bytes_ = (
        dict.fromkeys(("table_ptr", "levels_ptr", "outer_ptr", "offset_ptr", "inverse_ptr"), "*fp32"),
        "*u8",
    )
    numbers = dict.fromkeys(("count", "N", "K", "out_stride", "x_stride"), "i32")
    types = {**floats, **numbers, "packed_ptr": bytes_, "absmax_ptr": bytes_}
    cases = [(nf4._write_out, {**types, "out_ptr": "*bf16"}, {"HALF": 32, "BLOCKS": 64, "OUTER": 256})]
    if capability >= 89:  # e4m3 begins there
        tile = {"HALF": 32, "ROWS": 64, "BLOCKS": 1, "OUTER": 256, "ACROSS": True}
        rows = {"COLUMNS": True, "WHOLE": True, "BLOCK": 16384}
        of_rows = {**numbers, "x_ptr": "*bf16", "columns_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
        cases += [(nf4._write_codes, {**types, "out_ptr": "*fp8e4nv"}, tile), (quantise._rows, of_rows, rows)]
    for kernel, given, constants in cases:
        signature = {name: "constexpr" if name in constants else given[name] for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", capability, 32))
        assert ".entry" in compiled.asm["ptx"] and compiled.metadata.shared <= 99 * 1024
