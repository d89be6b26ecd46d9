"""The gated delta rule: its kernels by the interpreter and on a GPU, and its chunked form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.kernels import causal_conv, delta_gates, gated_norm
from support.delta_checks import CHECKS, LENGTHS, check
from support.delta_net_checks import CHECKS as NET_CHECKS
from support.interpreted import check_interpreted
from support.marks import needs_triton


@needs_triton
def test_interpreted_kernels_agree_with_the_recurrence() -> None:
    check_interpreted("delta_checks.py", tuple(CHECKS))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(*LENGTHS, 2048 - sum(LENGTHS)), (2048,)], ids=["documents", "one"])
def test_kernels_agree_with_the_recurrence_on_a_gpu(
    lengths: tuple[int, ...], dtype: torch.dtype, nan_memory: None
) -> None:
    check("cuda", dtype, lengths, (4, 8, 128, 128), decays=(1.0,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHECKS)
def test_small_heads_agree_with_the_recurrence_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    check("cuda", dtype, *CHECKS[name])


@needs_triton
def test_interpreted_kernels_around_the_rule_agree_with_plain_torch() -> None:
    check_interpreted("delta_net_checks.py", tuple(NET_CHECKS))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NET_CHECKS)
def test_kernels_around_the_rule_agree_with_plain_torch_on_a_gpu(
    name: str, dtype: torch.dtype, nan_memory: None
) -> None:
    NET_CHECKS[name](dtype, "cuda")


def compiled_forms() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Each kernel around the rule: function, types of its arguments, compile-time values, warps."""
    x, wide, count, real = "*bf16", "*fp32", "i32", "fp32"
    pointers = (
        "x_ptr",
        "y_ptr",
        "w_ptr",
        "dy_ptr",
        "dp_ptr",
        "dx_ptr",
        "z_ptr",
        "dz_ptr",
        "b_ptr",
        "a_ptr",
        "beta_ptr",
    )
    types = dict.fromkeys((*pointers, "d_beta_ptr", "db_ptr", "da_ptr"), x) | {"ids_ptr": "*i32", "eps": real}
    types |= dict.fromkeys(("dw_ptr", "g_ptr", "dg_ptr", "decay_ptr", "step_ptr"), wide)
    tile = {"ROWS": causal_conv.ROWS, "COLUMNS": causal_conv.COLUMNS, "K": 4}
    heads = {"ROWS": gated_norm.ELEMENTS // 128, "BLOCK": 128}
    gates = {"BLOCK": delta_gates.BLOCK}
    forms = {
        "convolution": (causal_conv._forward, tile, causal_conv.WARPS),
        "back through SiLU": (causal_conv._through_silu, tile | {"WEIGHT": True}, causal_conv.WARPS),
        "convolution's backward": (causal_conv._backward, tile, causal_conv.WARPS),
        "norm": (gated_norm._forward, heads, gated_norm.WARPS),
        "norm's backward": (gated_norm._backward, heads | {"WEIGHT": True}, gated_norm.WARPS),
        "gates": (delta_gates._forward, gates, delta_gates.WARPS),
        "gates' backward": (delta_gates._backward, gates, delta_gates.WARPS),
    }
    return {
        name: (kernel, {each: types.get(each, count) for each in kernel.arg_names}, constants, warps)
        for name, (kernel, constants, warps) in forms.items()
    }


@needs_triton
@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [(90, 227), *(pytest.param(*card, marks=pytest.mark.slow) for card in ((80, 163), (89, 99), (100, 227)))],
)
def test_kernels_around_the_rule_compile_for_every_card(capability: int, kilobytes: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, (kernel, types, constants, warps) in compiled_forms().items():
        signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
        places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
        source = ASTSource(kernel, signature, places)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert compiled.metadata.shared <= kilobytes * 1024, name
        assert ".entry" in compiled.asm["ptx"]
