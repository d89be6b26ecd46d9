"""Kernels of products in 8-bit integers: on a GPU, interpreted on the CPU, and cross-compiled."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels import int8, nf4_int8
from support import int8_checks
from support.compiled import compiled
from support.interpreted import check_interpreted
from support.marks import needs_triton


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", int8_checks.CHECKS)
def test_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    int8_checks.CHECKS[name]("cuda", dtype)


@needs_triton
def test_interpreted() -> None:
    check_interpreted("int8_checks.py", tuple(int8_checks.CHECKS), "float16")  # which has no product of bfloat16


@needs_triton
@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [
        (90, 227),
        *(
            pytest.param(*card, marks=pytest.mark.slow)
            for card in ((80, 163), (86, 99), (89, 99), (100, 227), (120, 99))
        ),
    ],
)
def test_compiled_for_every_card_with_8_bits(capability: int, kilobytes: int) -> None:
    for tma in (False, True) if capability == 90 else (False,):
        bm, bn, bk, stages, warps = int8.BY_TMA if tma else int8.IN_PLACE
        tile = {"TMA": tma, "WHOLE": True, "BM": bm, "BN": bn, "BK": bk, "TOGETHER": int8.TOGETHER}
        left, right = (f"tensordesc<i8[{rows},{bk}]>" if tma else "*i8" for rows in (bm, bn))
        types = {"a": left, "b": right, "c_ptr": "*bf16", "a_scales_ptr": "*fp32", "b_scales_ptr": "*fp32"}
        made = compiled(int8._product, tile, warps, capability, stages, **types)
        assert made.metadata.shared <= kilobytes * 1024
        assert ("wgmma" if capability == 90 else "mma") in made.asm["ptx"] and ".s8" in made.asm["ptx"]
        assert ("cp.async.bulk.tensor" in made.asm["ptx"]) is tma
        if capability == 90:  # two programs a multiprocessor
            assert 2 * made.metadata.shared <= kilobytes * 1024
    for setting in int8.SETTINGS if capability == 90 else (int8.ELSEWHERE,):
        for factors in ("*bf16", "*fp32"):
            parts = int(setting.columns) // int8.GROUP // setting.groups if setting.passes == 1 else 0
            constants = {"PARTS": parts, "GROUPS": setting.groups, "ROWS": setting.rows, "GROUP": int8.GROUP}
            types = {"factors_ptr": factors, "codes_ptr": "*i8"}
            made = compiled(int8._rotated, constants, setting.warps, capability, **types)
            assert made.metadata.shared <= kilobytes * 1024, setting
    numbers = dict.fromkeys(("table_ptr", "levels_ptr", "outer_ptr", "offset_ptr", "factors_ptr"), "*fp32")
    types = {**numbers, "packed_ptr": "*u8", "absmax_ptr": "*u8", "h_ptr": "*bf16", "out_ptr": "*i8"}
    for across, (rows, groups, warps) in ((False, nf4_int8.ALONG), (True, nf4_int8.ACROSS)):
        constants = {"ROWS": rows, "GROUPS": groups, "GROUP": int8.GROUP, "BLOCK": 64, "OUTER": 256, "ACROSS": across}
        made = compiled(nf4_int8._write_rotated, constants, warps, capability, **types)
        assert made.metadata.shared <= kilobytes * 1024


def test_a_channel_scaled_up_and_its_column_down_by_powers_of_two_changes_no_code() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    shift = torch.randint(-5, 6, (128,)).float().exp2()
    found = []
    for by in (torch.ones(128), shift):
        w = (weight.float() / by).bfloat16()
        factors = torch.linalg.vector_norm(w.float(), dim=0)
        found.append(int8.quantise_rotated((x.float() * by).bfloat16(), factors).codes)
    assert torch.equal(*found)


def test_rotating_both_operands_leaves_the_product_and_spreads_an_outlier() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 128), torch.randn(64, 128)
    h = int8.hadamard(x.device)
    assert torch.equal(h @ h, torch.eye(64))
    rotated = [(each.reshape(-1, 2, 64) @ h).reshape(each.shape) for each in (x, weight)]
    torch.testing.assert_close(rotated[0] @ rotated[1].t(), x @ weight.t(), rtol=1e-4, atol=1e-4)
    alone = torch.zeros(1, 64)
    alone[0, 7] = 8.0
    assert torch.equal((alone @ h).abs(), torch.ones(1, 64))
