"""Routing and the experts' function against a float64 computation token by token: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.kernels.grouped_gemm import choose
from pronghorn.kernels.int8 import quantise_rotated_reference
from pronghorn.kernels.moe_glu import Gate
from pronghorn.kernels.quantise import quantise_rows_reference
from pronghorn.layers.expert_codes import coded
from pronghorn.moe.experts import Experts, LowRank, experts
from pronghorn.moe.route import route
from pronghorn.precision.compute import Compute
from pronghorn.precision.int8 import column_factors
from support.moe_checks import indices
from support.tolerance import ThreeWay

H, WIDTH, RANK = 8, 6, 2
GATES = {"silu": Gate("silu"), "gelu_tanh": Gate("gelu_tanh"), "clamped": Gate("clamped", limit=0.7)}
ROUTINGS = [
    (1, 1, 1, "even"),
    (63, 1, 4, "skewed"),
    (63, 2, 5, "even"),
    (33, 8, 12, "one takes all"),
    (257, 4, 9, "skewed"),
]


def tensors(tokens: int, k: int, count: int, h: int = H, width: int = WIDTH, seed: int = 0) -> dict[str, Tensor]:
    """Inputs and parameters in float64, laid out as transformers and PEFT have them."""
    shapes = {"x": (tokens, h), "w": (tokens, k), "gate_up": (count, 2 * width, h), "down": (count, h, width)}
    shapes |= {"gate_up_bias": (count, 2 * width), "down_bias": (count, h)}
    shapes |= {"a1": (count, RANK, h), "b1": (count, 2 * width, RANK)}
    shapes |= {"a2": (count, RANK, width), "b2": (count, h, RANK)}
    generator = torch.Generator().manual_seed(tokens + seed)
    return {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


def ours(
    index: Tensor, gate: Gate, given: dict[str, Tensor], transposed: bool, bias: bool, lora: bool,
    compute: Compute = Compute.DTYPE,
) -> Tensor:  # fmt: skip
    """The experts' function; weights lie as [E, in, out] where transposed, and are frozen where in 8 bits."""
    weights = [given[name].transpose(1, 2) for name in ("gate_up", "down")]
    if transposed:
        weights = [weight.contiguous() for weight in weights]
    biases = [given["gate_up_bias"], given["down_bias"]] if bias else [None, None]
    low_rank = [LowRank(given["a1"], given["b1"], 0.5), LowRank(given["a2"], given["b2"], 2.0)]
    codes = (coded(weights[0], compute), coded(weights[1], compute)) if compute.in_8_bits else None
    adapters = low_rank if lora else (None, None)
    layer = Experts(weights[0], weights[1], gate, biases[0], biases[1], *adapters, codes)
    sizes = tuple(size for weight in weights for size in weight.shape[1:])
    way, _ = choose(index.device, given["x"].dtype, sizes)
    return experts(given["x"], given["w"], route(index, len(given["gate_up"])), layer, way)


def token_by_token(index: Tensor, gate: Gate, given: dict[str, Tensor], bias: bool, lora: bool) -> Tensor:
    """The formula, one token and one expert at a time."""
    rows = []
    for token, chosen in enumerate(index.tolist()):
        total = torch.zeros_like(given["x"][token])
        for k, e in enumerate(chosen):
            gate_up, down = given["gate_up"][e], given["down"][e]
            if lora:
                gate_up = gate_up + 0.5 * given["b1"][e] @ given["a1"][e]
                down = down + 2.0 * given["b2"][e] @ given["a2"][e]
            h = gate_up @ given["x"][token]
            if bias:
                h = h + given["gate_up_bias"][e]
            if gate.kind == "clamped":
                g, u = h[::2].clamp(max=gate.limit), h[1::2].clamp(-gate.limit, gate.limit) + 1
                a = g * torch.sigmoid(gate.alpha * g) * u
            else:
                g, u = h.chunk(2)
                f = torch.nn.functional
                a = (f.silu(g) if gate.kind == "silu" else f.gelu(g, approximate="tanh")) * u
            y = down @ a
            if bias:
                y = y + given["down_bias"][e]
            total = total + given["w"][token, k] * y
        rows.append(total)
    return torch.stack(rows)


