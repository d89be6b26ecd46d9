"""The gated delta rule: its kernels by the interpreter and on a GPU, and its chunked form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.chunks import Chunks, chunks_of
from pronghorn.errors import UnsupportedError
from pronghorn.kernels import causal_conv, delta_gates, gated_delta_backward, gated_delta_forward, gated_norm
from support.delta_checks import CHECKS, LENGTHS, case, check, check_inverse
from support.delta_net_checks import CHECKS as NET_CHECKS
from support.interpreted import check_interpreted
from support.marks import needs_triton


@needs_triton
@pytest.mark.parametrize("draws", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_interpreted_kernels_agree_with_the_recurrence(draws: str) -> None:
    check_interpreted("delta_checks.py", (*CHECKS, "inverse"), draws)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(*LENGTHS, 640 - sum(LENGTHS)), (640,)], ids=["documents", "one"])
def test_kernels_agree_with_the_recurrence_on_a_gpu(
    lengths: tuple[int, ...], dtype: torch.dtype, nan_memory: None
) -> None:
    check("cuda", dtype, lengths, (4, 8, 128, 128), decays=(1.0,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHECKS)
def test_small_heads_agree_with_the_recurrence_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    check("cuda", dtype, **CHECKS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(16, 16), (16, 128), (32, 64), (64, 32), (64, 64), (128, 64), (128, 256)])
def test_heads_of_every_size_agree_with_the_recurrence_on_a_gpu(dims: tuple[int, int], nan_memory: None) -> None:
    check("cuda", torch.bfloat16, (1, 65, 129), (1, 2, *dims), decays=(1.0,))
    many = (1, 65, 129, *[7] * gated_delta_forward.FEW_DOCUMENTS)
    check("cuda", torch.bfloat16, many, (1, 2, *dims), decays=(1.0,))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(8192,), (178,) * 46], ids=["one", "many"])
def test_kernels_repeat_to_the_bit_on_a_gpu(lengths: tuple[int, ...]) -> None:
    """Kernels that load by stages have given single numbers that differed from run to run."""
    given, do = case(lengths, (2, 4, 128, 128), torch.bfloat16, 1.0, 0)
    given, do = [x.cuda() for x in given], do.cuda()
    chunks = Chunks(*(x.cuda() for x in chunks_of(lengths, len(lengths), sum(lengths))))

    def run() -> list[torch.Tensor]:
        o, saved = gated_delta_forward.forward_triton(*given, chunks, 1.0)
        return [o, *gated_delta_backward.backward_triton(do, *given, saved, chunks, 1.0)]

    first = run()
    for _ in range(3):
        assert all(map(torch.equal, first, run()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inverse_is_rounded_once_on_a_gpu(dtype: torch.dtype) -> None:
    check_inverse("cuda", dtype)


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


RULE = {
    "prepare": gated_delta_forward._prepare,
    "states": gated_delta_forward._states,
    "output": gated_delta_forward._output,
    "direct": gated_delta_backward._direct,
    "state gradients": gated_delta_backward._state_gradients,
    "inner": gated_delta_backward._inner,
    "query gradients": gated_delta_backward._query_gradients,
    "key gradients": gated_delta_backward._key_gradients,
}
WIDE = {"g_ptr", "dg_ptr", "sums_ptr", "q_unit_ptr", "k_unit_ptr", "db_inner_ptr", "dbeta_inner_ptr"}


def shared_bytes(name: str, dtype: str, capability: int, tile: gated_delta_forward.Tile) -> int:
    """Compile a kernel of the rule for heads of 128 and return the shared memory of a block."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = RULE[name]
    constants = {"H": 32, "GROUP": 2, "DK": 128, "DV": 128, "L": 64, "COLUMNS": tile.columns, "STAGES": tile.stages}
    types = dict.fromkeys(("chunks_ptr", "documents_ptr"), "*i32") | dict.fromkeys(WIDE, "*fp32")
    types |= {"eps": "fp32", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    aligned = [each for each in kernel.arg_names if each.endswith(("_ptr", "_row", "_head"))]
    signature = {each: types.get(each, f"*{dtype}" if each.endswith("_ptr") else "i32") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items() if each in kernel.arg_names}
    divisible = {(kernel.arg_names.index(each),): [["tt.divisibility", 16]] for each in aligned}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    source = ASTSource(kernel, signature, places, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert ".entry" in compiled.asm["ptx"], name
    return int(compiled.metadata.shared)


CARDS = [(80, 163), (89, 99), (90, 227), (100, 227)]
LONG = [
    pytest.param(dtype, *card, name, marks=pytest.mark.slow)
    for dtype in ("bf16", "fp32")
    for card in CARDS
    for name in RULE
    if (dtype, card[0], name) != ("bf16", 90, "states")
]


@needs_triton
@pytest.mark.parametrize(("dtype", "capability", "kilobytes", "name"), [("bf16", 90, 227, "states"), *LONG])
def test_kernels_of_the_rule_fit_every_card(dtype: str, capability: int, kilobytes: int, name: str) -> None:
    tiles, narrow = gated_delta_forward.TILES | gated_delta_backward.TILES, {}
    many = tiles | gated_delta_forward.MANY | gated_delta_backward.MANY
    if dtype == "fp32" and kilobytes * 1024 < gated_delta_forward.SHARED:
        narrow = gated_delta_forward.NARROW | gated_delta_backward.NARROW
    for tile in {narrow.get(name, tiles[name]), narrow.get(name, many[name])}:
        assert shared_bytes(name, dtype, capability, tile) <= kilobytes * 1024


@pytest.mark.parametrize("sizes", [(2, 4, 192, 32), (2, 4, 16, 48), (2, 4, 96, 96), (2, 4, 8, 16)])
def test_heads_of_other_sizes_are_refused_before_a_launch(
    sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, _ = case(LENGTHS, sizes, torch.float32, 1.0, 0)
    monkeypatch.setattr(gated_delta_forward, "launch", lambda *_, **__: pytest.fail("launched"))
    chunks = chunks_of(LENGTHS, len(LENGTHS), sum(LENGTHS))
    with pytest.raises(UnsupportedError, match=r"linear_(key|value)_head_dim = \d+: .* powers of two from 16 on"):
        gated_delta_forward.forward_triton(*given, chunks, 1.0)
