"""Attention and MLP of a decoder layer as one autograd function each: what runs is written out, forward and backward.

    attention   q·k·v in one product → RoPE (and qk-norm) → packed attention → o
    mlp         gate·up in one product → gated activation → down

Kept for the backward: the input, q·k·v, attention's output and its log-sum-exp; the input and gate·up. The activation
is computed again. Source of the gradients: the formulas in `kernels` and `models.merged`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.attention import explicit
from pronghorn.attention.backends import Backend
from pronghorn.data.batch import PackedBatch
from pronghorn.kernels import glu, rope
from pronghorn.kernels.rope import Heads
from pronghorn.models.merged import LinearGroup, Operands, read


@dataclass(frozen=True)
class AttentionParts:
    """One layer's attention: its linears and its geometry."""

    qkv: LinearGroup
    out: LinearGroup
    heads: Heads
    scale: float
    window: int | None
    backend: Backend
    sinks: Tensor | None = None
    """[H], scores that have no value (gpt-oss)."""


@dataclass(frozen=True)
class MLPParts:
    """One layer's MLP."""

    gate_up: LinearGroup
    down: LinearGroup
    activation: glu.Activation


def attention(x: Tensor, cos: Tensor, sin: Tensor, packed: PackedBatch, parts: AttentionParts) -> Tensor:
    """x, y: [T, H], in the dtype of the products; cos, sin: [T, D]."""
    qkv, out = read([parts.qkv, parts.out], x.dtype)
    norms = parts.heads.query_norm, parts.heads.key_norm
    return _Attention.apply(x, cos, sin, packed, parts, qkv, out, *norms, parts.sinks, *qkv.trained, *out.trained)


def mlp(x: Tensor, parts: MLPParts) -> Tensor:
    """x, y: [T, H], in the dtype of the products."""
    gate_up, down = read([parts.gate_up, parts.down], x.dtype)
    return _MLP.apply(x, parts.activation, gate_up, down, *gate_up.trained, *down.trained)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        packed: PackedBatch,
        parts: AttentionParts,
        qkv_linears: Operands,
        out_linear: Operands,
        *_: Tensor | None,
    ) -> Tensor:
        qkv, xa = qkv_linears.forward(x)
        q, k, v = rope.forward(qkv, cos, sin, parts.heads)
        mixed, state = explicit.forward(q, k, v, packed, parts.scale, parts.window, parts.backend, parts.sinks)
        y, mixed_a = out_linear.forward(mixed.flatten(1))
        ctx.save_for_backward(x, cos, sin, qkv, mixed, *state, xa, mixed_a)
        ctx.packed, ctx.parts, ctx.linears = packed, parts, (qkv_linears, out_linear)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, cos, sin, qkv, mixed, *state, xa, mixed_a = ctx.saved_tensors
        parts: AttentionParts = ctx.parts
        qkv_linears, out_linear = ctx.linears
        heads = parts.heads
        d_mixed, dya = out_linear.input_grad(dy)
        out_grads = out_linear.gradients(dy, dya, mixed.flatten(1), mixed_a)
        if heads.query_norm is None:
            (q, k, v), raw = heads.split(qkv), None
        else:
            (q, k, v), raw = rope.forward(qkv, cos, sin, heads), qkv
        options = ctx.packed, parts.scale, parts.window, parts.backend, parts.sinks
        dqkv, d_sinks = explicit.backward(d_mixed.view_as(mixed), q, k, v, mixed, state, *options)
        dqkv, *norm_grads = rope.backward_(dqkv, cos, sin, heads, raw, any(ctx.needs_input_grad[7:9]))
        dx, dya = qkv_linears.input_grad(dqkv, ctx.needs_input_grad[0])
        return dx, *(None,) * 6, *norm_grads, d_sinks, *qkv_linears.gradients(dqkv, dya, x, xa), *out_grads


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: glu.Activation, gate_up_linears: Operands, down_linear: Operands, *_: Tensor
    ) -> Tensor:
        gate_up, low_rank = gate_up_linears.parts(x)
        if low_rank is None:
            xa, a = None, glu.forward(gate_up, activation)
        else:
            xa, a = low_rank[0], glu.forward_with_low_rank_(gate_up, *low_rank, activation)
        y, a_a = down_linear.forward(a)
        ctx.save_for_backward(x, gate_up, xa, a_a)
        ctx.activation, ctx.linears = activation, (gate_up_linears, down_linear)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate_up, xa, a_a = ctx.saved_tensors
        gate_up_linears, down_linear = ctx.linears
        da, dya = down_linear.input_grad(dy)
        d_gate_up = glu.backward_(da, gate_up, ctx.activation)
        down_grads = down_linear.gradients(dy, dya, da, a_a)  # da holds the activation now
        del da
        dx, dya = gate_up_linears.input_grad(d_gate_up, ctx.needs_input_grad[0])
        return dx, *(None,) * 3, *gate_up_linears.gradients(d_gate_up, dya, x, xa), *down_grads
