"""The Triton kernels: compiled on a GPU, interpreted on the CPU, and cross-compiled for cards that aren't here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.interpreted import check_interpreted
from support.marks import needs_triton

TESTS = Path(__file__).parents[1]
NAMES = (
    "rms_norm",
    "residual",
    "adapter_gradients",
    "glu",
    "rope",
    "cross_entropy",
    "attention",
    "norms",
    "cast_copies",
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    from support.kernel_checks import CHECKS

    CHECKS[name]("cuda", dtype)


@needs_triton
def test_interpreted() -> None:
    check_interpreted("kernel_checks.py", NAMES)


def test_files_of_operations_can_be_imported_without_triton() -> None:
    script = """if True:
        import importlib, pkgutil, sys
        sys.modules["triton"] = None
        import pronghorn.kernels
        for module in pkgutil.iter_modules(pronghorn.kernels.__path__, "pronghorn.kernels."):
            importlib.import_module(module.name)
        """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def kernels() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Each kernel in its largest form: function, types of its arguments, compile-time values, warps."""
    from benchmarks import sm_clock
    from pronghorn.kernels import (
        adapter_gradients,
        attention,
        cast_copies,
        cross_entropy,
        glu,
        norms,
        residual,
        rms_norm,
        rope,
    )

    x, wide, count, real = "*bf16", "*fp32", "i32", "fp32"
    norm = {"x_ptr": x, "w_ptr": x, "y_ptr": x, "r_ptr": wide, "H": count, "eps": real, "offset": real}
    norm |= {"codes_ptr": x, "scales_ptr": wide, "columns_ptr": x}  # which nobody reads here
    norm |= dict.fromkeys(("x_stride", "y_stride", "dy_stride", "dx_stride"), count)
    norm |= {"dy_ptr": x, "more_ptr": wide, "dx_ptr": x, "dw_ptr": wide, "T": count, "programs": count}
    add = {
        **dict.fromkeys(("y_ptr", "xa_ptr", "b_ptr"), x),
        "x_ptr": wide,
        "out_ptr": wide,
        "scale": real,
        "multiplier": real,
    }
    add |= dict.fromkeys(("T", "N"), count)
    sums = dict.fromkeys(("dya_parts_ptr", "db_parts_ptr", "db_ptr"), wide) | {"dya_ptr": x, "both_ptr": x}
    sums |= dict.fromkeys(("T", "N", "blocks", "chunks0", "chunks1", "chunks2"), count)
    sums |= {"scale": real}
    gate = {"gu_ptr": x, "a_ptr": x, "da_ptr": x, "dgu_ptr": x, "WIDTH": count}
    gate |= {"xa_ptr": x, "b_ptr": x, "scale": real} | {"T": count}
    turn = dict.fromkeys(("qkv_ptr", "q_ptr", "k_ptr", "cos_ptr", "sin_ptr", "qw_ptr", "kw_ptr"), x)
    turn |= {"dqkv_ptr": x, "dw_ptr": wide, "eps": real, "offset": real}
    turn |= dict.fromkeys(("T", "stride", "q_stride", "k_stride", "q_heads", "k_heads"), count)
    loss = {
        "y_ptr": x,
        "target_ptr": "*i64",
        "loss_ptr": wide,
        "V": count,
        "stride": count,
        "ignore": count,
        "cap": real,
    }
    attend = dict.fromkeys(
        ("q_ptr", "k_ptr", "v_ptr", "sinks_ptr", "out_ptr", "do_ptr", "dq_ptr", "dk_ptr", "dv_ptr"), x
    )
    attend |= {"lse_ptr": wide, "delta_ptr": wide, "tiles_ptr": "*i32", "scale": real, "unit": real}
    attend |= dict.fromkeys(("T", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "out_row"), count)
    attend |= dict.fromkeys(("grad_row", "group", "window"), count)
    tile = {"WINDOW": True, "D": 128, "ROWS": 64}
    heads = {"NORM": True, "Q": 64, "K": 8, "HALF": 64}
    return {
        "cast copies": (
            cast_copies._copy,
            {"table_ptr": "*i64", "N": count, "parts": count},
            {
                "SOURCE": cast_copies.TYPES[torch.float32],
                "TARGET": cast_copies.TYPES[torch.bfloat16],
                "BLOCK": cast_copies.BLOCK,
            },
            4,
        ),
        "rms_norm": (rms_norm._forward, norm, {"CODES": False, "BLOCK": 8192}, 16),
        "rms_norm, sums": (
            rms_norm._sum,
            {"parts_ptr": wide, "dw_ptr": x, "N": count, "H": count},
            {"ROWS": rms_norm.SUM_ROWS, "COLS": rms_norm.SUM_COLS},
            4,
        ),
        **{
            f"rms_norm backward, {block}, {stream}, {product}": (
                rms_norm._backward,
                {**norm, **dict.fromkeys(("x_ptr", "more_ptr", "dx_ptr"), stream), "dy_ptr": product},
                {"WEIGHT": True, "MORE": True, "CODES": False, "STAGES": rms_norm.stages(block, read), "BLOCK": block},
                16,
            )
            for block in (2048, 4096, 8192)
            for stream, product, read in ((x, x, 6), (wide, x, 10), (wide, wide, 12))
        },
        "clock": (sm_clock._read, {"out_ptr": "*i64"}, {"MOST": 132}, 1),
        **{
            f"residual, {kind}": (
                residual._add,
                {**add, **dict.fromkeys(("xa_ptr", "b_ptr"), kind)},
                {"RANK": 128, **low_rank(residual.TILE, 128)},
                residual.TILE[2],
            )
            for kind in (x, wide)
        },
        "residual, no adapter": (
            residual._add,
            add,
            {"RANK": 0, **low_rank(residual.TILE, 16)},
            residual.TILE[2],
        ),
        **parts_of_adapters_gradients([(256, 4, 2, 32)]),
        "adapters' gradients, sums": (
            adapter_gradients._sums,
            sums,
            {"ADAPTERS": 3, "RANK": 32, "BOTH": True, "TOGETHER": 16, "BLOCK": 512},
            4,
        ),
        "glu": (glu._forward, gate, {"GELU": True, "BLOCK": 1024}, 4),
        **{
            f"glu, ranks {rank}, {kind}": (
                glu._forward_with_low_rank,
                {**gate, **dict.fromkeys(("gu_ptr", "xa_ptr", "b_ptr", "a_ptr"), kind)},
                {"GELU": True, "GATE": rank, "UP": rank, **low_rank(glu.tile(rank, bytes_), rank)},
                glu.tile(rank, bytes_)[2],
            )
            for rank in (16, 32, 64, 128)
            for kind, bytes_ in ((x, 2), (wide, 4))
        },
        "glu backward": (glu._backward, gate, {"GELU": True, "BLOCK": 1024}, 4),
        **{
            f"rope, even {even}, {turned} pairs": (
                rope._forward,
                turn,
                {"NORM": True, "EVEN": even, "Q_BLOCKS": 5, "BLOCKS": 6, "TOKENS": 1, "HEADS": 8, "HALF": 64}
                | {"TURNED": turned},
                2,
            )
            for even, turned in ((True, 64), (False, 64), (False, 48))
        },
        **{
            f"rope backward, {turned} pairs": (rope._backward, turn, {**heads, "WEIGHT": True, "TURNED": turned}, 4)
            for turned in (64, 48)
        },
        "rope backward, wide": (
            rope._backward,
            turn,
            {**heads, "WEIGHT": True, "Q": 32, "K": 4, "HALF": 256, "TURNED": 256},
            16,
        ),
        "attention": (attention._forward, attend, {**tile, "SINK": True, "COLS": 32}, 4),
        "attention, queries": (attention._backward_queries, attend, {**tile, "COLS": 32}, 4),
        "attention, keys": (attention._backward_keys, attend, {**tile, "COLS": 64}, 4),
        **{
            f"norms of {kind}": (
                norms._sums,
                {"table_ptr": "*i64", "sums_ptr": wide, "N": count, "parts": count},
                {"TYPE": kind, "BLOCK": norms.BLOCK},
                4,
            )
            for kind in norms.TYPES.values()
        },
        **{
            f"cross-entropy, {lanes} lanes, {dtype}": (
                cross_entropy._kernel,
                {**loss, "y_ptr": dtype},
                {"CAP": True, "STEP": 8, "LANES": lanes},
                warps,
            )
            for dtype in (x, wide)
            for lanes, warps in (
                (cross_entropy.LANES, cross_entropy.WARPS),
                (2 * cross_entropy.LANES, 4 * cross_entropy.WARPS),
            )
        },
    }


