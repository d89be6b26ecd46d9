"""Kernels that write codes in 8 bits beside what they make: on a GPU, interpreted on the CPU, and cross-compiled."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from pronghorn.kernels import glu, quantise, rms_norm
from pronghorn.kernels.quantise import RowCodes, quantise_rows
from support.compiled import compiled
from support.interpreted import check_interpreted
from support.marks import needs_triton

NAMES = ("norm", "norm backward", "glu", "glu backward", "across", "order")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # float32 is refused in 8 bits
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    from support.codes_checks import CHECKS

    CHECKS[name]("cuda", dtype)


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_interpreted(dtype: str) -> None:
    check_interpreted("codes_checks.py", NAMES, dtype)


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
        "across": (quantise._codes_across, {"ROWS": 64, "COLS": 64}, 4),
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
    for name, (kernel, constants, warps) in kernels().items():
        made = compiled(kernel, constants, warps, capability)
        assert made.metadata.shared <= kilobytes * 1024, f"{name}: {made.metadata.shared} bytes"
        assert "e4m3x2" in made.asm["ptx"], name
        if name.startswith("glu"):
            before, after = made.asm["ptx"].rsplit("bar.sync", 1)
            assert "evict_first" in before and "e4m3x2" in after and "st.global.v4" in before, name


@needs_triton
@pytest.mark.matrix(3)
@pytest.mark.parametrize("block", [256, 4096, 8192])
@pytest.mark.parametrize(("stream", "products"), [("*bf16", "*bf16"), ("*fp32", "*bf16"), ("*fp32", "*fp32")])
def test_sums_of_a_row_are_in_the_order_that_they_have_without_codes(stream: str, products: str, block: int) -> None:
    """Or its norm would have other bits where it is computed again for an adapter alone. A sum's order is the layout of
    its numbers over threads, and stores of 8 bits would like twice as many a thread."""
    warps = rms_norm._warps(block)
    for kernel, constants in (
        (rms_norm._forward, {}),
        (rms_norm._backward, {"WEIGHT": False, "MORE": False, "STAGES": 1}),
        (rms_norm._backward, {"WEIGHT": True, "MORE": True, "STAGES": 3}),
    ):
        types = {"x_ptr": stream, "dx_ptr": stream, "more_ptr": stream, "y_ptr": products, "dy_ptr": products}
        layouts = []
        for codes in (False, True):
            text = compiled(kernel, {"CODES": codes, "BLOCK": block, **constants}, warps, 90, **types).asm["ttgir"]
            first = re.search(rf"\}}\) : \(tensor<{block}xf32, (#\w+)>\)", text)
            assert first is not None, text
            layouts.append(re.search(rf"^{first[1]} = (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]
        assert layouts[0] == layouts[1]
