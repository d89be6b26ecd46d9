"""Packed attention through torch's memory-efficient kernels, for heads that flash doesn't serve (CUDA, fp16 and bf16).

    O_i = softmax(s · Q_i K_iᵀ + causal mask) V_i        for every document i on its own

They take heads of any size and, as flash does, where documents start, so that a row is one launch; but no grouped
heads, so that keys and values are repeated, and no window here: such layers go document by document through SDPA.
Source: Rabe and Staats 2021, arXiv:2112.05682; torch's `aten::_efficient_attention_forward` and its own backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.attention import varlen
from pronghorn.data.batch import PackedBatch
from pronghorn.device import AMPERE, has_efficient_varlen

CAUSAL = 1
"""The kernels' number for a mask that is causal from each document's start."""


def refusal(query: Tensor) -> str | None:
    """Say why these kernels don't serve queries like this [..., D], or None if they do."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return "torch's memory-efficient kernels are for fp16 and bf16 on CUDA here"
    if query.shape[-1] % 8 or query.shape[-1] <= varlen.MAX_HEAD_DIM:
        return f"head_dim {query.shape[-1]} is not a multiple of 8 above {varlen.MAX_HEAD_DIM}"
    if torch.cuda.get_device_capability(query.device) < AMPERE:
        return f"{torch.cuda.get_device_name(query.device)} is older than Ampere (compute capability 8.0)"
    return None if has_efficient_varlen() else f"torch {torch.__version__} has no memory-efficient varlen kernel"


def forward(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedBatch, scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return (out [T, H, D], what `backward` needs besides) of q [T, H, D], k and v [T, H_kv, D]; nothing waits."""
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    bounds, longest = (packed.cu_seqlens,) * 2, (packed.max_seqlen,) * 2
    out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, *bounds, *longest, 0.0, CAUSAL, True, scale=scale
    )
    return out[0], (lse, seed, offset)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: list[Tensor], packed: PackedBatch, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); `state` is what `forward` returned after the output."""
    lse, seed, offset = state
    heads, kv_heads = q.shape[1], k.shape[1]
    k, v = repeated(k, heads), repeated(v, heads)
    bounds, longest = (packed.cu_seqlens,) * 2, (packed.max_seqlen,) * 2
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        d_out[None], q[None], k[None], v[None], None, out[None], *bounds, *longest,
        lse, 0.0, seed, offset, CAUSAL, False, scale=scale,
    )  # fmt: skip
    return dq[0], summed(dk[0], kv_heads), summed(dv[0], kv_heads)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return [T, H, D] of [T, H_kv, D], each head as often as there are query heads that read it."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, -1)  # the kernels read strides
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def summed(grad: Tensor, kv_heads: int) -> Tensor:
    """Return the gradient of `repeated`'s argument from that of its result."""
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)
