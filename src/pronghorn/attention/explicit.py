"""Packed attention whose backward can be called by hand, for autograd functions of a whole block (`models.fused`), and
as an autograd function of its own.

By tiles (`kernels.attention`) it takes half of flash varlen's time on documents of 100 to 300 tokens on a H200, and
less up to 8,192 (docs/log.md): no empty blocks, no atomics.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pronghorn.attention import varlen
from pronghorn.attention.backends import Backend, choose
from pronghorn.attention.masked import per_document_attention
from pronghorn.data.batch import TILE_ROWS, PackedBatch
from pronghorn.kernels import attention as tiles


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    scale: float,
    window: int | None,
    backend: Backend,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention inside each document: [T, H, D] and [T, H_kv, D] to [T, H, D], any strides but for the last;
    sinks: [H]. Differentiable once."""
    return _Attention.apply(query, key, value, sinks, (packed, scale, window, backend))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Any) -> Tensor:
        packed, scale, window, backend = options
        out, state = forward(q, k, v, packed, scale, window, backend, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, *state)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, sinks, out, *state = ctx.saved_tensors
        packed, scale, window, backend = ctx.options
        d_out = d_out.contiguous()
        grads, d_sinks = backward(d_out, q, k, v, out, state, packed, scale, window, backend, sinks)
        return *grads.split([q.shape[1], k.shape[1], k.shape[1]], 1), d_sinks, None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedBatch,
    scale: float,
    window: int | None,
    backend: Backend,
    sinks: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(attention's output [T, H, D], what `backward` needs besides)."""
    way, window = choose(backend, q)[0], binding(window, packed)
    if way == "tiled":
        out, lse = tiles.forward(q, k, v, packed.tiles, TILE_ROWS, scale, window, sinks)
        return out, (lse,)
    if way == "flash":
        out, *state = varlen.forward(q, k, v, packed, scale, window, sinks)
        return out, tuple(state)
    return per_document_attention(q, k, v, packed, scale, window, sinks), ()


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    state: list[Tensor],
    packed: PackedBatch,
    scale: float,
    window: int | None,
    backend: Backend,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """([T, H + 2·H_kv, D]: dq, dk and dv side by side; [H]: the sinks' gradient, None where they aren't trained)."""
    way, window = choose(backend, q)[0], binding(window, packed)
    trained = [sinks] if sinks is not None and sinks.requires_grad else []
    if way == "tiled":
        grads = tiles.backward(d_out, q, k, v, out, state[0], packed.tiles, TILE_ROWS, scale, window)
        return grads, tiles.sink_grad(trained[0], d_out, out, state[0] * log(2)) if trained else None
    if way == "flash":
        grads = torch.cat(varlen.backward(d_out, q, k, v, out, state, packed, scale, window), 1)
        return grads, tiles.sink_grad(trained[0], d_out, out, state[0]) if trained else None
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        again = per_document_attention(q, k, v, packed, scale, window, sinks)
    dq, dk, dv, *d_sinks = torch.autograd.grad(again, (q, k, v, *trained), d_out)
    return torch.cat([dq, dk, dv], 1), d_sinks[0] if trained else None


def binding(window: int | None, packed: PackedBatch) -> int | None:
    """The window, where a document is longer than it."""
    return window if window is not None and window < packed.max_seqlen else None
