"""A layer's experts as one autograd function: what runs is written out, forward and backward.

    x_i  the token of row i (`route`)                    h_i = x_i W1 + s1 (x_i A1ᵀ) B1ᵀ
    a_i = gate(h_i + b1)                                 y_i = a_i W2 + s2 (a_i A2ᵀ) B2ᵀ + b2
    out_t = Σ_k w_tk · y_{row of (t, k)}

with every W, b, A, B those of the row's expert. Kept for the backward: x, h (before b1) and the rank-r products; a is
computed again, and y is not needed (`kernels.moe_glu`). LoRA is two thin products beside each large one: neither W + ΔW
nor a dense dW is ever made, and adapters get gradients in their own dtype. An expert without rows gets zeros.

In 8 bits (`Experts.codes`) x W1, a W2 and their input gradients multiply quantised rows by W's codes; all else is as
above, of the same rows before they were quantised. The kernel that makes dh writes its e4m3 codes; those of integers
are of rotated rows, and made of dh by a pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels import moe_glu
from pronghorn.kernels.grouped_codes import CodedExperts, multiply_coded
from pronghorn.kernels.grouped_gemm import Way, multiply, outer
from pronghorn.kernels.moe_glu import Gate
from pronghorn.kernels.moe_rows import Rows, combine
from pronghorn.kernels.mxfp4 import multiply_packed
from pronghorn.kernels.once import refuse_second_derivatives
from pronghorn.kernels.packed import PackedExperts
from pronghorn.kernels.quantise import RowCodes
from pronghorn.moe.route import Routing
from pronghorn.ranges import ADAPTERS, PRODUCTS, part


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
    codes: tuple[CodedExperts, CodedExperts] | None = None
    """Both weights in 8 bits, which are multiplied instead; the weights are frozen then."""


def experts(x: Tensor, top_k_weights: Tensor, routing: Routing, layer: Experts, way: Way) -> Tensor:
    """Compute the weighted sum of each token's experts.

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
    options = layer.gate, way, [1.0 if lora is None else lora.scale for lora in adapters], layer.codes or (None, None)
    parts = (layer.gate_up, *low_rank[0]), (layer.down, *low_rank[1]), (layer.gate_up_bias, layer.down_bias)
    return _Experts.apply(x, top_k_weights, options, *routing, *(tensor for part in parts for tensor in part))


