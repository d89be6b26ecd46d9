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
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, scale: float, window: int | None
) -> Tensor:
    """Causal attention, one SDPA call for each document: [T, H, D] and [T, H_kv, D] to [T, H, D].

    The bounds are host integers, so nothing waits for the device.
    """
    q_HTD, k_HTD, v_HTD = _heads_first(query, key, value)
    outputs = []
    for start, end in packed.segments:
        length = end - start
        band = None
        if window is not None and length > window:
            position = torch.arange(length, device=query.device)
            distance = position[:, None] - position[None, :]
            band = (distance >= 0) & (distance < window)
        outputs.append(
            scaled_dot_product_attention(
                q_HTD[None, :, start:end],
                k_HTD[None, :, start:end],
                v_HTD[None, :, start:end],
                attn_mask=band,
                is_causal=band is None,
                scale=scale,
            )[0]
        )
    return torch.cat(outputs, dim=1).transpose(0, 1)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    scale: float,
    window: int | None,
    *,
    keep_mask: bool = True,
) -> Tensor:
    """Causal attention under the batch's dense mask: [T, H, D] and [T, H_kv, D] to [T, H, D].

    The mask is built by the first layer that asks and kept on the batch (`keep_mask=False` is for ablations).
    """
    q_HTD, k_HTD, v_HTD = _heads_first(query, key, value)
    mask = packed.dense_mask(window, keep=keep_mask)
    out = scaled_dot_product_attention(q_HTD[None], k_HTD[None], v_HTD[None], attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H, D] to [H, T, D], keys and values repeated for grouped heads."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
