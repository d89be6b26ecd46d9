"""The attention function transformers calls in every layer of an attached model.

transformers looks a model's attention up by name in `AttentionInterface`. `implementation` registers one function for
each (backend, metadata) that is asked for; the names are the only trace Pronghorn leaves in the process.

    packed batch       -> by tiles, flash varlen, per document or masked, reading the metadata made once for the batch
    anything else      -> transformers' own SDPA path (padded batches, `generate()` with its cache); the softmax written
                          out for attention sinks, which SDPA doesn't have
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pronghorn.attention import explicit
from pronghorn.attention.backends import Backend
from pronghorn.attention.masked import masked_attention, per_document_attention, sink_attention
from pronghorn.attention.varlen import refusal
from pronghorn.data.batch import PackedBatch
from pronghorn.errors import ConfigError, UnsupportedError

Metadata = Literal["once", "per_layer", "per_layer_mask"]
NAME_PREFIX = "pronghorn_"  # of the attention implementations registered with transformers


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
    s_aux: Tensor | None = None,
    *,
    backend: Backend,
    metadata: Metadata,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention, by transformers' contract for attention functions.

    Args:
        query: [B, H, T/B, D]; key, value: [B, H_kv, T/B, D].
        packed: the batch's metadata; without it the call goes to transformers' SDPA path unchanged.
        s_aux: [H], attention sinks (transformers' name for them).
    Returns:
        ([B, T/B, H, D], None).
    """
    softcap, scale = kwargs.get("softcap"), query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed is None and (s_aux is not None or softcap is not None):
        if attention_mask is None and query.shape[2] > 1:  # further keys are a static cache's empty ones, as for SDPA
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            if kwargs.get("is_causal") is False:  # transformers makes no mask that hides nothing
                attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        out = sink_attention(query, key, value, attention_mask, scale, s_aux, dropout, softcap)
        return out.transpose(1, 2).contiguous(), None
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if packed.attended is not None:
        packed.attended.add(module)
    if torch.is_autocast_enabled(query.device.type):  # RoPE in float32 leaves q, k and v in different dtypes
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, length, head_dim = query.shape
    q_THD, k_THD, v_THD = (x.transpose(1, 2).reshape(batch * length, -1, x.shape[-1]) for x in (query, key, value))
    options = explicit.Options.choose(backend, query, packed, scale, sliding_window)
    way, window = options.way, options.binding
    if dropout or softcap is not None or value.shape[-1] != head_dim:  # which the kernels don't have
        out = per_document_attention(q_THD, k_THD, v_THD, packed, scale, window, s_aux, dropout, softcap)
        return out.reshape(batch, length, heads, -1).contiguous(), None  # some layers take a view of it
    if metadata == "per_layer_mask" or (metadata == "once" and way == "masked"):
        out = masked_attention(q_THD, k_THD, v_THD, packed, scale, window, s_aux, keep_mask=metadata == "once")
    elif metadata == "per_layer":
        if "position_ids" not in kwargs:
            told = "this model's attention is not told `position_ids`, of which this ablation makes the metadata"
            raise UnsupportedError(told, "use packing_metadata='once'")
        out = _metadata_in_every_layer(q_THD, k_THD, v_THD, kwargs["position_ids"], scale, window, s_aux)
    elif way == "per_document":
        out = per_document_attention(q_THD, k_THD, v_THD, packed, scale, window, s_aux)
    else:
        out = explicit.attention(q_THD, k_THD, v_THD, options, s_aux)
    return out.reshape(batch, length, heads, head_dim).contiguous(), None


def _metadata_in_every_layer(
    q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Derive, as an ablation, the metadata from `position_ids` as transformers' flash path does in every layer.

    Its own two helpers are called, so that the operations and the synchronisations are transformers', not ours.
    """
    from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids

    tokens, lengths = q.shape[0], None
    if _is_packed_sequence(position_ids, batch_size=position_ids.shape[0]):
        (cu_seqlens, _), (longest, _) = prepare_fa_kwargs_from_position_ids(position_ids)
    else:
        lengths, longest = [tokens], tokens
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=q.device)
    if refusal(q) is None:
        bounds: Any = SimpleNamespace(cu_seqlens=cu_seqlens, max_seqlen=int(longest))  # all that this way reads
        return explicit.attention(q, k, v, explicit.Options(bounds, scale, window, "flash"), sinks)
    packed = PackedBatch.build(lengths or cu_seqlens.diff().tolist(), tokens=tokens, device=q.device)
    return per_document_attention(q, k, v, packed, scale, window, sinks)
