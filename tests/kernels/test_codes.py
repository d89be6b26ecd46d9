"""Kernels that write codes in 8 bits beside what they make: on a GPU, interpreted on the CPU, and cross-compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.kernels import glu, rms_norm
from pronghorn.kernels.quantise import RowCodes, quantise_rows
from support.interpreted import check_interpreted
from support.marks import needs_triton

NAMES = ("norm", "norm backward", "glu", "glu backward", "order")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    from support.codes_checks import CHECKS

    CHECKS[name]("cuda", dtype)


@needs_triton
def test_interpreted() -> None:
    check_interpreted("codes_checks.py", NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_references_give_the_codes_of_what_they_return(dtype: torch.dtype, nan_memory: None) -> None:
    x, dy, gate_up = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype), torch.randn(5, 128).to(dtype)
    weight, columns, wide = torch.rand(64), torch.rand(64) + 0.5, torch.rand(128) + 0.5
    made = RowCodes.like(x)

    def told(y: torch.Tensor, factors: torch.Tensor | None, made: RowCodes) -> bool:
        return all(torch.equal(a.float(), b.float()) for a, b in zip(made, quantise_rows(y, factors), strict=True))

    y, rstd = rms_norm.forward(x.float(), weight, 1e-5, 0.0, dtype, codes=made)
    assert y.dtype is dtype and told(y, None, made)
    dx, _ = rms_norm.backward(dy, x, weight, rstd, 0.0, True, codes=made, columns=columns)
    assert told(dx, columns, made)
    assert told(glu.forward(gate_up, "silu", made), None, made)
    made = RowCodes.like(gate_up)
    assert told(glu.backward_(dy, gate_up, "silu", False, made, wide), wide, made)


def kernels() -> dict[str, tuple[Any, dict[str, Any], int]]:
    """Each kernel with codes in its largest form: function, compile-time values, warps."""
    norms = {"CODES": True, "WEIGHT": True, "MORE": True}
    gated = {"GELU": True, "BLOCK": glu.CODES_BLOCK}
    return {
        "norm": (rms_norm._forward, {"CODES": True, "BLOCK": 8192}, 16),
        **{
            f"norm backward, {block}": (
                rms_norm._backward,
                {**norms, "STAGES": rms_norm.stages(block, 8), "BLOCK": block},
                16,
            )
            for block in (2048, 4096, 8192)
        },
        "glu": (glu._forward_codes, gated, glu.CODES_WARPS),
        "glu backward": (glu._backward_codes, gated, glu.CODES_WARPS),
    }


@needs_triton
@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [(90, 227), *(pytest.param(*card, marks=pytest.mark.slow) for card in ((89, 99), (100, 227), (120, 99)))],
)
def test_compiled_for_every_card_with_8_bits(capability: int, kilobytes: int) -> None:
    """From Ada to Blackwell, within a block's shared memory; a row is read again after all threads stored theirs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(
        ("x_ptr", "w_ptr", "y_ptr", "dy_ptr", "dx_ptr", "gu_ptr", "a_ptr", "da_ptr", "dgu_ptr"), "*bf16"
    )
    types |= {"r_ptr": "*fp32", "more_ptr": "*bf16", "dw_ptr": "*fp32", "eps": "fp32", "offset": "fp32"}
    types |= {"codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "columns_ptr": "*bf16"}
    for name, (kernel, constants, warps) in kernels().items():
        whole = {each: types.get(each, "i32") for each in kernel.arg_names}
        signature = {each: "constexpr" if each in constants else kind for each, kind in whole.items()}
        places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
        aligned = [i for i, each in enumerate(signature) if signature[each] not in ("constexpr", "fp32")]
        source = ASTSource(kernel, signature, places, {(i,): [["tt.divisibility", 16]] for i in aligned})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert compiled.metadata.shared <= kilobytes * 1024, f"{name}: {compiled.metadata.shared} bytes"
        assert "e4m3x2" in compiled.asm["ptx"], name
        if name.startswith("glu"):
            before, after = compiled.asm["ptx"].rsplit("bar.sync", 1)
            assert "evict_first" in before and "e4m3x2" in after and "st.global.v4" in before, name