def low_rank(tile: tuple[int, int, int], rank: int) -> dict[str, int]:
    """The compile-time values of a kernel with a low-rank product on the way."""
    rows, cols, _ = tile
    return {"R": rank, "ROWS": rows, "COLS": cols}


def parts_of_adapters_gradients(
    tiles: list[tuple[int, int, int, int]],
) -> dict[str, tuple[Any, dict[str, str], dict[str, Any], int]]:
    """As `kernels`: columns, warps, stages and padded rank, with and without dy's copy."""
    from pronghorn.kernels.adapter_gradients import _parts

    types = dict.fromkeys(("dy_ptr", "b_ptr", "xa_ptr", "both_ptr"), "*bf16")
    types |= {"dya_ptr": "*fp32", "db_ptr": "*fp32"}
    types |= {name: "i32" for name in _parts.arg_names if name not in types}
    return {
        f"adapters' gradients, {cols} columns, {both}": (
            _parts,
            types,
            {"ADAPTERS": 3, "RANK": rank, "R": rank, "BOTH": both, "TOKENS": 64, "COLS": cols, "STAGES": stages},
            warps,
        )
        for cols, warps, stages, rank in tiles
        for both in (False, True)
    }


def of_hopper() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], int]]:
    """As `kernels`: what is larger there, or runs there only."""
    from pronghorn.kernels.adapter_gradients import tile

    tiles = [(tile(width, rank), rank) for width, rank in ((4096, 16), (28672, 32))]
    return parts_of_adapters_gradients([(each.cols, each.warps, each.stages, rank) for each, rank in tiles])