@dataclass(frozen=True)
class _Product:
    """y = x W + s (x Aᵀ) Bᵀ, row by row with the expert's own."""

    weight: Tensor
    a: Tensor | None
    b: Tensor | None
    """As they are stored."""
    dtype: torch.dtype
    scale: float
    offsets: Tensor
    way: Way
    codes: CodedExperts | None

    @property
    def thin(self) -> Way:
        """The way of products with a rank: grouped_mm can neither add to a result nor gather nor give float32."""
        return "triton" if self.way == "torch" else self.way

    @property
    def in_e4m3(self) -> bool:
        """Whether dy Wᵀ multiplies codes in e4m3."""
        return self.codes is not None and self.codes.backward.factors is None

    def multiply(
        self, x: Tensor, rows: Rows | None = None, transposed: bool = False, codes: RowCodes | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (y, x Aᵀ); transposed, of dy: (dx, dy B). Codes: x's, if they are there."""
        with part(PRODUCTS):
            if self.codes is not None and self.codes.side(transposed) is not None:
                given = x if codes is None else codes
                y = multiply_coded(given, self.codes, self.offsets, self.dtype, rows, transposed)
            elif isinstance(self.weight, PackedExperts):
                y = multiply_packed(x, self.weight, self.offsets, rows, transposed)
            else:
                w = self.weight.detach().to(self.dtype)
                y = multiply(x, w.mT if transposed else w, self.offsets, self.way, rows=rows)
        if self.a is None or self.b is None:
            return y, None
        # expert by expert: PEFT's B is expert-minor
        a, b = (each.detach().to(self.dtype).contiguous() for each in (self.a, self.b))
        with part(ADAPTERS):
            narrow = multiply(x, b if transposed else a.mT, self.offsets, self.thin, rows=rows)
            wide = a if transposed else b.mT
            return multiply(narrow, wide, self.offsets, self.thin, out=y, scale=self.scale), narrow

    def gradients(
        self,
        needs: Sequence[bool],
        x: tuple[Tensor, Rows | None],
        dy: tuple[Tensor, Rows | None],
        xa: Tensor | None,
        dyb: Tensor | None,
    ) -> list[Tensor | None]:
        """Return dW, dA, dB where needed, each in the dtype of its parameter; x and dy with their rows."""
        found: list[Tensor | None] = [None] * 3
        if needs[0]:
            transposed = self.weight.stride(-1) != 1  # then laid out as the parameter is: nothing copies it after
            left, right = (dy, x) if transposed else (x, dy)
            grad = self._outer(PRODUCTS, left, right, self.weight.dtype, 1.0)
            found[0] = grad.mT if transposed else grad
        if needs[1] and self.a is not None and dyb is not None:
            found[1] = self._outer(ADAPTERS, (dyb, None), x, self.a.dtype, self.scale)
        if needs[2] and self.b is not None and xa is not None:
            found[2] = self._outer(ADAPTERS, dy, (xa, None), self.b.dtype, self.scale)
        return found

    def bias_grad(self, weights: Tensor, dy: tuple[Tensor, Rows | None], dtype: torch.dtype) -> Tensor:
        """Add up each expert's rows, each times its number in `weights` [S, 1]."""
        return self._outer(PRODUCTS, (weights, None), dy, dtype, 1.0, self.thin).squeeze(1)

    def _outer(
        self, name: str, left: Any, right: Any, dtype: torch.dtype, scale: float, way: Way | None = None
    ) -> Tensor:
        (x, x_rows), (y, y_rows) = left, right
        way = way or (self.thin if name == ADAPTERS else self.way)
        with part(name):
            return outer(x, y, self.offsets, way, dtype=dtype, x_rows=x_rows, y_rows=y_rows, scale=scale)


def _products(
    x: Tensor, options: tuple[Gate, Way, list[float], Sequence[CodedExperts | None]], tensors: Sequence[Any]
) -> tuple[Routing, _Product, _Product, Tensor | None, Tensor | None]:
    """Return (routing, gate and up, down, their biases), from what the function is given."""
    _, way, scales, codes = options
    routing = Routing(*tensors[:6])
    gate_up, down = (
        _Product(weight, a, b, x.dtype, scale, routing.offsets, way, in_8_bits)
        for (weight, a, b), scale, in_8_bits in zip((tensors[6:9], tensors[9:12]), scales, codes, strict=True)
    )
    b1, b2 = (None if bias is None else bias.detach().to(x.dtype) for bias in tensors[12:])
    return routing, gate_up, down, b1, b2


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, options: Any, *tensors: Tensor | None) -> Tensor:
        routing, gate_up, down, b1, b2 = _products(x, options, tensors)
        h, xa = gate_up.multiply(x, routing.rows)
        a = moe_glu.forward(h, options[0], b1, routing.experts)
        y, aa = down.multiply(a)
        ctx.save_for_backward(x, w, h, xa, aa, *tensors)
        ctx.options = options
        return combine(y, routing.inverse, w, b2, routing.choice)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, h, xa, aa, *tensors = ctx.saved_tensors
        routing, gate_up, down, b1, b2 = _products(x, ctx.options, tensors)
        needs, rows, dy = ctx.needs_input_grad[9:], routing.rows, dy.contiguous()

        # d = dy W2ᵀ, not weighted, and from it dh and dw (`kernels.moe_glu`); b2's part of dw
        d, dyb = down.multiply(dy, rows, transposed=True)
        codes = RowCodes.like(h) if gate_up.in_e4m3 else None
        more = b1, routing.experts, needs[3] or needs[4], codes
        dh, dw = moe_glu.backward_(d, h, w, routing.slots, ctx.options[0], *more)
        if b2 is not None:
            dw = dw + (dy @ b2.t()).gather(1, routing.choice).to(dw.dtype)

        # gradients of down: d holds w·a now if W2 or A2 want it, so what B2 and b2 read is weighted here
        dy_rows = dy, rows
        bias_grads: list[Tensor | None] = [None, None]
        if needs[5] or needs[7]:
            w_rows = w.flatten().index_select(0, routing.slots).to(x.dtype).unsqueeze(1)
            aa = None if aa is None else aa * w_rows
            bias_grads[1] = down.bias_grad(w_rows, dy_rows, tensors[13].dtype) if needs[7] else None
        down_grads = down.gradients(needs[3:6], (d, None), dy_rows, aa, dyb)
        del d

        # gradients of gate and up, and dx, summed over each token's rows
        if needs[6]:
            bias_grads[0] = gate_up.bias_grad(dh.new_ones(len(dh), 1), (dh, None), tensors[12].dtype)
        dx, dhb = gate_up.multiply(dh, transposed=True, codes=codes)
        gate_up_grads = gate_up.gradients(needs[:3], (x, rows), (dh, None), xa, dhb)
        return combine(dx, routing.inverse), dw, *(None,) * 7, *gate_up_grads, *down_grads, *bias_grads
