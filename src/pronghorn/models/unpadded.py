"""Padded batches through the fused layers: their real tokens alone, end to end in one row, and back into their places.

    [B, L] and a mask  ->  [1, T] and a PackedBatch  ->  layers  ->  [B, L, H], zeros where there was padding

So trainers that pad (TRL's DPO, KTO, GRPO, rewards) and loops of one's own have these layers, too. It costs one
synchronisation a forward: the mask says on the host how long each sequence is. What asks for more than the last hidden
states, or for a cache of keys and values, goes transformers' way, padded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pronghorn.data.batch import TILE_ROWS, PackedBatch, round_up
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.models.families import rope_limit

LABELS = "pronghorn_labels"
"""The keyword by which a causal LM tells its backbone what it was given to learn."""
UNPADDED = "pronghorn_unpadded"
"""The keyword of (B, L, the real tokens' places in B·L) in a backbone's forward that has these tokens alone."""
_READ = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
_MORE = ("output_hidden_states", "output_attentions", "output_router_logits")


def unpad(backbone: Any, kwargs: dict[str, Any], tokens: Tensor, labels: Tensor | None) -> PackedBatch | None:
    """Put a padded batch's real tokens into `kwargs` in its place, and return their metadata; None: it stays.

    Args:
        backbone: whose layers are fused.
        kwargs: of its forward.
        tokens: ids [B, L] or embeddings [B, L, H].
        labels: [B, L], unshifted, or None where nobody told.
    """
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if tokens.dim() < 2 or not _is_plain(backbone, kwargs, tokens.shape[:2]):
        return None
    batch, length = tokens.shape[:2]
    real = np.ones((batch, length), bool) if mask is None else mask.cpu().numpy().astype(bool)
    lengths, first = real.sum(1), real.argmax(1)
    last = length - real[:, ::-1].argmax(1)
    if not lengths.all() or (lengths != last - first).any():  # padding inside a sequence
        return None
    if labels is not None and mask is not None:
        begins = np.flatnonzero(first)
        if (labels.cpu().numpy()[begins, first[begins]] != IGNORE_INDEX).any():  # predicted from the padding before it
            return None
    count = int(lengths.sum())
    tail = round_up(count, TILE_ROWS) - count
    places = torch.from_numpy(np.flatnonzero(real)).to(tokens.device)
    taken = torch.cat([places, places[:1].expand(tail)])
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name].flatten(0, 1)[taken][None]
    positions = taken % length if positions is None else positions.expand(batch, -1).flatten()[taken]
    kwargs["position_ids"], kwargs[UNPADDED] = positions[None], (batch, length, places)
    documents = [*lengths.tolist(), *([tail] if tail else [])]
    return PackedBatch.build(documents, tokens=count + tail, padding=tail, device=tokens.device)


def _is_plain(backbone: Any, kwargs: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Tell whether a forward takes tokens and a mask alone, and gives the last hidden states alone."""
    config, most = backbone.config, rope_limit(backbone.config)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    learns = backbone.training and torch.is_grad_enabled()
    caches = getattr(config, "use_cache", True) if kwargs.get("use_cache") is None else kwargs["use_cache"]
    others = [value for name, value in kwargs.items() if name not in _READ and isinstance(value, Tensor)]
    asked = (getattr(config, name, False) if kwargs.get(name) is None else kwargs[name] for name in _MORE)
    noise = backbone.training and getattr(backbone.get_input_embeddings(), "neftune_noise_alpha", None)
    return (
        (learns or not caches)
        and not (others or any(asked) or noise)
        and kwargs.get("return_dict") is not False
        and (most is None or max(shape[1], TILE_ROWS) <= most)  # the tail is a document, too
        and (mask is None or (isinstance(mask, Tensor) and mask.shape == shape))
        and (positions is None or (positions.dim() == 2 and positions.shape[1] == shape[1]))
    )


def put_back(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Put the hidden states of real tokens back into their places: a forward hook of the backbone."""
    if UNPADDED not in kwargs:
        return None
    batch, length, places = kwargs[UNPADDED]
    hidden = output.last_hidden_state
    whole = hidden.new_zeros(batch * length, hidden.shape[-1]).index_copy(0, places, hidden[0, : len(places)])
    output.last_hidden_state = whole.view(batch, length, -1)
    return output
