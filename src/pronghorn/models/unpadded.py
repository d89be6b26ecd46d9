"""Padded batches through the fused layers: their real tokens alone, end to end in one row, and back into their places.

    [B, L] and a mask  ->  [1, T] and a PackedBatch  ->  layers  ->  [B, L, H], zeros where there was padding

So trainers that pad (TRL's DPO, KTO, GRPO) and loops of one's own have these layers, too. It costs one synchronisation
a forward: the mask says on the host how long each sequence is. What asks for more than the last hidden states and
routers' logits, or for a cache of keys and values, what is learned from padding, and what somebody's hooks look at
inside, goes transformers' way, padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pronghorn.data.batch import TILE_ROWS, PackedBatch, coarse, round_up
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.families.spec import Attention
from pronghorn.layers.decoder import FusedLayers
from pronghorn.layers.watch import hooks_in
from pronghorn.memory.recompute import has_own_forward
from pronghorn.models.families import is_causal, longest_tail, rope_limit

LABELS = "_pronghorn_labels"
"""The attribute by which a causal LM tells its backbone its labels: a keyword would reach its loss_function, too."""
GRAPHS = "_pronghorn_graphs"
"""The attribute that holds a backbone's CUDA graphs (`models.graph`)."""
UNPADDED = "pronghorn_unpadded"
"""The keyword of (B, L, the real tokens' places in B·L) in a backbone's forward that has these tokens alone."""
_READ = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "num_items_in_batch")
_STATES = ("output_hidden_states", "output_attentions")
_SHAPELESS = ("pronghorn.", "transformers.utils.", "torch.distributed.")
"""Whose hooks don't mind how tokens lie: profile's, transformers' recorder's, FSDP2's."""
CHECKPOINTING = ("make_inputs_require_grad", "make_inputs_require_grads")
"""PEFT's and transformers' hooks of the embeddings, for reentrant checkpointing."""


def unpad(layers: FusedLayers, kwargs: dict[str, Any], tokens: Tensor, labels: Tensor | None) -> PackedBatch | None:
    """Put a padded batch's real tokens into `kwargs` in its place, and return their metadata; None: it stays.

    Args:
        layers: of a backbone.
        kwargs: of the backbone's forward.
        tokens: ids [B, L] or embeddings [B, L, H].
        labels: [B, L], unshifted, or None where nobody told.
    """
    from transformers.utils.import_utils import is_tracing

    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if is_tracing(tokens) or tokens.dim() < 2 or not tokens.numel():  # a graph has no look at a mask
        return None
    batch, length = shape = tokens.shape[:2]
    if not _is_plain(layers, kwargs, shape) or (labels is not None and labels.shape != shape):
        return None
    if mask is None:
        real, learned = np.ones(shape, bool), []
    else:  # both at once: one synchronisation
        known = [mask.bool(), *([] if labels is None else [(labels != IGNORE_INDEX).to(mask.device)])]
        real, *learned = torch.stack(known).cpu().numpy()
    lengths, first = real.sum(1), real.argmax(1)
    last = length - real[:, ::-1].argmax(1)
    if not lengths.all() or (lengths != last - first).any():  # padding inside a sequence
        return None
    if learned and (learned[0][:, 1:] & ~real[:, :-1]).any():  # predicted from padding
        return None
    if labels is None and kwargs.get("num_items_in_batch") is not None and first.any():
        return None  # a trainer keeps its labels back (label smoothing), and a first token's is predicted from padding
    count = int(lengths.sum())
    step, backbone = TILE_ROWS, layers.backbone
    graphs = backbone.__dict__.get(GRAPHS)
    if graphs is not None and not asks_for_more(backbone.config, kwargs) and graphs.may_serve(int(lengths.max())):
        step = coarse(count, step, longest_tail(backbone.config))  # a graph serves one length
    tail = round_up(count, step) - count
    if positions is not None or last.max() > count + tail:  # which may lie beyond the row
        scaled = _scaled_from(layers)
        if scaled is not None and count + tail <= scaled <= (length - 1 if positions is None else int(positions.max())):
            return None
    places = torch.from_numpy(np.flatnonzero(real)).to(tokens.device)
    taken = torch.cat([places, places[:1].expand(tail)])
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name].flatten(0, 1)[taken][None]
    positions = taken % length if positions is None else positions.expand(batch, -1).flatten()[taken]
    kwargs["position_ids"], kwargs[UNPADDED] = positions[None], (batch, length, places)
    documents = [*lengths.tolist(), *([tail] if tail else [])]
    return PackedBatch.build(documents, tokens=count + tail, padding=tail, device=tokens.device)


