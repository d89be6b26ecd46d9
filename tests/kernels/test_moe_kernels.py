"""The Triton kernels of MoE layers: compiled on a GPU, interpreted on the CPU, cross-compiled for other cards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.interpreted import check_interpreted
from support.marks import needs_triton

TESTS = Path(__file__).parents[1]
NAMES = ("moe_route", "moe_rows", "moe_glu", "grouped_gemm", "mxfp4", "grouped_fp8", "grouped_integers")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    from support.moe_checks import CHECKS

    CHECKS[name]("cuda", dtype)


@needs_triton
def test_interpreted() -> None:
    check_interpreted("moe_checks.py", NAMES)


def kernels() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], int, int]]:
    """Each kernel in its largest form: function, types of its arguments, compile-time values, warps, stages."""
    from pronghorn.kernels import grouped_gemm, moe_glu, moe_route, moe_rows, mxfp4

    names = "x", "w", "x_ptr", "y_ptr", "w_ptr", "h_ptr", "a_ptr", "d_ptr", "dh_ptr", "dw_ptr", "codes_ptr"
    types = dict.fromkeys(names, "*bf16") | {"scales_ptr": "*fp32"}
    types |= {
        "bias_ptr": "*bf16",
        "g_ptr": "*fp32",
        "ids_ptr": "*i64",
        "alpha": "fp32",
        "limit": "fp32",
        "scale": "fp32",
    }
    whole = ("rows", "experts", "slots", "tokens", "inverse", "places", "offsets", "x_rows", "y_rows", "counts", "upto")
    types |= {f"{name}_ptr": "*i32" for name in whole}
    types |= dict.fromkeys(("WIDTH", "N", "K", "M", "S", "blocks", "w_expert", "w_k", "w_n"), "i32")
    experts, gate = {"E": 128, "EXPERTS": 128}, {"KIND": 2, "BIAS": True}
    sort = (types, {**experts, "BLOCK": 128}, 8, 3)
    found = {
        "gather": (moe_rows._gather, types, {"K": 8, "BLOCK": 4096}, 16, 3),
        "combine": (moe_rows._combine, types, {"K": 8, "WEIGHT": True, "BIAS": True, "BLOCK": 1024}, 4, 3),
        "gate": (moe_glu._forward, types, {**gate, "BLOCK": 1024}, 4, 3),
        "gate backward": (moe_glu._backward, types, {**gate, "ACTIVATED": True, "CODES": False, "BLOCK": 256}, 2, 3),
        "count": (moe_route._count, *sort),
        "place": (moe_route._place, *sort),
    }
    packed = {"blocks_ptr": "*u8", "scales_ptr": "*u8", "out_ptr": "*bf16", "count": "i32"}
    found["4 bits written out"] = mxfp4._write_out, {**types, **packed}, {"ROWS": mxfp4.ROWS}, 8, 3
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        wide = {each: f"*{name}" if kind == "*bf16" else kind for each, kind in types.items()}
        for columns in (16, 2048) if name == "bf16" else (2048,):
            tile = grouped_gemm.multiply_tile(dtype, columns)
            sizes = {"ROWS": tile.rows, "COLS": tile.cols, "DEPTH": tile.depth}
            constants = {**experts, "TMA": False, "TRANSPOSED": False, "GATHER": True, "ADD": True, "w_k": 1, **sizes}
            wide |= {"first": "i32", "last": "i32"}
            found[f"multiply {tile}"] = grouped_gemm._multiply, wide, constants, tile.warps, tile.stages
            tile = grouped_gemm.outer_tile(dtype, columns, 2048)
            sizes = {"ROWS": tile.rows, "COLS": tile.cols, "DEPTH": tile.depth}
            constants = {"X_GATHER": True, "Y_GATHER": True, **sizes}
            found[f"outer {tile}"] = grouped_gemm._outer, wide, constants, tile.warps, tile.stages
    return found


@needs_triton
@pytest.mark.parametrize("capability", [90, *(pytest.param(card, marks=pytest.mark.slow) for card in (86, 120))])
def test_compiled_for_every_card(capability: int) -> None:
    """Within the 99 KB of shared memory that the smallest of them has for a block; large tiles are loaded ahead."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, (kernel, types, constants, warps, stages) in kernels().items():
        if capability != 86 and constants.get("ROWS") != 128:
            continue  # the large products are what differs by card, and compiling takes its time
        signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
        places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
        # As a launch specialises them: without this nothing is loaded ahead, and shared memory looks small.
        whole = [i for i, each in enumerate(kernel.arg_names) if signature[each] not in ("constexpr", "fp32")]
        source = ASTSource(kernel, signature, places, {(i,): [["tt.divisibility", 16]] for i in whole})
        options = {"num_warps": warps, "num_stages": stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.metadata.shared <= 99 * 1024, f"{name}: {compiled.metadata.shared} bytes"
        assert ".entry" in compiled.asm["ptx"]
        if name.startswith("multiply Tile(rows=128, cols=128"):
            assert compiled.metadata.shared >= 64 * 1024, f"{name}: one buffer only"


@needs_triton
@pytest.mark.parametrize("how", ["fast", "exact", "integers"])
@pytest.mark.parametrize(
    ("capability", "room"),
    [(90, 227), *(pytest.param(*card, marks=pytest.mark.slow) for card in ((89, 99), (100, 227), (120, 99)))],
)
def test_products_in_8_bits_compiled(capability: int, room: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tensor cores' instructions for the codes, within a block's shared memory, whatever the sum's length; of
    integers two programs fit a multiprocessor of Hopper."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pronghorn.kernels import grouped_codes

    properties = SimpleNamespace(shared_memory_per_block_optin=room * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
    kernel, exact, integers = grouped_codes._multiply_codes, how == "exact", how == "integers"
    code = "i8" if integers else "fp8e4nv"
    types = {"x": f"*{code}", "w": f"*{code}", "x_scales_ptr": "*fp32", "w_scales_ptr": "*fp32", "y_ptr": "*bf16"}
    types |= {"offsets_ptr": "*i32", "rows_ptr": "*i32", "N": "i32", "K": "i32"}
    for depth, tma in ((2048, False), (2880, False), (40, False), *([(2048, True)] if capability == 90 else [])):
        tile = grouped_codes.coded_tile(2880, torch.device("cuda"), exact, integers)
        sizes = {"ROWS": tile.rows, "COLS": tile.cols, "DEPTH": tile.depth, "WHOLE": depth % tile.depth == 0}
        constants = {
            "E": 128,
            "EXPERTS": 128,
            "TMA": tma,
            "GATHER": not tma,
            "EXACT": exact,
            "INTEGERS": integers,
            **sizes,
        }
        if tma:
            types |= {"x": f"tensordesc<{code}[{tile.rows},{tile.depth}]>"}
            types |= {"w": f"tensordesc<{code}[{tile.cols},{tile.depth}]>"}
        signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
        places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
        whole = [i for i, each in enumerate(kernel.arg_names) if each in types and "desc" not in types[each]]
        source = ASTSource(kernel, signature, places, {(i,): [["tt.divisibility", 16]] for i in whole})
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.metadata.shared <= room * 1024, f"{tile}: {compiled.metadata.shared} bytes"
        if integers and capability == 90:
            assert 2 * compiled.metadata.shared <= room * 1024 and "wgmma" in compiled.asm["ptx"], tile
        instruction = ".s8" if integers else "kind::f8f6f4" if capability == 100 else "e4m3.e4m3"
        assert instruction in compiled.asm["ptx"], tile
        assert ("cp.async.bulk.tensor" in compiled.asm["ptx"]) is tma


@needs_triton
@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_tma_compiled(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's copy engines fetch their tiles, which fit a block's shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pronghorn.kernels import grouped_gemm

    monkeypatch.setattr(grouped_gemm, "uses_tma", lambda device: True)
    weight = torch.empty(2, 2880, 5760, dtype=torch.bfloat16)
    weight = weight.mT.contiguous().mT if transposed else weight
    tile = grouped_gemm.tma_tile(torch.empty(4, 2880, dtype=torch.bfloat16), weight)
    assert tile is not None
    kernel, right = grouped_gemm._multiply, (tile.cols, tile.depth) if transposed else (tile.depth, tile.cols)
    types = {"x": f"tensordesc<bf16[{tile.rows},{tile.depth}]>", "w": f"tensordesc<bf16[{right[0]},{right[1]}]>"}
    types |= {"y_ptr": "*bf16", "offsets_ptr": "*i32", "rows_ptr": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("N", "K", "w_expert", "w_k", "w_n", "first", "last"), "i32")
    constants = {"E": 32, "EXPERTS": 32, "TMA": True, "TRANSPOSED": transposed, "GATHER": False, "ADD": False}
    constants |= {"ROWS": tile.rows, "COLS": tile.cols, "DEPTH": tile.depth}
    signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 * 1024
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"] and "wgmma" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("shape", "dtype", "stored", "served"),
    [
        ((2, 64, 128), torch.bfloat16, "contiguous", True),
        ((2, 64, 128), torch.float16, "transposed", True),
        ((2, 96, 128), torch.bfloat16, "contiguous", False),  # no whole steps
        ((2, 64, 132), torch.bfloat16, "contiguous", False),  # rows of no whole 16 bytes
        ((2, 64, 64), torch.bfloat16, "contiguous", False),  # narrower than a tile
        ((2, 64, 128), torch.float32, "contiguous", False),
        ((2, 64, 128), torch.bfloat16, "sliced", False),
    ],
)
def test_which_weights_have_descriptors(
    shape: tuple[int, ...], dtype: torch.dtype, stored: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pronghorn.kernels import grouped_gemm

    experts, depth, columns = shape
    weight = torch.empty(shape, dtype=dtype)
    if stored == "transposed":
        weight = weight.mT.contiguous().mT
    if stored == "sliced":
        weight = torch.empty(experts, depth, 2 * columns, dtype=dtype)[:, :, :columns]
    x = torch.empty(5, depth, dtype=dtype)
    assert grouped_gemm.tma_tile(x, weight) is None  # not on Hopper
    monkeypatch.setattr(grouped_gemm, "uses_tma", lambda device: True)
    assert (grouped_gemm.tma_tile(x, weight) is not None) is served
