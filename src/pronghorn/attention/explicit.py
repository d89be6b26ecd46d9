"""Packed attention whose backward is called by hand, for autograd functions of a whole block (`models.fused`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.attention import varlen
from pronghorn.attention.masked import per_document_attention
from pronghorn.attention.packed import Backend, choose
from pronghorn.data.batch import TILE_ROWS, PackedBatch
from pronghorn.kernels import attention


def forward(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedBatch, scale: float, window: int | None, backend: Backend
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(attention's output [T, H, D], what `backward` needs besides)."""
    way, window = choose(backend, q)[0], _binding(window, packed)
    if way == "tiled":
        out, lse = attention.forward(q, k, v, packed.tiles, TILE_ROWS, scale, window)
        return out, (lse,)
    if way == "flash":
        out, *state = varlen.forward(q, k, v, packed, scale, window)
        return out, tuple(state)
    return per_document_attention(q, k, v, packed, scale, window), ()


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
) -> Tensor:
    """[T, H + 2·H_kv, D]: dq, dk and dv side by side."""
    way, window = choose(backend, q)[0], _binding(window, packed)
    if way == "tiled":
        return attention.backward(d_out, q, k, v, out, state[0], packed.tiles, TILE_ROWS, scale, window)
    if way == "flash":
        return torch.cat(varlen.backward(d_out, q, k, v, out, state, packed, scale, window), 1)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        again = per_document_attention(q, k, v, packed, scale, window)
    return torch.cat(torch.autograd.grad(again, (q, k, v), d_out), 1)


def _binding(window: int | None, packed: PackedBatch) -> int | None:
    """The window, where a document is longer than it."""
    return window if window is not None and window < packed.max_seqlen else None
