"""A layer's experts as one autograd function: what runs is written out, forward and backward.

    x_i  the token of row i (`route`)                    h_i = x_i W1 + s1 (x_i A1ᵀ) B1ᵀ
    a_i = gate(h_i + b1)                                 y_i = a_i W2 + s2 (a_i A2ᵀ) B2ᵀ + b2
    out_t = Σ_k w_tk · y_{row of (t, k)}

with every W, b, A, B those of the row's expert. Kept for the backward: x, h (before b1) and the rank-r products; a is
computed again, and y is not needed (`kernels.moe_glu`). LoRA is two thin products beside each large one: neither W + ΔW
nor a dense dW is ever made, and adapters get gradients in their own dtype. An expert without rows gets zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels import moe_glu
from pronghorn.kernels.grouped_gemm import Way, multiply, outer
from pronghorn.kernels.moe_glu import Gate
from pronghorn.kernels.moe_rows import combine
from pronghorn.moe.route import Routing


@dataclass(frozen=True)
class LowRank:
    """One weight's adapter: ΔW_e = scale · (B_e A_e)ᵀ."""

    a: Tensor
    """[E, r, K], any strides and float dtype."""
    b: Tensor
    """[E, N, r]."""
    scale: float


@dataclass(frozen=True)
class Experts:
    """One layer's experts."""

    gate_up: Tensor
    """[E, H, 2·I], any strides: x @ gate_up[e]."""
    down: Tensor
    """[E, I, H]."""
    gate: Gate
    gate_up_bias: Tensor | None = None
    """[E, 2·I]."""
    down_bias: Tensor | None = None
    """[E, H]."""
    gate_up_lora: LowRank | None = None
    down_lora: LowRank | None = None


def experts(x: Tensor, top_k_weights: Tensor, routing: Routing, layer: Experts, way: Way) -> Tensor:
    """The weighted sum of each token's experts.

    Args:
        x: [T, H], contiguous, in the dtype of the products; the layer's weights are copied where theirs is another.
        top_k_weights: [T, K], any float dtype.
        routing: of the same top-k.
        way: of the large products (`grouped_gemm.choose`).
    Returns:
        [T, H] in x's dtype.
    """
    options = layer.gate, way, *(1.0 if lora is None else lora.scale for lora in (layer.gate_up_lora, layer.down_lora))
    low_rank = [part for lora in (layer.gate_up_lora, layer.down_lora) for part in _parts(lora)]
    weights = layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias
    return _Experts.apply(x, top_k_weights, options, *routing.tensors, *weights, *low_rank)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, options: tuple[Gate, Way, float, float], *rest: Tensor | None) -> Tensor:
        routing = Routing(*rest[:5])  # type: ignore[arg-type]
        gate, way, *scales = options
        w1, w2, b1, b2, a1, lb1, a2, lb2 = (_cast(part, x) for part in rest[5:])
        assert w1 is not None and w2 is not None
        h = multiply(x, w1, routing.offsets, way, rows=routing.tokens)
        xa = _add_low_rank(h, x, a1, lb1, routing, way, scales[0], routing.tokens)
        a = moe_glu.forward(h, gate, b1, routing.experts)
        y = multiply(a, w2, routing.offsets, way)
        aa = _add_low_rank(y, a, a2, lb2, routing, way, scales[1])
        ids = None if b2 is None else _slot_experts(routing)
        ctx.save_for_backward(x, w, h, xa, aa, *rest)
        ctx.options = options
        return combine(y, routing.inverse, w, b2, ids)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, h, xa, aa, *rest = ctx.saved_tensors
        routing, kept = Routing(*rest[:5]), rest[5:]
        gate, way, *scales = ctx.options
        needs = dict(zip(("w1", "w2", "b1", "b2", "a1", "lb1", "a2", "lb2"), ctx.needs_input_grad[8:], strict=True))
        w1, w2, b1, b2, a1, lb1, a2, lb2 = (_cast(part, x) for part in kept)
        dy, offsets, tokens = dy.contiguous(), routing.offsets, routing.tokens

        d = multiply(dy, w2.transpose(1, 2), offsets, way, rows=tokens)
        u = _add_low_rank(d, dy, lb2, a2, routing, way, scales[1], tokens, transposed=True)
        dh, dw = moe_glu.backward_(d, h, w, routing.slots, gate, b1, routing.experts)
        wa = d  # the weighted activation lies there now
        row_weights = None
        if needs["b2"] or needs["lb2"]:
            row_weights = w.flatten().index_select(0, routing.slots).to(x.dtype).unsqueeze(1)
        if b2 is not None:
            dw = dw + (dy @ b2.t()).gather(1, _slot_experts(routing)).to(dw.dtype)
        grads: dict[str, Tensor | None] = dict.fromkeys(needs)
        if needs["w2"]:
            grads["w2"] = _weight_grad(kept[1], wa, dy, routing, way, y_rows=tokens)
        if needs["b2"]:
            grads["b2"] = outer(row_weights, dy, offsets, _thin(way), dtype=kept[3].dtype, y_rows=tokens).squeeze(1)
        if needs["a2"]:
            grads["a2"] = outer(u, wa, offsets, _thin(way), dtype=kept[6].dtype, scale=scales[1])
        if needs["lb2"]:
            options = {"dtype": kept[7].dtype, "x_rows": tokens, "scale": scales[1]}
            grads["lb2"] = outer(dy, aa * row_weights, offsets, _thin(way), **options)
        del d, wa

        if needs["b1"]:
            ones = dh.new_ones(dh.shape[0], 1)
            grads["b1"] = outer(ones, dh, offsets, _thin(way), dtype=kept[2].dtype).squeeze(1)
        if needs["w1"]:
            grads["w1"] = _weight_grad(kept[0], x, dh, routing, way, x_rows=tokens)
        if needs["lb1"]:
            grads["lb1"] = outer(dh, xa, offsets, _thin(way), dtype=kept[5].dtype, scale=scales[0])
        u = None if lb1 is None else multiply(dh, lb1, offsets, _thin(way))
        if needs["a1"]:
            grads["a1"] = outer(u, x, offsets, _thin(way), dtype=kept[4].dtype, y_rows=tokens, scale=scales[0])
        dx = None
        if ctx.needs_input_grad[0]:
            dx_rows = multiply(dh, w1.transpose(1, 2), offsets, way)
            if u is not None:
                multiply(u, a1, offsets, _thin(way), out=dx_rows, scale=scales[0])
            dx = combine(dx_rows, routing.inverse)
        return dx, dw if ctx.needs_input_grad[1] else None, *(None,) * 6, *grads.values()


