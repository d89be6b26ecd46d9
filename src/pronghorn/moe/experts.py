"""A layer's experts as one autograd function: what runs is written out, forward and backward.

    x_i  the token of row i (`route`)                    h_i = x_i W1 + s1 (x_i A1ᵀ) B1ᵀ
    a_i = gate(h_i + b1)                                 y_i = a_i W2 + s2 (a_i A2ᵀ) B2ᵀ + b2
    out_t = Σ_k w_tk · y_{row of (t, k)}

with every W, b, A, B those of the row's expert. Kept for the backward: x, h (before b1) and the rank-r products; a is
computed again, and y is not needed (`kernels.moe_glu`). LoRA is two thin products beside each large one: neither W + ΔW
nor a dense dW is ever made, and adapters get gradients in their own dtype. An expert without rows gets zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    adapters = layer.gate_up_lora, layer.down_lora
    low_rank = [(None, None) if lora is None else (lora.a, lora.b) for lora in adapters]
    options = layer.gate, way, [1.0 if lora is None else lora.scale for lora in adapters]
    parts = (layer.gate_up, *low_rank[0]), (layer.down, *low_rank[1]), (layer.gate_up_bias, layer.down_bias)
    return _Experts.apply(x, top_k_weights, options, *routing.tensors, *(tensor for part in parts for tensor in part))


@dataclass(frozen=True)
class _Product:
    """y = x W + s (x Aᵀ) Bᵀ, row by row with the expert's own."""

    given: tuple[Tensor, Tensor | None, Tensor | None]
    """W, A, B as they are stored."""
    dtype: torch.dtype
    scale: float
    offsets: Tensor
    way: Way

    @property
    def thin(self) -> Way:
        """The way of products with a rank: grouped_mm can neither add to a result nor gather nor give float32."""
        return "triton" if self.way == "torch" else self.way

    def _low_rank(self) -> tuple[Tensor, Tensor] | None:
        """A and B, copied in the dtype of the products and expert by expert (PEFT's B is expert-minor)."""
        _, a, b = self.given
        if a is None or b is None:
            return None
        return a.detach().to(self.dtype).contiguous(), b.detach().to(self.dtype).contiguous()

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(y, x Aᵀ)."""
        weight = self.given[0].detach().to(self.dtype)
        y = multiply(x, weight, self.offsets, self.way, rows=rows)
        low_rank = self._low_rank()
        if low_rank is None:
            return y, None
        a, b = low_rank
        return self._add(y, x, a.transpose(1, 2), b.transpose(1, 2), rows)

    def input_grad(self, dy: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(dx, dy B)."""
        weight = self.given[0].detach().to(self.dtype)
        dx = multiply(dy, weight.transpose(1, 2), self.offsets, self.way, rows=rows)
        low_rank = self._low_rank()
        if low_rank is None:
            return dx, None
        a, b = low_rank
        return self._add(dx, dy, b, a, rows)

    def _add(self, y: Tensor, x: Tensor, first: Tensor, second: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        narrow = multiply(x, first, self.offsets, self.thin, rows=rows)
        return multiply(narrow, second, self.offsets, self.thin, out=y, scale=self.scale), narrow

    def gradients(
        self,
        needs: Sequence[bool],
        x: Tensor,
        dy: Tensor,
        xa: Tensor | None,
        dyb: Tensor | None,
        x_rows: Tensor | None = None,
        dy_rows: Tensor | None = None,
    ) -> list[Tensor | None]:
        """dW, dA, dB where needed, each in the dtype of its parameter."""
        weight, a, b = self.given
        found: list[Tensor | None] = [None] * 3
        if needs[0] and weight.stride(-1) == 1:
            found[0] = outer(x, dy, self.offsets, self.way, dtype=weight.dtype, x_rows=x_rows, y_rows=dy_rows)
        elif needs[0]:  # a transposed view: laid out as the parameter is, so that nothing copies it after
            grad = outer(dy, x, self.offsets, self.way, dtype=weight.dtype, x_rows=dy_rows, y_rows=x_rows)
            found[0] = grad.transpose(1, 2)
        if a is None or b is None or xa is None or dyb is None:
            return found
        if needs[1]:
            found[1] = outer(dyb, x, self.offsets, self.thin, dtype=a.dtype, y_rows=x_rows, scale=self.scale)
        if needs[2]:
            found[2] = outer(dy, xa, self.offsets, self.thin, dtype=b.dtype, x_rows=dy_rows, scale=self.scale)
        return found

    def bias_grad(self, ones: Tensor, dy: Tensor, dtype: torch.dtype, dy_rows: Tensor | None = None) -> Tensor:
        """The sum of each expert's rows, each times its number in `ones` [S, 1]."""
        return outer(ones, dy, self.offsets, self.thin, dtype=dtype, y_rows=dy_rows).squeeze(1)


def _products(
    x: Tensor, options: tuple[Gate, Way, list[float]], tensors: Sequence[Any]
) -> tuple[Routing, _Product, _Product, Tensor | None, Tensor | None]:
    """(routing, gate and up, down, their biases), from what the function is given."""
    _, way, scales = options
    routing = Routing(*tensors[:6])
    gate_up, down = (
        _Product(tuple(part), x.dtype, scale, routing.offsets, way)
        for part, scale in zip((tensors[6:9], tensors[9:12]), scales, strict=True)
    )
    b1, b2 = (None if bias is None else bias.detach().to(x.dtype) for bias in tensors[12:])
    return routing, gate_up, down, b1, b2


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, options: Any, *tensors: Tensor | None) -> Tensor:
        routing, gate_up, down, b1, b2 = _products(x, options, tensors)
        h, xa = gate_up.forward(x, routing.tokens)
        a = moe_glu.forward(h, options[0], b1, routing.experts)
        y, aa = down.forward(a)
        ctx.save_for_backward(x, w, h, xa, aa, *tensors)
        ctx.options = options
        return combine(y, routing.inverse, w, b2, routing.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, h, xa, aa, *tensors = ctx.saved_tensors
        routing, gate_up, down, b1, b2 = _products(x, ctx.options, tensors)
        needs, tokens, dy = ctx.needs_input_grad[9:], routing.tokens, dy.contiguous()
        d, dyb = down.input_grad(dy, tokens)
        dh, dw = moe_glu.backward_(d, h, w, routing.slots, ctx.options[0], b1, routing.experts)
        if b2 is not None:
            dw = dw + (dy @ b2.t()).gather(1, routing.index).to(dw.dtype)
        w_rows = w.flatten().index_select(0, routing.slots).to(x.dtype).unsqueeze(1) if any(needs[5:]) else None
        weighted = None if aa is None or w_rows is None else aa * w_rows
        down_grads = down.gradients(needs[3:6], d, dy, weighted, dyb, dy_rows=tokens)  # d holds w·a now
        del d
        bias_grads: list[Tensor | None] = [None, None]
        if needs[6]:
            bias_grads[0] = gate_up.bias_grad(dh.new_ones(len(dh), 1), dh, tensors[12].dtype)
        if needs[7]:
            assert w_rows is not None
            bias_grads[1] = down.bias_grad(w_rows, dy, tensors[13].dtype, tokens)
        dx_rows, dhb = gate_up.input_grad(dh)
        gate_up_grads = gate_up.gradients(needs[:3], x, dh, xa, dhb, x_rows=tokens)
        dx = combine(dx_rows, routing.inverse)
        return dx, dw, *(None,) * 7, *gate_up_grads, *down_grads, *bias_grads
