"""Packed attention whose backward can be called by hand, for autograd functions of a whole block.

By tiles (`kernels.attention`) it takes half of flash varlen's time on documents of 100 to 300 tokens on a H200, and
less up to 8,192 (benchmarks/log): no empty blocks, no atomics. Long documents go through cuDNN (`long_documents`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from pronghorn.attention import efficient, long_documents, varlen
from pronghorn.attention.backends import Backend, choose, long_from
from pronghorn.attention.masked import per_document_attention
from pronghorn.data.batch import TILE_ROWS, PackedBatch
from pronghorn.kernels import attention as tiles
from pronghorn.kernels.once import refuse_second_derivatives
from pronghorn.ranges import SCORES, in_part


@dataclass(frozen=True)
class Options:
    """Which attention: causal inside each document."""

    packed: PackedBatch
    scale: float
    window: int | None
    way: str
    """What `backends.choose` chose."""
    long: int | None = None
    """Tokens from which on documents go through cuDNN where the way is by tiles; None: none do."""

    @classmethod
    def choose(cls, backend: Backend, query: Tensor, packed: PackedBatch, scale: float, window: int | None) -> Options:
        """Choose what serves queries like this [..., D]: one object for forward and backward, since
        deterministic mode can be switched in between. Raises as `backends.choose` does."""
        way = choose(backend, query)[0]
        if way == "efficient" and window is not None:
            way = "per_document"
        return cls(packed, scale, window, way, long_from(backend, query))

    @property
    def binding(self) -> int | None:
        """The window, where a document is longer than it."""
        return self.window if self.window is not None and self.window < self.packed.max_seqlen else None

    def split(self, sinks: Tensor | None) -> tuple[long_documents.Bounds, Tensor]:
        """Return (the documents that cuDNN takes, the tiles of the others). It has neither windows nor sinks."""
        if self.long is None or sinks is not None or self.binding is not None:
            return [], self.packed.tiles
        return self.packed.split(self.long)


def attention(query: Tensor, key: Tensor, value: Tensor, options: Options, sinks: Tensor | None = None) -> Tensor:
    """Attend: [T, H, D] and [T, H_kv, D] to [T, H, D], any strides but the last; sinks: [H]. Differentiable once."""
    return _Attention.apply(query, key, value, sinks, options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Options) -> Tensor:
        out, state = forward(q, k, v, options, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, *state)
        ctx.options = options
        return out

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, sinks, out, *state = ctx.saved_tensors
        grads, d_sinks = backward(d_out.contiguous(), q, k, v, out, state, ctx.options, sinks)
        return *grads.split([q.shape[1], k.shape[1], k.shape[1]], 1), d_sinks, None


@in_part(SCORES)
def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, sinks: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (attention's output [T, H, D], what `backward` needs besides)."""
    packed, scale, window = options.packed, options.scale, options.binding
    if options.way == "tiled":
        documents, rest = options.split(sinks)
        out, lse = tiles.forward(q, k, v, rest, TILE_ROWS, scale, window, sinks)
        return out, (lse, *long_documents.forward(q, k, v, out, documents, scale))
    if options.way == "flash":
        out, *state = varlen.forward(q, k, v, packed, scale, window, sinks)
        return out, tuple(state)
    if options.way == "efficient" and sinks is None:
        return efficient.forward(q, k, v, packed, scale)
    return per_document_attention(q, k, v, packed, scale, window, sinks), ()


@in_part(SCORES)
def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    state: list[Tensor],
    options: Options,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (dq, dk and dv side by side [T, H + 2·H_kv, D]; the sinks' gradient [H], None where not trained)."""
    packed, scale, window = options.packed, options.scale, options.binding
    trained = [sinks] if sinks is not None and sinks.requires_grad else []
    if options.way == "tiled":
        documents, rest = options.split(sinks)
        grads = tiles.backward(d_out, q, k, v, out, state[0], rest, TILE_ROWS, scale, window)
        long_documents.backward(d_out, q, k, v, out, state[1:], grads, documents, scale)
        return grads, tiles.sink_grad(trained[0], d_out, out, state[0] * log(2)) if trained else None
    if options.way == "flash":
        grads = torch.cat(varlen.backward(d_out, q, k, v, out, state, packed, scale, window), 1)
        return grads, tiles.sink_grad(trained[0], d_out, out, state[0]) if trained else None
    if options.way == "efficient" and sinks is None:
        return torch.cat(efficient.backward(d_out, q, k, v, out, state, packed, scale), 1), None
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        again = per_document_attention(q, k, v, packed, scale, window, sinks)
    dq, dk, dv, *d_sinks = torch.autograd.grad(again, (q, k, v, *trained), d_out)
    return torch.cat([dq, dk, dv], 1), d_sinks[0] if trained else None