@needs_triton
def test_numbers_of_tokens_share_a_compiled_kernel() -> None:
    """Rows of 16, 17 and 1 tokens run the same code: one more compiled in the midst of a training would be a pause."""
    from pronghorn.kernels import glu, residual, rope

    for kernel in (glu._forward_with_low_rank, residual._add, rope._forward):
        assert {each.name for each in kernel.params if each.do_not_specialize} == {"T"}


ALIGNED = {
    "H",
    "T",
    "N",
    "V",
    "WIDTH",
    "stride",
    "q_stride",
    "k_stride",
    "dy_row",
    "start0",
    "start1",
    "start2",
    "end0",
    "end1",
    "end2",
    "q_row",
    "k_row",
    "v_row",
    "out_row",
    "grad_row",
}


@needs_triton
@pytest.mark.parametrize(
    ("capability", "kilobytes", "forms"),
    [
        (90, 227, "one of each kernel"),
        *(
            pytest.param(*card, "all", marks=pytest.mark.slow)
            for card in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99))
        ),
    ],
)
def test_compiled_for_every_card(capability: int, kilobytes: int, forms: str) -> None:
    """From Ampere to Blackwell, within the shared memory that each has for a block."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    cases = list((kernels() | (of_hopper() if capability == 90 else {})).items())
    if forms != "all":
        cases = list({case[1][0]: case for case in cases}.values())  # the last, which is the largest
    for name, (kernel, types, constants, warps) in cases:
        signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
        places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
        # as tensors lie: what is aligned may be loaded ahead into shared memory
        aligned = [each for each in signature if types.get(each, "").startswith("*") or each in ALIGNED]
        attributes = {(kernel.arg_names.index(each),): [["tt.divisibility", 16]] for each in aligned}
        source = ASTSource(kernel, signature, places, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert compiled.metadata.shared <= kilobytes * 1024, f"{name}: {compiled.metadata.shared} bytes"
        assert ".entry" in compiled.asm["ptx"]
