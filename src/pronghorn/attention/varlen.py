"""Packed attention through torch's flash varlen kernels (CUDA, fp16 and bf16).

    O_i = softmax(s · Q_i K_iᵀ + causal and window mask) V_i        for every document i on its own

`cu_seqlens` tells the kernel where documents start, so a packed row costs what its documents cost. Source:
FlashAttention-2, Dao 2023, arXiv:2307.08691; torch's `aten::_flash_attention_forward`, which carries its own backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.data.batch import PackedBatch
from pronghorn.device import AMPERE, has_flash_varlen

MAX_HEAD_DIM = 256


def refusal(query: Tensor) -> str | None:
    """Say why flash varlen can't serve queries like this [..., D], or None if it can."""
    if query.device.type != "cuda":
        return f"device {query.device.type} has no flash varlen kernel"
    if (unfit := unfit_query(query)) is not None:
        return unfit
    if torch.cuda.get_device_capability(query.device) < AMPERE:
        return f"{torch.cuda.get_device_name(query.device)} is older than Ampere (compute capability 8.0)"
    return None if has_flash_varlen() else f"torch {torch.__version__} has no flash varlen kernel with windows"


def unfit_query(query: Tensor) -> str | None:
    """Say why no card's kernels serve queries like this [..., D], or None if some do."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash varlen has no {str(query.dtype).removeprefix('torch.')}"
    if query.shape[-1] % 8 or query.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim {query.shape[-1]} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


def flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend causally inside each document; differentiable.

    Args:
        query: fp16 or bf16 [T, H, D].
        key, value: same dtype [T, H_kv, D]; H is a multiple of H_kv.
        cu_seqlens: int32 [D_b + 1] on the device.
        max_seqlen: host integer, at least the longest document.
        scale: what the scores are multiplied by.
        window: a query sees itself and the `window - 1` tokens before it; None for no limit.
    Returns:
        (out [T, H, D], log-sum-exp, two tensors of dropout's state that the backward wants).
    """
    return torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[:4]  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedBatch, scale: float, window: int | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend as `flash_varlen` does, by the batch's own metadata: none is computed here, and nothing waits.

    With sinks σ [H] output and log-sum-exp become those of a softmax that counts exp(σ): lse' = logaddexp(lse, σ) and
    out' = out · exp(lse − lse'). Flash's backward, given these, computes the gradient with sinks.
    """
    out, lse, *state = flash_varlen(q, k, v, packed.cu_seqlens, packed.max_seqlen, scale, window)
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out, lse = (out * torch.exp(lse - with_sinks).T[..., None]).to(out.dtype), with_sinks
    return out, lse, *state  # type: ignore[return-value]  # two


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: list[Tensor], packed: PackedBatch, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); `state` is what `forward` returned after the output."""
    lse, seed, unused = state
    bounds, longest = (packed.cu_seqlens,) * 2, (packed.max_seqlen,) * 2
    return torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse, *bounds, *longest, 0.0, True, seed, unused,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
