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
from pronghorn.attention.packed import Backend
from pronghorn.data.batch import PackedBatch
from pronghorn.kernels import glu, rope
from pronghorn.kernels.rope import Heads
from pronghorn.models.merged import LinearGroup


@dataclass(frozen=True)
class AttentionParts:
    """One layer's attention: its linears and its geometry."""

    qkv: LinearGroup
    out: LinearGroup
    heads: Heads
    scale: float
    window: int | None
    backend: Backend


@dataclass(frozen=True)
class MLPParts:
    """One layer's MLP."""

    gate_up: LinearGroup
    down: LinearGroup
    activation: glu.Activation


def attention(x: Tensor, cos: Tensor, sin: Tensor, packed: PackedBatch, parts: AttentionParts) -> Tensor:
    """x, y: [T, H]; cos, sin: [T, D]."""
    return _Attention.apply(x, cos, sin, packed, parts, *parts.qkv.parameters(), *parts.out.parameters())


def mlp(x: Tensor, parts: MLPParts) -> Tensor:
    """x, y: [T, H]."""
    return _MLP.apply(x, parts, *parts.gate_up.parameters(), *parts.down.parameters())


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, packed: PackedBatch, parts: AttentionParts, *_: Tensor
    ) -> Tensor:
        qkv, xa = parts.qkv.forward(x)
        q, k, v = rope.forward(qkv, cos, sin, parts.heads)
        mixed, state = explicit.forward(q, k, v, packed, parts.scale, parts.window, parts.backend)
        y, mixed_a = parts.out.forward(mixed.flatten(1))
        ctx.save_for_backward(x, cos, sin, qkv, mixed, *state, xa, mixed_a)
        ctx.packed, ctx.parts = packed, parts
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, cos, sin, qkv, mixed, *state, xa, mixed_a = ctx.saved_tensors
        parts: AttentionParts = ctx.parts
        heads = parts.heads
        d_mixed, dya = parts.out.input_grad(dy)
        assert d_mixed is not None
        out_grads = parts.out.adapter_grads(dy, dya, mixed.flatten(1), mixed_a)
        if heads.query_norm is None:
            (q, k, v), raw = heads.split(qkv), None
        else:
            (q, k, v), raw = rope.forward(qkv, cos, sin, heads), qkv
        options = ctx.packed, parts.scale, parts.window, parts.backend
        dqkv = explicit.backward(d_mixed.view_as(mixed), q, k, v, mixed, state, *options)
        dqkv = rope.backward_(dqkv, cos, sin, heads, raw)
        dx, dya = parts.qkv.input_grad(dqkv, ctx.needs_input_grad[0])
        return dx, None, None, None, None, *parts.qkv.adapter_grads(dqkv, dya, x, xa), *out_grads


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: MLPParts, *_: Tensor) -> Tensor:
        gate_up, low_rank = parts.gate_up.parts(x)
        if low_rank is None:
            xa, a = None, glu.forward(gate_up, parts.activation)
        else:
            xa, a = low_rank[0], glu.forward_with_low_rank_(gate_up, *low_rank, parts.activation)
        y, a_a = parts.down.forward(a)
        ctx.save_for_backward(x, gate_up, xa, a_a)
        ctx.parts = parts
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate_up, xa, a_a = ctx.saved_tensors
        parts: MLPParts = ctx.parts
        da, dya = parts.down.input_grad(dy)
        assert da is not None
        d_gate_up, a = glu.backward(da, gate_up, parts.activation)
        down_grads = parts.down.adapter_grads(dy, dya, a, a_a)
        dx, dya = parts.gate_up.input_grad(d_gate_up, ctx.needs_input_grad[0])
        return dx, None, *parts.gate_up.adapter_grads(d_gate_up, dya, x, xa), *down_grads
