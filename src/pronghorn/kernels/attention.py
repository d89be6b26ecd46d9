"""Causal attention inside the documents of a packed row, tile by tile, forward and backward.

    s_ij = scale · q_i·k_j        p_ij = exp(s_ij − lse_i)        o_i = Σ_j p_ij v_j        j ≤ i, same document
    dv_j = Σ_i p_ij do_i          ds_ij = p_ij (do_i·v_j − δ_i)   δ_i = do_i·o_i
    dq_i = scale · Σ_j ds_ij k_j          dk_j = scale · Σ_i ds_ij q_i

A head may have a sink, a learned score σ that takes part in the softmax and has no value (gpt-oss): lse_i then counts
exp(σ), nothing else changes, and dσ = −Σ_i exp(σ − lse_i) δ_i.

Source: FlashAttention-2, Dao 2023, arXiv:2307.08691. Its varlen kernels launch (documents × longest / 128) blocks a
head, nearly all of them empty where documents are short, add dq atomically and write dk and dv once for each query
head. Here a list of tiles, made once a batch, says where the work is; each tile's owner writes it once, so results
don't vary from run to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], lse [H, T]: base-2 logarithm of the sum of exp(s), in float32, or float64).

    Args:
        q: [T, H, D]; k, v: [T, H_kv, D], of any strides but for the last (slices of one product, for instance).
        tiles: int32 [N, 3], each tile's first row and its document's start and end; empty where first ≥ end.
        tile_rows: rows of a tile, of which those past its document's end are nobody's.
        window: a query sees itself and the `window - 1` tokens before it; None for no limit.
        sinks: [H], any float dtype, or None.
    """
    if q.is_cuda:
        from pronghorn.kernels.attention_triton import forward as launch

        return launch(q, k, v, tiles, tile_rows, scale, window, sinks)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=wide)
    for start, end in _documents(tiles):
        scores = _scores(q[start:end], k[start:end], scale, window)
        total = torch.logsumexp(scores, -1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks[:, None].to(wide))
        lse[:, start:end] = total * LOG2_E
        p = torch.exp(scores - total[..., None])
        out[start:end] = (p.to(q.dtype) @ _heads_first(v[start:end], q.shape[1])).transpose(0, 1)
    return out, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """[T, H + 2·H_kv, D]: dq, dk and dv side by side, as one product of q, k and v leaves them.

    Args: those of `forward` (lse has counted the sinks), its results, and d_out [T, H, D], contiguous.
    """
    if q.is_cuda:
        from pronghorn.kernels.attention_triton import backward as launch

        return launch(d_out, q, k, v, out, lse, tiles, tile_rows, scale, window)
    heads, kv_heads = q.shape[1], k.shape[1]
    grads = q.new_empty(q.shape[0], heads + 2 * kv_heads, q.shape[2])
    for start, end in _documents(tiles):
        rows = slice(start, end)
        p = torch.exp2(_scores(q[rows], k[rows], scale, window) * LOG2_E - lse[:, rows, None])
        do, o = d_out[rows].transpose(0, 1), out[rows].transpose(0, 1)
        delta = (do.to(p.dtype) * o.to(p.dtype)).sum(-1, keepdim=True)
        dv = p.to(q.dtype).mT @ do
        ds = (p * ((do @ _heads_first(v[rows], heads).mT).to(p.dtype) - delta)).to(q.dtype)
        dq = (ds @ _heads_first(k[rows], heads)) * scale
        dk = (ds.mT @ q[rows].transpose(0, 1)) * scale
        shared = [x.unflatten(0, (kv_heads, -1)).sum(1) for x in (dk, dv)]
        grads[rows] = torch.cat([dq, *shared]).transpose(0, 1).to(q.dtype)
    return grads


def sink_grad(sinks: Tensor, d_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """[H], in the sinks' dtype.

    Args:
        sinks: [H].
        d_out, out: [T, H, D].
        lse: [H, T], natural logarithm, the sinks counted.
    """
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T
    return -(torch.exp(sinks[:, None].to(lse.dtype) - lse) * delta).sum(1).to(sinks.dtype)


def _documents(tiles: Tensor) -> list[tuple[int, int]]:
    return sorted({(start, end) for first, start, end in tiles.tolist() if first < end})


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """[L, H_kv, D] to [H, L, D], each head repeated for the queries that share it."""
    return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)


def _scores(q: Tensor, k: Tensor, scale: float, window: int | None) -> Tensor:
    """[H, L, L] in float32 (float64), −inf where a query doesn't look."""
    scores = q.transpose(0, 1) @ _heads_first(k, q.shape[1]).mT
    position = torch.arange(q.shape[0])
    distance = position[:, None] - position[None, :]
    hidden = (distance < 0) | (distance >= (window or q.shape[0]))
    wide = torch.promote_types(q.dtype, torch.float32)
    return (scores.to(wide) * scale).masked_fill(hidden, float("-inf"))
