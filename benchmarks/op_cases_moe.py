"""Make the cases of a layer with experts, which are drawn at random, each token's different ones (`moe.route`).

Formulas of products loop over experts with numbers of rows that the host knows: without the synchronisation that
transformers' loop has, and in a form that compiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.op_case import LORA_SCALE, Case, Draw, Way, by_autograd, by_kernel
from pronghorn.kernels import grouped_gemm, moe_glu, moe_rows
from pronghorn.kernels.grouped_codes import CodedExperts, multiply_coded
from pronghorn.kernels.moe_route import route_reference
from pronghorn.kernels.quantise import quantise_rows
from pronghorn.moe.route import Routing, route
from pronghorn.parity.quantised import fast_sums


class Routed:
    """Route T tokens, each with K of E experts."""

    def __init__(self, draw: Draw, tokens: int, experts: int, k: int) -> None:
        scores = torch.rand(tokens, experts, generator=draw.generator, device=draw.device)
        scores[:, -1] = 0  # an expert that nobody chooses
        top = scores.topk(k)
        self.index: Tensor = top.indices
        self.weights: Tensor = (top.values / top.values.sum(-1, keepdim=True)).to(draw.dtype)
        self.routing: Routing = route(self.index, experts)
        self.sizes: list[int] = torch.bincount(self.index.flatten(), minlength=experts).tolist()
        self.label = f"{tokens}x{k} of {experts}"

    def products(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows [S, K] with the weights [E, K, N] of their experts, expert by expert."""
        return torch.cat([rows @ w for rows, w in zip(x.split(self.sizes), weight.unbind(), strict=True)])


def route_case(draw: Draw, tokens: int, experts: int, k: int) -> Case:
    """Make the order of rows from top-k indices: int64 [T, K]."""
    index = Routed(draw, tokens, experts, k).index
    names = Routing._fields[1:]
    return Case(
        "moe_route", f"{tokens}x{k} of {experts}", tokens, lambda index: route_reference(index, experts), (index,), (),
        names, (index.nbytes + 4.0 * (4 * index.numel() + experts), 0.0),
        lambda case: by_autograd(case, lambda index: tuple(route(index, experts))[1:]), trained=0,
    )  # fmt: skip


def gather_case(draw: Draw, tokens: int, experts: int, k: int, width: int) -> Case:
    """x: [T, H] to its rows [S, H]; back, the sum of each token's rows."""
    routed = Routed(draw, tokens, experts, k)
    rows, inverse = routed.routing.rows, routed.routing.inverse

    def pronghorn(case: Case) -> Way:
        back = lambda _, x, dy: (moe_rows.combine(dy, inverse),)  # noqa: E731
        return by_kernel(case, lambda x: (moe_rows.gather(x, rows),), back)

    x, dy = draw(tokens, width), draw(tokens * k, width)
    moved = float(x.nbytes + dy.nbytes + rows.tokens.nbytes)
    return Case(
        "moe_gather", f"{routed.label}, width {width}", tokens, lambda x: (x[rows.tokens],), (x,), (dy,), ("y", "dx"),
        (moved, moved), pronghorn,
    )  # fmt: skip