class Rounded(torch.autograd.Function):
    """x W of operands in 8 bits, with a scale a row of x and a column of W; back, a scale a row of dy and of W. In
    integers, where there are factors of both, rows are rotated, which leaves products as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factors: tuple[Tensor, Tensor] | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.factors = None if factors is None else factors[1]
        return multiplied(x, weight.t(), None if factors is None else factors[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return multiplied(dy, ctx.saved_tensors[0], ctx.factors), None, None


def multiplied(x: Tensor, weight: Tensor, factors: Tensor | None) -> Tensor:
    """x Wᵀ of what the codes of rows stand for, in float64."""
    if factors is None:
        operands = quantise_rows_reference(x), quantise_rows_reference(weight)
    else:
        operands = quantise_rotated_reference(x, factors), quantise_rotated_reference(weight, 1 / factors.float())
    left, right = (codes.double() * scales.double() for codes, scales in operands)
    return (left @ right.t()).to(x.dtype)


def expert_by_expert(
    index: Tensor, gate: Gate, given: dict[str, Tensor], bias: bool, factors: dict[str, Any]
) -> Tensor:
    """The formula with frozen weights' products in 8 bits; in integers with `factors` by the weight's name."""
    out = torch.zeros_like(given["x"])
    for e in index.unique().tolist():
        tokens, slots = (index == e).nonzero(as_tuple=True)
        x = given["x"][tokens]
        h = (
            Rounded.apply(x, given["gate_up"][e].t(), factors.get("gate_up"))
            + 0.5 * (x @ given["a1"][e].t()) @ given["b1"][e].t()
        )
        h = h + given["gate_up_bias"][e] if bias else h
        if gate.kind == "clamped":
            g, u = h[:, ::2].clamp(max=gate.limit), h[:, 1::2].clamp(-gate.limit, gate.limit) + 1
            a = g * torch.sigmoid(gate.alpha * g) * u
        else:
            g, u = h.chunk(2, -1)
            f = torch.nn.functional
            a = (f.silu(g) if gate.kind == "silu" else f.gelu(g, approximate="tanh")) * u
        w = given["w"][tokens, slots].unsqueeze(1)  # before the product, so that dw is the sum of d ∘ a
        y = (
            Rounded.apply(w * a, given["down"][e].t(), factors.get("down"))
            + 2.0 * (w * a @ given["a2"][e].t()) @ given["b2"][e].t()
        )
        y = y + w * given["down_bias"][e] if bias else y
        out = out.index_add(0, tokens, y)
    return out


def gradients(run: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in given.items()}
    out = run(leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    out.backward(direction)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


def check(routing: tuple[int, int, int, str], kind: str, dtype: torch.dtype, device: str, size: int) -> None:
    """The same bits twice, within twice the error of the formula in the same dtype; few tokens are drawn often."""
    tokens, k, count, how = routing
    index, gate = indices(tokens, k, count, how), GATES[kind]
    swapped = kind == "clamped"  # gpt-oss's layout and biases
    errors = ThreeWay()
    # in 16 bits whether a product is clamped is luck near the limit, and one can be most of an expert's error
    draws = 1 if device == "cpu" else 12 if swapped and dtype.itemsize == 2 else 4
    for seed in range(max(1 + 32 // tokens, draws)):
        given = tensors(tokens, k, count, H * size, WIDTH * size, seed)
        given = {name: value if name in "xw" else value / size**0.5 for name, value in given.items()}
        rounded = {name: value.to(dtype) for name, value in given.items()}
        given = {name: value.double() for name, value in rounded.items()}
        there = {name: value.to(device) for name, value in rounded.items()}
        exact, plain = (
            gradients(lambda leaves: token_by_token(index, gate, leaves, bias=swapped, lora=True), values)
            for values in (given, rounded)
        )
        mine, again = (
            gradients(lambda leaves: ours(index.to(device), gate, leaves, swapped, bias=swapped, lora=True), there)
            for _ in range(2)
        )
        assert mine.keys() == exact.keys()
        for name, wanted in exact.items():
            assert torch.equal(mine[name], again[name]), name
            errors.add(name, mine[name].cpu(), plain[name], wanted)
    errors.check()


@pytest.mark.matrix(7)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_experts_equal_tokens_one_by_one(routing: tuple[int, int, int, str], kind: str, nan_memory: None) -> None:
    check(routing, kind, torch.float32, "cpu", 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_experts_on_a_gpu(routing: tuple[int, int, int, str], kind: str, dtype: torch.dtype, nan_memory: None) -> None:
    check(routing, kind, dtype, "cuda", 8)


def check_in_8_bits(
    routing: tuple[int, int, int, str], kind: str, dtype: torch.dtype, device: str, compute: Compute
) -> None:
    """The same bits twice, within twice the error of the formula on the same operands in 8 bits."""
    tokens, k, count, how = routing
    index, gate = indices(tokens, k, count, how), GATES[kind]
    swapped, errors = kind == "clamped", ThreeWay()
    for seed in range(max(12 if device == "cuda" else 4, (512 if device == "cuda" else 64) // tokens)):
        width = 64 if compute is Compute.INT8 else 48
        given = tensors(tokens, k, count, 64, width, seed)
        rounded = {name: (value if name in "xw" else value / 8**0.5).to(dtype) for name, value in given.items()}
        frozen = {name: rounded[name] for name in ("gate_up", "down")}
        factors: dict[str, Any] = {}
        if compute is Compute.INT8:
            factors = {name: (column_factors(w), column_factors(w.mT)) for name, w in frozen.items()}
        leaves = {name: value for name, value in rounded.items() if name not in frozen}
        exact, plain = (
            gradients(
                lambda given, wide=wide, frozen=frozen, factors=factors: expert_by_expert(
                    index, gate, {**given, **{name: value.to(wide) for name, value in frozen.items()}}, swapped, factors
                ),
                {name: value.to(wide) for name, value in leaves.items()},
            )
            for wide in (torch.float64, dtype)
        )
        held = {name: value.to(device) for name, value in frozen.items()}
        mine, again = (
            gradients(
                lambda given, held=held: ours(
                    index.to(device), gate, {**given, **held}, swapped, bias=swapped, lora=True, compute=compute
                ),
                {name: value.to(device) for name, value in leaves.items()},
            )
            for _ in range(2)
        )
        assert mine.keys() == exact.keys()
        for name, wanted in exact.items():
            assert torch.equal(mine[name], again[name]), name
            errors.add(name, mine[name].cpu(), plain[name], wanted)
    errors.check()


@pytest.mark.matrix(14)
@pytest.mark.parametrize("compute", [Compute.FP8_EXACT, Compute.INT8])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_frozen_experts_in_8_bits(
    routing: tuple[int, int, int, str], kind: str, compute: Compute, nan_memory: None
) -> None:
    check_in_8_bits(routing, kind, torch.bfloat16, "cpu", compute)


@pytest.mark.gpu
@pytest.mark.parametrize("compute", [Compute.FP8_EXACT, Compute.INT8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_frozen_experts_in_8_bits_on_a_gpu(
    routing: tuple[int, int, int, str], kind: str, dtype: torch.dtype, compute: Compute, nan_memory: None
) -> None:
    check_in_8_bits(routing, kind, dtype, "cuda", compute)


@pytest.mark.gpu
@pytest.mark.parametrize("compute", [Compute.DTYPE, Compute.FP8_EXACT, Compute.INT8])
def test_experts_never_synchronise_and_fit_a_graph(compute: Compute) -> None:
    """One capture, forward and backward, serves other routings: sizes are fixed, offsets are data."""
    index = indices(63, 2, 5, "even").cuda()
    given = {name: (value * 0.2).to("cuda", torch.bfloat16) for name, value in tensors(63, 2, 5, 64, 64).items()}
    options: dict[str, Any] = {"transposed": False, "bias": False, "lora": True, "compute": compute}
    frozen = ("gate_up", "down") if compute.in_8_bits else ()
    leaves = {name: value for name, value in given.items() if "bias" not in name}
    trained = [value.requires_grad_() for name, value in leaves.items() if name not in frozen]

    def run() -> list[Tensor]:
        out = ours(index, GATES["silu"], leaves, **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), trained)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for how in ("one takes all", "skewed"):
        index.copy_(indices(63, 2, 5, how))
        graph.replay()
        for mine, wanted in zip(captured, run(), strict=True):
            assert torch.equal(mine, wanted)


def test_frozen_experts_get_no_gradient_and_equal_inputs_equal_bits() -> None:
    given = {name: value.float() for name, value in tensors(17, 2, 4).items()}
    index = indices(17, 2, 4, "skewed")
    trained = {"x", "w"}
    results = []
    for _ in range(2):
        leaves = {name: value.clone().requires_grad_(name in trained) for name, value in given.items()}
        out = ours(index, GATES["silu"], leaves, transposed=False, bias=False, lora=False)
        out.sum().backward()
        assert {name for name, leaf in leaves.items() if leaf.grad is not None} == trained
        results.append((out, leaves["x"].grad, leaves["w"].grad))
    for mine, again in zip(*results, strict=True):
        assert torch.equal(mine, again)


def test_an_expert_without_tokens_has_exactly_zero_gradient() -> None:
    given = {name: value.float() for name, value in tensors(9, 2, 6).items()}
    index = indices(9, 2, 6, "one takes all")  # nobody chooses expert 0
    found = gradients(lambda leaves: ours(index, GATES["silu"], leaves, transposed=False, bias=True, lora=True), given)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias", "a1", "b1", "a2", "b2"):
        chosen = set(index.flatten().tolist())
        for e in range(6):
            assert (found[name][e] != 0).any().item() is (e in chosen), (name, e)


@pytest.mark.parametrize("kind", ["silu", "clamped"])
def test_each_tensor_trained_alone_gets_the_same_gradient(kind: str) -> None:
    given = {name: value.float() for name, value in tensors(17, 2, 4).items()}
    index, bias = indices(17, 2, 4, "skewed"), kind == "clamped"

    def run(leaves: dict[str, Tensor]) -> Tensor:
        return ours(index, GATES[kind], leaves, transposed=bias, bias=bias, lora=True)

    together = gradients(run, given)
    for name in together.keys() - {"out"}:
        alone = gradients(lambda leaves: run({**given, name: leaves[name]}), {name: given[name]})  # noqa: B023
        assert torch.equal(alone[name], together[name]), name


def test_no_tokens() -> None:
    given = {name: value.float() for name, value in tensors(0, 2, 4).items()}
    index = indices(0, 2, 4, "even")
    found = gradients(lambda leaves: ours(index, GATES["silu"], leaves, transposed=False, bias=True, lora=True), given)
    assert found["out"].shape == (0, H) and not any(gradient.any() for gradient in found.values())
