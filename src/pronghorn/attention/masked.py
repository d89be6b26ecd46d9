"""Packed attention in plain torch: one SDPA call a document, or one dense mask for the row.

Both are references for the flash path. Document by document is what serves where flash can't (float32, the CPU); the
dense mask is for backends that need one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pronghorn.data.batch import PackedBatch


def per_document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedBatch,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Attend causally, one SDPA call for each document: [T, H, D] and [T, H_kv, D] to [T, H, D]; sinks: [H].

    The bounds are host integers, so nothing waits for the device.
    """
    rows = _heads_first(q, k, v)
    outputs = []
    for start, end in packed.segments:
        band = None
        if window is not None and end - start > window:
            position = torch.arange(end - start, device=rows[0].device)
            distance = position[:, None] - position[None, :]
            band = (distance >= 0) & (distance < window)
        q, k, v = (x[None, :, start:end] for x in rows)
        if sinks is not None or softcap is not None:
            out = sink_attention(q, k, v, band, scale, sinks, dropout, softcap)
        else:
            out = scaled_dot_product_attention(q, k, v, band, dropout, is_causal=band is None, scale=scale)
        outputs.append(out[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    *,
    keep_mask: bool = True,
) -> Tensor:
    """Attend causally under the batch's dense mask: [T, H, D] and [T, H_kv, D] to [T, H, D].

    The mask is built by the first layer that asks and kept on the batch (`keep_mask=False` is for ablations).
    """
    q_HTD, k_HTD, v_HTD = _heads_first(query, key, value)
    mask = packed.dense_mask(window, keep=keep_mask)
    q, k, v = q_HTD[None], k_HTD[None], v_HTD[None]
    if sinks is not None:
        out = sink_attention(q, k, v, mask, scale, sinks)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Attend with one more score in the softmax, the head's sink, which has no value (Xiao et al. 2023,
    arXiv:2309.17453; trained in gpt-oss). All scores at once: SDPA has no sinks.

    Args:
        query: [B, H, L, D]; key, value: [B, H_kv, S, D].
        mask: [..., L, S], booleans (True where a query looks) or what is added to scores; None: a query, of which the
            last one is the last key's, looks at every key up to its own.
        sinks: [H], or None.
        dropout: of the probabilities.
        softcap: c of c · tanh(score / c).
    Returns:
        [B, H, L, D].
    """
    groups, length, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    if mask is None:
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    least = torch.finfo(scores.dtype).min  # and not -inf: padding may look nowhere, and must not become NaN
    scores = scores.masked_fill(~mask, least) if mask.dtype is torch.bool else scores + mask
    if sinks is None:
        shares = scores.softmax(-1)
    else:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    if dropout:
        shares = torch.nn.functional.dropout(shares, dropout)
    return shares.to(value.dtype) @ value


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn [T, H, D] to [H, T, D], keys and values repeated for grouped heads."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