def _add_low_rank(
    y: Tensor,
    x: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    routing: Routing,
    way: Way,
    scale: float,
    rows: Tensor | None = None,
    transposed: bool = False,
) -> Tensor | None:
    """Add s · (x Aᵀ) Bᵀ to y; returns x Aᵀ [S, r]. Transposed: s · (x A) B."""
    if a is None or b is None:
        return None
    first, second = (a, b) if transposed else (a.transpose(1, 2), b.transpose(1, 2))
    thin = multiply(x, first, routing.offsets, _thin(way), rows=rows)
    multiply(thin, second, routing.offsets, _thin(way), out=y, scale=scale)
    return thin


def _weight_grad(weight: Tensor, x: Tensor, dy: Tensor, routing: Routing, way: Way, **rows: Tensor) -> Tensor:
    """Σ xᵀ dy as [E, K, N] in the weight's dtype, laid out as the weight is (so that nothing copies it after)."""
    if weight.stride(-1) == 1:
        return outer(x, dy, routing.offsets, way, dtype=weight.dtype, **rows)
    swapped = {{"x_rows": "y_rows", "y_rows": "x_rows"}[name]: value for name, value in rows.items()}
    return outer(dy, x, routing.offsets, way, dtype=weight.dtype, **swapped).transpose(1, 2)


def _thin(way: Way) -> Way:
    """The way of products with a rank: grouped_mm can't add to a result, gather, or give float32."""
    return "triton" if way == "torch" else way


def _slot_experts(routing: Routing) -> Tensor:
    """int64 [T, K], the router's own indices."""
    return routing.experts[routing.inverse].long()


def _cast(part: Tensor | None, x: Tensor) -> Tensor | None:
    return None if part is None else part.detach().to(x.dtype)


def _parts(lora: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if lora is None else (lora.a, lora.b)
