"""The attention function transformers calls in every layer of an attached model.

transformers looks a model's attention up by name in `AttentionInterface`. `implementation` registers one function for
each (backend, metadata) that is asked for; the names are the only trace Pronghorn leaves in the process.

    packed batch       -> by tiles, flash varlen, per document or masked, reading the metadata made once for the batch
    anything else      -> transformers' own SDPA path (padded batches, `generate()` with its cache)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pronghorn.attention.masked import masked_attention, per_document_attention
from pronghorn.attention.tiled import refusal as tiled_refusal
from pronghorn.attention.tiled import tiled_attention
from pronghorn.attention.varlen import flash_varlen, flash_varlen_packed, refusal
from pronghorn.data.batch import PackedBatch
from pronghorn.errors import ConfigError, UnsupportedError

Backend = Literal["auto", "tiled", "flash", "per_document", "masked"]
Metadata = Literal["once", "per_layer", "per_layer_mask"]
NAME_PREFIX = "pronghorn_"  # of the attention implementations registered with transformers

BACKENDS: dict[str, Callable[..., Tensor]] = {
    "tiled": tiled_attention,
    "flash": flash_varlen_packed,
    "per_document": per_document_attention,
    "masked": masked_attention,
}


def choose(backend: Backend, query: Tensor) -> tuple[str, str]:
    """The backend that serves queries like this [..., D], and why.

    Raises:
        UnsupportedError: a backend was asked for by name and can't serve them.
    """
    by_tiles, reason = tiled_refusal(query), refusal(query)
    asked = {"tiled": by_tiles, "flash": reason}.get(backend)
    if asked is not None:
        raise UnsupportedError(f"attention {backend!r} was asked for, but {asked}", "use attention='auto'")
    if backend != "auto":
        return backend, "asked for"
    if by_tiles is None:
        return "tiled", "the kernels over the batch's tiles serve this device, dtype and head size"
    if reason is None:
        return "flash", f"torch's varlen kernels; {by_tiles}"
    # On two CPU cores a row of four documents costs half as much document by document as under a dense mask.
    return "per_document", reason


def implementation(backend: Backend, metadata: Metadata) -> str:
    """Register the attention function for these choices and return its name.

    Registers the mask function as well: without one transformers drops padding masks silently. The name must not
    hold "flash" (transformers tests names for that substring).

    Raises:
        ConfigError: an unknown choice.
    """
    for key, value, known in (("attention", backend, Backend), ("packing_metadata", metadata, Metadata)):
        if value not in get_args(known):
            raise ConfigError(f"{key} {value!r} is unknown", f"use one of {', '.join(get_args(known))}")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    name = f"{NAME_PREFIX}{metadata}_{'varlen' if backend == 'flash' else backend}"
    AttentionInterface.register(name, partial(packed_attention, backend=backend, metadata=metadata))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: PackedBatch | None = None,
    *,
    backend: Backend,
    metadata: Metadata,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, by transformers' contract for attention functions.

    Args:
        query: [B, H, T/B, D]; key, value: [B, H_kv, T/B, D].
        packed: the batch's metadata; without it the call goes to transformers' SDPA path unchanged.
    Returns:
        ([B, T/B, H, D], None).
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
    if torch.is_autocast_enabled(query.device.type):  # RoPE in float32 leaves q, k and v in different dtypes
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, length, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    window = sliding_window if sliding_window is not None and sliding_window < packed.max_seqlen else None
    q_THD, k_THD, v_THD = (x.transpose(1, 2).reshape(batch * length, -1, head_dim) for x in (query, key, value))
    if metadata == "once":
        out = BACKENDS[choose(backend, query)[0]](q_THD, k_THD, v_THD, packed, scale, window)
    elif metadata == "per_layer":
        out = _metadata_in_every_layer(q_THD, k_THD, v_THD, kwargs["position_ids"], scale, window)
    else:
        out = masked_attention(q_THD, k_THD, v_THD, packed, scale, window, keep_mask=False)
    return out.reshape(batch, length, heads, head_dim), None


def _metadata_in_every_layer(
    query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor, scale: float, window: int | None
) -> Tensor:
    """Ablation: derive the metadata from `position_ids` as transformers' flash path does in every layer.

    Its own two helpers are called, so that the operations and the synchronisations are transformers', not ours.
    """
    from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids

    if not _is_packed_sequence(position_ids, batch_size=position_ids.shape[0]):
        lengths = [query.shape[0]]
        cu_seqlens = torch.tensor([0, query.shape[0]], dtype=torch.int32, device=query.device)
        max_seqlen = query.shape[0]
    else:
        (cu_seqlens, _), (longest, _) = prepare_fa_kwargs_from_position_ids(position_ids)
        lengths = None
        max_seqlen = int(longest)
    if refusal(query) is None:
        return flash_varlen(query, key, value, cu_seqlens, max_seqlen, scale, window)[0]
    lengths = lengths or cu_seqlens.diff().tolist()
    packed = PackedBatch.build(lengths, tokens=query.shape[0], device=query.device)
    return per_document_attention(query, key, value, packed, scale, window)
