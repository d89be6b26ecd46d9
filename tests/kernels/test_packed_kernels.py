"""The kernels of weights in few bits: compiled on a GPU, interpreted on the CPU, cross-compiled for other cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.kernels import fp8_blocks, nvfp4
from support.interpreted import check_interpreted
from support.marks import needs_triton

TESTS = Path(__file__).parents[1]
NAMES = ("nvfp4", "fp8_blocks")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    from support.packed_checks import CHECKS

    CHECKS[name]("cuda", dtype)


@needs_triton
def test_interpreted() -> None:
    check_interpreted("packed_checks.py", NAMES)


@needs_triton
@pytest.mark.matrix(4)
@pytest.mark.parametrize("capability", [75, 86, 90, 120])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_compiled_for_every_card(capability: int, dtype: str) -> None:
    """Cards without 8-bit numbers of their own, too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(("count", "N", "K", "rows", "columns", "across"), "i32")
    types |= {"codes_ptr": "*u8", "out_ptr": f"*{dtype}", "scale_ptr": "*fp32"}
    tile = {"ROWS": fp8_blocks.ROWS, "COLS": fp8_blocks.COLS}
    sizes = {"BYTES": nvfp4.BYTES, "GROUP": nvfp4.GROUP}
    kernels: list[tuple[Any, str, dict[str, Any]]] = [(fp8_blocks._write_out, "*fp32", tile)]
    kernels += [(nvfp4._write_out, "*u8", {**sizes, "DIVIDES": divides}) for divides in (False, True)]
    for kernel, scales, constants in kernels:
        own = {**types, "scales_ptr": scales}
        signature = {name: "constexpr" if name in constants else own[name] for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, places)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert ".entry" in compiled.asm["ptx"]


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4_is_what_its_publishers_multiply(divides: bool) -> None:
    scales = torch.tensor([[1.5, 0.25]]).to(torch.float8_e4m3fn)
    packed = torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F] * 2], dtype=torch.uint8)
    scale = torch.tensor([0.5 if divides else 2.0])
    codes = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6, 0] * 2)
    right = codes.view(2, 16) * torch.tensor([[3.0], [0.5]])
    weight = nvfp4.NVFP4Tensor([packed, scales, scale], (1, 32), torch.bfloat16, divides)
    assert torch.equal(weight.dequantise(), right.view(1, 32).bfloat16())
    assert torch.equal(weight.float() + 0, right.view(1, 32)) and weight.to(torch.float16).facts == (divides,)


def test_fp8_blocks_at_the_edges_are_cut_short() -> None:
    codes = torch.ones(3, 5).to(torch.float8_e4m3fn)
    weight = fp8_blocks.FP8Tensor([codes, torch.tensor([[1.0, 2, 3], [4, 5, 6]])], (3, 5), torch.float32, 2, 2)
    assert weight.dequantise().tolist() == [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]
    assert weight.stored_bytes == 15 + 24 and not weight.scales_rows