def _scaled_from(layers: FusedLayers) -> int | None:
    """Return the least position whose query a layer scales (Ministral 3), or None. Rows of as many tokens at most are
    computed without a look at their positions (`layers.heads`)."""
    builder, found = layers.builder, list[int]()
    for layer in layers.backbone.layers:
        for block in builder.family.blocks(layer):
            module = layer.get_submodule(block.module)
            if isinstance(block.kind, Attention) and builder.is_own(module):
                scale = block.kind.query_scale(module)
                found += [] if scale is None else [scale[1]]
    return min(found, default=None)


def _is_plain(layers: FusedLayers, kwargs: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Tell whether a forward takes tokens and a mask alone, and nobody wants layers' hidden states or attentions."""
    backbone, config = layers.backbone, layers.backbone.config
    most = rope_limit(config)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    caches = kwargs.get("use_cache")
    if caches is None:  # nobody asked: in training none is missed
        caches = getattr(config, "use_cache", True) and not (backbone.training and torch.is_grad_enabled())
    others = [value for name, value in kwargs.items() if name not in _READ and isinstance(value, Tensor)]
    returns = getattr(config, "return_dict", True) if kwargs.get("return_dict") is None else kwargs["return_dict"]
    return (
        not (caches or others or _asks(config, kwargs, *_STATES))
        and is_causal(config, kwargs)
        and bool(returns)
        # the tail is a document, too, and padding has positions that count
        and (most is None or (positions is None and max(shape[1], TILE_ROWS) <= most))
        and (mask is None or (isinstance(mask, Tensor) and mask.shape == shape))
        and (positions is None or (positions.dim() == 2 and positions.shape[1] == shape[1]))
        # without a mask transformers begins a document wherever positions don't go on
        and (positions is None or mask is not None or bool((positions.diff() == 1).all()))
        and not is_seen(layers)
    )


def asks_for_more(config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of a backbone, or its configuration, asks for more than the last hidden states: no graph has
    it."""
    return _asks(config, kwargs, *_STATES, "output_router_logits")


def _asks(config: Any, kwargs: Mapping[str, Any], *names: str) -> bool:
    return any(getattr(config, name, False) if kwargs.get(name) is None else kwargs[name] for name in names)


def is_seen(layers: FusedLayers) -> bool:
    """Tell whether somebody's hooks or forwards are inside a backbone, who may expect [B, L, ...] there."""
    backbone = layers.backbone
    beside = hooks_in(child for child in backbone.children() if child is not backbone.layers)
    hooks = [*layers.hooks(), *beside, *backbone._forward_pre_hooks.values()]  # what it gives is in its places again
    return any(map(_is_strange, hooks)) or any(
        map(has_own_forward, [backbone.get_input_embeddings(), *backbone.layers])
    )


def _is_strange(hook: Any) -> bool:
    known = str(getattr(hook, "__module__", None)).startswith(_SHAPELESS)
    return not known and getattr(hook, "__name__", None) not in CHECKPOINTING


def put_back(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Put hidden states and routers' logits of real tokens back into their places: a forward hook of the backbone."""
    if UNPADDED not in kwargs:
        return None
    batch, length, places = kwargs[UNPADDED]

    def placed(rows: Tensor) -> Tensor:
        return rows.new_zeros(batch * length, rows.shape[-1]).index_copy(0, places, rows[: len(places)])

    output.last_hidden_state = placed(output.last_hidden_state[0]).view(batch, length, -1)
    if getattr(output, "router_logits", None) is not None:
        output.router_logits = tuple(map(placed, output.router_logits))
    return output