def combine_case(draw: Draw, tokens: int, experts: int, k: int, width: int, biased: bool = False) -> Case:
    """y: [S, H], w: [T, K] to the weighted sum of each token's rows [T, H], with the experts' bias [E, H]."""
    routed = Routed(draw, tokens, experts, k)
    inverse, index = routed.routing.inverse, routed.index

    def formula(y: Tensor, w: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        picked = y[inverse]
        if bias:
            picked = picked + bias[0][index]
        return ((picked * w.unsqueeze(-1)).sum(1),)

    def ours(y: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return moe_rows.combine(y, inverse, w, *bias, *([index] if bias else []))

    y, bias = draw(tokens * k, width), [draw(experts, width)] * biased
    moved = y.nbytes * (1 + 1 / k) + routed.weights.nbytes + inverse.nbytes + sum(b.nbytes for b in bias)
    return Case(
        "moe_combine", f"{routed.label}, width {width}" + ", bias" * biased, tokens, formula,
        (y, routed.weights, *bias), (), ("out",), (moved, 0.0), lambda case: by_autograd(case, ours), trained=0,
    )  # fmt: skip


def glu_case(draw: Draw, tokens: int, experts: int, k: int, width: int, clamped: bool = False) -> Case:
    """h: [S, 2·I], w: [T, K] to the weighted activation w·a; gpt-oss's clamped one with the experts' bias [E, 2·I].

    The forward leaves a, which the backward weights on its way (`kernels.moe_glu`).
    """
    routed = Routed(draw, tokens, experts, k)
    owners, slots = routed.routing.experts, routed.routing.slots
    gate = moe_glu.Gate("clamped" if clamped else "silu")

    def formula(h: Tensor, w: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        if bias:
            h = h + bias[0][owners]
            g, u = h[:, ::2].clamp(max=gate.limit), h[:, 1::2].clamp(-gate.limit, gate.limit)
            a = (u + 1) * (g * torch.sigmoid(g * gate.alpha))
        else:
            g, u = h.chunk(2, -1)
            a = functional.silu(g) * u
        return (w.flatten()[slots].unsqueeze(-1) * a,)

    def pronghorn(case: Case) -> Way:
        def forward(h: Tensor, w: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
            return (moe_glu.forward(h, gate, bias, owners),)

        def backward(outputs: Any, h: Tensor, w: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            bias, d = (others[0] if len(others) == 2 else None), others[-1]
            return d, *moe_glu.backward_(d, h, w, slots, gate, bias, owners)

        def results(state: Any, grads: Any) -> dict[str, Tensor]:
            (a,), (_, w, *_), _ = state
            weighted, dh, dw = grads
            again = (w.flatten()[slots].unsqueeze(-1).float() * a).to(a.dtype)
            return {"w a": weighted, "dh": dh, "dw": dw, "w a again": again}

        # leaves w·a, for the gradients of down's LoRA
        return replace(by_kernel(case, forward, backward, more=case.grads[0].nbytes), results=results)

    h, d, bias = draw(tokens * k, 2 * width), draw(tokens * k, width), [draw(experts, 2 * width)] * clamped
    small = 2.0 * routed.weights.nbytes + sum(b.nbytes for b in bias)
    work = 3.0 * d.nbytes + small, 5.0 * d.nbytes + small
    return Case(
        "moe_glu", f"{routed.label}, width {width}" + ", clamped, bias" * clamped, tokens, formula,
        (h, routed.weights, *bias), (d,), ("w a", "dh", "dw"), work, pronghorn, trained=2,
    )  # fmt: skip


def gemm_case(
    draw: Draw, tokens: int, experts: int, k: int, inner: int, width: int, way: grouped_gemm.Way | None = None,
    by_rows: bool = False,
) -> Case:  # fmt: skip
    """x: [S, K] times its experts' weights [E, K, N], frozen; by the way that this device takes, or by a given one.

    Args:
        by_rows: weights lie as they are multiplied, which is gpt-oss's way; others' transposed, as a linear's.
    """
    routed = Routed(draw, tokens, experts, k)
    offsets = routed.routing.offsets
    x = draw(tokens * k, inner)
    weight = (draw(experts, inner, width) if by_rows else draw(experts, width, inner).mT) / inner**0.5
    best, _ = grouped_gemm.choose(x.device, x.dtype, (inner, width))

    def multiply(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (grouped_gemm.multiply(x, weight, offsets, way or best),)

    def pronghorn(case: Case) -> Way:
        return by_kernel(case, multiply, lambda _, x, weight, dy: multiply(dy, weight.mT))

    operations = 2.0 * tokens * k * inner * width
    label = f"{routed.label}, {inner} to {width}" + ", weights by rows" * by_rows + (f", {way}" if way else "")
    return Case(
        "grouped_gemm", label, tokens,
        lambda x, weight: (routed.products(x, weight),), (x, weight), (draw(tokens * k, width),), ("y", "dx"),
        (operations, operations), pronghorn, product=(tokens * k, inner, width), calls=2 * experts,
    )  # fmt: skip


def fp8_case(
    draw: Draw, tokens: int, experts: int, k: int, inner: int, width: int, way: Any = None, of_tokens: bool = True,
) -> Case:  # fmt: skip
    """Multiply by frozen experts [E, K, N] in 8 bits, quantising what goes in; numbers are such that 8 bits hold them.

    Args:
        way: torch's product in 8 bits instead of ours, or bf16's.
        of_tokens: x is tokens' [T, K], as of gates and ups, and their rows' dx are summed; else rows' [S, K].
    """
    routed = Routed(draw, tokens, experts, k)
    offsets, rows = routed.routing.offsets, routed.routing.rows if of_tokens else None
    x, dy = _exact(draw, tokens if of_tokens else tokens * k, inner), _exact(draw, tokens * k, width)
    weight = _exact(draw, experts, width, inner).mT
    best, _ = grouped_gemm.choose(x.device, x.dtype, (inner, width))

    def formula(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (routed.products(x if rows is None else x[rows.tokens], weight),)

    def summed_fast(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if way == "bf16" or x.dtype is torch.float64:
            return formula(x, weight)
        x = x if rows is None else x[rows.tokens]
        parts = zip(x.split(routed.sizes), weight.unbind(), strict=True)
        return (torch.cat([_FastProduct.apply(part, w) for part, w in parts]),)

    def pronghorn(case: Case) -> Way:
        codes = None if way == "bf16" else CodedExperts.of(weight, exact=False)

        def multiply(x: Tensor, back: bool) -> Tensor:
            chosen = None if back else rows
            if codes is None:
                return grouped_gemm.multiply(x, weight.mT if back else weight, offsets, best, rows=chosen)
            if way == "torch":
                return _by_torch(x, codes, offsets, chosen, back)
            return multiply_coded(x, codes, offsets, x.dtype, chosen, back)

        def backward(outputs: Any, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
            dx = multiply(dy, True)
            return (dx if rows is None else moe_rows.combine(dx, rows.places),)

        return by_kernel(case, lambda x, weight: (multiply(x, False),), backward)

    operations = 2.0 * tokens * k * inner * width
    label = f"{routed.label}, {inner} to {width}" + ", of tokens" * of_tokens + (f", {way}" if way else "")
    case = Case(
        "grouped_fp8", label, tokens, formula, (x, weight), (dy,), ("y", "dx"), (operations, operations), pronghorn,
        product=(tokens * k, inner, width), calls=2 * experts,
    )  # fmt: skip
    return replace(case, small=replace(case, formula=summed_fast))


def _by_torch(x: Tensor, codes: CodedExperts, offsets: Tensor, rows: moe_rows.Rows | None, back: bool) -> Tensor:
    """Do what `multiply_coded` does, by torch's product, which wants rows gathered."""
    functional: Any = torch.nn.functional
    by_rows, side = functional.ScalingType.RowWise, codes.side(back)
    assert side is not None
    given, scales = quantise_rows(x)
    if rows is not None:
        given, scales = moe_rows.gather(given.view(torch.int16), rows).view(given.dtype), scales[rows.tokens]
    product: Tensor = functional.scaled_grouped_mm(
        given, side.codes.mT, scales.flatten(), by_rows, side.scales, by_rows, offs=offsets,
        output_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return product


class _FastProduct(torch.autograd.Function):
    """x [S, K] W [K, N], and dy Wᵀ, summed as tensor cores sum products of 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return fast_sums(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return fast_sums(dy.float(), weight.float().t()).to(dy.dtype), None


def _exact(draw: Draw, *shape: int) -> Tensor:
    """Draw numbers that e4m3 holds with one scale for all: the largest, 448, is in every row and every column."""
    codes = (draw(*shape).float() * 32).clamp(-448, 448).to(torch.float8_e4m3fn).to(draw.dtype)
    index = torch.arange(max(shape[-2:]), device=codes.device)
    codes[..., index % shape[-2], index % shape[-1]] = 448
    return codes * 2**-9


def lora_case(draw: Draw, tokens: int, experts: int, k: int, inner: int, width: int, rank: int) -> Case:
    """Make the experts' LoRA of a weight: x: [T, K], A: [E, r, K], B: [E, N, r], added to y: [S, N]; back, dA, dB."""
    routed = Routed(draw, tokens, experts, k)
    rows, offsets = routed.routing.rows, routed.routing.offsets
    way: grouped_gemm.Way = "triton" if draw.device == "cuda" else "loop"

    def formula(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (y + LORA_SCALE * routed.products(routed.products(x[rows.tokens], a.mT), b.mT),)

    def forward(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        xa = grouped_gemm.multiply(x, a.mT, offsets, way, rows=rows)
        return grouped_gemm.multiply(xa, b.mT, offsets, way, out=y, scale=LORA_SCALE), xa

    def backward(outputs: Any, a: Tensor, b: Tensor, x: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        dyb = grouped_gemm.multiply(dy, b, offsets, way)
        da = grouped_gemm.outer(dyb, x, offsets, way, dtype=a.dtype, y_rows=rows, scale=LORA_SCALE)
        return da, grouped_gemm.outer(dy, outputs[1], offsets, way, dtype=b.dtype, scale=LORA_SCALE)

    a, b = draw(experts, rank, inner) / inner**0.5, draw(experts, width, rank)
    x, y, dy = draw(tokens, inner), draw(tokens * k, width), draw(tokens * k, width)
    adapter = float(a.nbytes + b.nbytes)
    return Case(
        "grouped_lora", f"{routed.label}, {inner} to {width}, rank {rank}", tokens, formula, (a, b, x, y), (dy,),
        ("y", "da", "db"), (x.nbytes + 2 * y.nbytes + adapter, x.nbytes + dy.nbytes + 2 * adapter),
        lambda case: by_kernel(case, forward, backward, owned=(3,)), trained=2, calls=6 * experts,
    )  # fmt: skip
