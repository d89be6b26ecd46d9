"""One PackedBatch for all layers: the keyword `packed` in packed mode; in compatible mode made once a forward, from
TRL's `cu_seq_lens_*` or from `position_ids`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pronghorn.attention.packed import NAME_PREFIX
from pronghorn.data.batch import PackedBatch
from pronghorn.errors import DataError, UnsupportedError
from pronghorn.families.generic import text_config
from pronghorn.families.registry import family_of
from pronghorn.families.spec import Attention
from pronghorn.layers.build import is_own, written_in
from pronghorn.layers.decoder import STEP, FusedLayers
from pronghorn.models.families import check_windows, has_experts, is_causal, mixer_of, rope_limit
from pronghorn.models.unpadded import LABELS, unpad
from pronghorn.text import does

LAYERS = "_pronghorn_layers"
"""The attribute of an attached backbone that holds its `FusedLayers`, where it has some."""
LOSS_ROWS_ONLY = "pronghorn_loss_rows_only"
"""The keyword that says that nothing but the rows that predict a label is read of the last hidden states."""
CAUSAL_LM = "_pronghorn_causal_lm"
"""The attribute of an attached backbone that holds its causal LM, past which TRL's fused head calls the backbone."""
CACHES = ("past_key_values", "cache")
"""The keyword of a cache of keys and values: until transformers 5.23, and since."""
_MIXING = {
    "LILY": "a Lily adapter, which weighs its parts by a mean over all tokens of a batch",
    "SHADOW": "a ShadowPEFT adapter, whose own layers see the whole row",
}
"""PEFT's methods by which tokens of a row see each other, and how."""
_UNPACKED = "PEFT's virtual tokens (prefix, prompt tuning) are trained without packing"
_STOCK_METADATA = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def share_metadata(
    backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give all layers one PackedBatch, and let no mask be built: a forward pre-hook of the backbone."""
    narrow, mixes = kwargs.pop(LOSS_ROWS_ONLY, False), mixing_adapter(backbone.__dict__[CAUSAL_LM])
    labels = backbone.__dict__.pop(LABELS, None)
    packed = kwargs.get("packed")
    ids = kwargs.get("input_ids", args[0] if args else None)
    tokens: Any = ids if ids is not None else kwargs.get("inputs_embeds")
    layers: FusedLayers | None = backbone.__dict__.get(LAYERS)
    if layers is not None or has_experts(backbone.config):
        refuse_transforms()
    if packed is None:
        packed = stock_batch(kwargs, tokens)
    warn_of_attentions(backbone.config, kwargs)
    check_checkpointing(backbone.config, backbone, backbone.layers)
    implementation_now = str(backbone.config._attn_implementation)
    isolates = implementation_now.startswith(NAME_PREFIX)
    alone = tokens is not None and not args and mixes is None and cache_of(kwargs) is None
    # a data-parallel replica has the first model's layers
    if packed is None and layers is not None and layers.backbone is backbone and alone and isolates:
        packed = unpad(layers, kwargs, tokens, labels)
        tokens = tokens if packed is None else kwargs["position_ids"]
    _compute_all_rows(kwargs, packed)
    if packed is None:
        return None
    if not isolates:
        raise UnsupportedError(
            f"attention implementation {implementation_now!r} can't isolate the documents of a packed row",
            "don't change it on an attached model, or detach first",
        )
    if packed.tokens != tokens.shape[0] * tokens.shape[1]:
        raise DataError(
            f"the packed batch describes {packed.tokens} tokens but the row has {tokens.shape[0] * tokens.shape[1]}",
            f"pass the `packed` that was collated with these input_ids; {_UNPACKED}",
        )
    if (cache := cache_of(kwargs)) is not None:
        raise _packed_with(cache)
    if kwargs.get("position_ids") is None:
        raise DataError("a packed batch came without position_ids", "pass position_ids that restart in each document")
    check_causal(backbone.config, kwargs)
    check_rope(backbone, packed)
    check_mixing(mixes, packed)
    kwargs = {name: value for name, value in kwargs.items() if name not in _STOCK_METADATA}
    # transformers returns a 4-D attention_mask as it is instead of building one (which would cost a synchronisation);
    # packed attention reads `packed` and never looks at this.
    placeholder = packed.cu_seqlens.view(1, 1, 1, -1)
    if layers is not None:
        embeds = kwargs.get("inputs_embeds")
        stream = backbone.get_input_embeddings().weight if embeds is None else embeds
        kwargs[STEP] = layers.begin(packed, stream.dtype, narrow)
    if layers is None or layers.checked != layers.generation:
        check_windows(backbone)
        _check_attentions(backbone)
        if layers is not None:
            layers.checked = layers.generation
    several = len(packed.lengths) - bool(packed.padding) > 1
    if several and (layers is None or layers.attention_checked != layers.generation):
        if _strange_attentions(backbone):
            packed = replace(packed, attended=set())  # which `check_attended` looks at
        elif layers is not None:
            layers.attention_checked = layers.generation
    return args, {**kwargs, "packed": packed, "attention_mask": placeholder, "use_cache": False}


def _check_attentions(backbone: Any) -> None:
    """Refuse a layer that was put into an attached model with another model's configuration: its attention would take
    the mask's placeholder for a mask."""
    ours = backbone.config._attn_implementation
    for module in (part for layer in backbone.layers for part in layer.children()):
        config = module.__dict__.get("config")
        if config is not None and config._attn_implementation != ours:
            raise UnsupportedError(
                f"a packed row for {type(module).__name__} of another model, whose attention is "
                f"{config._attn_implementation!r}",
                "detach this model and attach it again, with the layers that it has now",
            )


def _strange_attentions(backbone: Any) -> list[Any]:
    """List the layers' attentions whose forward somebody replaced, of a family whose layers are known."""
    family = family_of(backbone.config)
    blocks = [(layer, block) for layer in backbone.layers for block in family.blocks(layer)]
    attentions = [mixer_of(layer, block.module) for layer, block in blocks if isinstance(block.kind, Attention)]
    return [each for each in attentions if not is_own(each, family)]


def check_attended(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Refuse attention that somebody put in the place of transformers' (Unsloth's patches do), and that calls no other:
    it knows nothing of documents. A forward hook of the backbone.

    Raises:
        UnsupportedError: names the class, and whose forward it has.
    """
    packed: PackedBatch | None = kwargs.get("packed")
    if packed is None or packed.attended is None:
        return
    for attention in _strange_attentions(backbone):
        if packed.attended.isdisjoint(attention.modules()):
            raise UnsupportedError(
                f"{type(attention).__name__}'s forward is {written_in(type(attention).forward)}'s in this process, and "
                "under it the documents of a row see each other",
                "train in a process where nothing replaces transformers' functions: don't import what does",
            )
    if (layers := backbone.__dict__.get(LAYERS)) is not None:
        layers.attention_checked = layers.generation


def refuse_transforms() -> None:
    """Raise UnsupportedError inside a transform of torch.func: Pronghorn's functions have no rules for these."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)  # without, torch's own error tells
    if active is not None and active():
        raise UnsupportedError(
            "torch.func (grad, vmap, jvp) of an attached model, whose functions it can't transform",
            "detach the model first",
        )


def mixing_adapter(model: Any) -> str | None:
    """Say by which of its PEFT adapters documents of a causal LM's rows see each other, or None."""
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "alora_invocation_tokens", None):
            return "aLoRA, which begins at the last invocation tokens of a row"
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind in _MIXING:
            return _MIXING[kind]
    return None


def check_causal(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedError for a packed row whose tokens are to see those after them."""
    if not is_causal(config, kwargs):
        raise UnsupportedError(
            "attention in both directions (is_causal = False) for a packed row", "leave is_causal out, or don't pack"
        )


def check_mixing(mixes: str | None, packed: PackedBatch) -> None:
    """Raise UnsupportedError for a row of several documents that see each other by an adapter."""
    if mixes is not None and len(packed.lengths) > 1:
        raise UnsupportedError(
            f"a packed row of {len(packed.lengths)} documents, padded tail included, for {mixes}",
            "train it without packing, with plain transformers and PEFT, or delete the adapter",
        )


def _packed_with(cache: str) -> DataError:
    return DataError(f"a packed batch came with {cache}", f"generate from unpacked prompts; {_UNPACKED}")


def _compute_all_rows(kwargs: dict[str, Any], packed: PackedBatch | None) -> None:
    """Let layers that share keys and values (Gemma 4) compute every row; the causal LM leaves rows out after them.

    transformers leaves them out before. Which rows are left attention would have to know, without a mask, and
    transformers sees to that for its own SDPA only. A single row that sees all keys is right: `generate()` begins so.
    """
    rows = kwargs.get("logits_to_keep")
    # for keys after the last row's, as static caches have
    has_room = any(getattr(kwargs.get(name), "is_compileable", False) for name in CACHES)
    if packed is not None or has_room or not (isinstance(rows, int) and rows == 1):
        kwargs.pop("logits_to_keep", None)


def check_rope(model: Any, packed: PackedBatch) -> None:
    """Raise UnsupportedError where the longest document of a row, or its padded tail, would change the others' RoPE."""
    most = rope_limit(text_config(model.config))
    if most is None or max(packed.lengths) < most:
        return
    if max(packed.lengths) == most:
        _forget_longer(model)
        return
    documents = packed.lengths[:-1] if packed.padding else packed.lengths
    if len(documents) > 1 or max(packed.lengths) > documents[0]:
        raise UnsupportedError(
            f"a packed row holds a document or a padded tail of {max(packed.lengths)} tokens, and beyond {most} this "
            "model's RoPE depends on the longest one, for the others in the row, too",
            f"train rows of {most} tokens at most, or without packing",
        )


def _forget_longer(model: Any) -> None:
    """Give RoPE's dynamic frequencies their first values, which a longer document of an earlier row has changed:
    transformers does so for shorter documents alone, and a row as long as the limit holds some of these."""
    for rotary in model.modules():
        types = getattr(rotary, "rope_type", None) if hasattr(rotary, "original_max_seq_len") else None
        for kind, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
            if "dynamic" in str(rope_type):
                first = torch.zeros(1, 1, device=model.device)
                rotary(first, first.long(), **({} if kind is None else {"layer_type": kind}))


def cache_of(kwargs: dict[str, Any]) -> str | None:
    """Return the name by which a forward is given a cache of keys and values, or None if it isn't."""
    return next((name for name in CACHES if kwargs.get(name) is not None), None)


def warn_of_attentions(config: Any, kwargs: dict[str, Any]) -> None:
    """Warn of `output_attentions` where Pronghorn's attention runs: the tuple will be empty."""
    asked = kwargs.get("output_attentions", getattr(config, "output_attentions", False))
    if asked and str(config._attn_implementation).startswith(NAME_PREFIX):
        told = "output_attentions: an attached model's attention has no weights to give, `attentions` stays empty; "
        warnings.warn(told + "detach the model and set its attention to eager to see them", stacklevel=2)


def check_checkpointing(config: Any, model: Any, layers: Iterable[Any]) -> None:
    """Raise UnsupportedError for a training step that would leave out the gradients of keys and values which layers
    share (Gemma 4 E2B): reentrant checkpointing has none of what a layer is given by keyword. A plan isn't reentrant.

    Args:
        layers: of the model, other modules too; looked at only where keys and values are shared.
    """
    if not (getattr(config, "num_kv_shared_layers", 0) and model.training and torch.is_grad_enabled()):
        return
    recomputed = (layer for layer in layers if getattr(layer, "gradient_checkpointing", False))
    functions = (getattr(layer, "_gradient_checkpointing_func", None) for layer in recomputed)
    if any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
        raise UnsupportedError(
            "reentrant gradient checkpointing of a model whose layers share keys and values: these get no gradient",
            "set gradient_checkpointing_kwargs={'use_reentrant': False}",
        )


def stock_batch(kwargs: dict[str, Any], tokens: Any = None) -> PackedBatch | None:
    """Return the metadata of a batch from stock collators, or None if the batch isn't packed.

    Costs one synchronisation on CUDA (the bounds become host integers). Positions [1, T] are written out in `kwargs`
    for each row of `tokens`, ids or embeddings.
    """
    position_ids, cu_seqlens = kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")
    mask = kwargs.get("attention_mask")
    if (cache := cache_of(kwargs)) is not None:
        # a prefix that PEFT trains: its positions begin after it, and a mask would come with padded documents
        trains = mask is None and torch.is_grad_enabled()
        if trains and position_ids is not None and position_ids.dim() == 2 and (position_ids.diff() <= 0).any():
            raise _packed_with(cache)
        return None
    if position_ids is None and cu_seqlens is not None:
        raise DataError("cu_seq_lens_q came without position_ids", "pass position_ids that restart in each document")
    if position_ids is None or position_ids.dim() != 2:
        return None
    if mask is not None:
        if (
            isinstance(mask, Tensor)
            and mask.dim() == 2
            and ((position_ids[:, 1:] == 0) & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)).any()
        ):
            raise DataError(
                "position_ids restart inside a row that came with an attention_mask, which can't isolate documents",
                "leave attention_mask out of packed batches",
            )
        return None
    if cu_seqlens is None and tokens is not None and len(position_ids) == 1:
        position_ids = kwargs["position_ids"] = position_ids.expand(len(tokens), -1)
    flat = position_ids.flatten()
    if cu_seqlens is None:
        starts = (flat == 0).nonzero().flatten().tolist()
        rows, row_tokens = position_ids.shape
        row_starts = sum(start % row_tokens == 0 for start in starts)
        if row_starts == len(starts):
            return None  # one document a row, starting at 0 (or a continuation): transformers' causal path isolates it
        if others := max(rows - row_starts, 0):
            raise DataError(
                f"packed position_ids: {others} of {rows} rows {does(others, 'begin')} elsewhere than at 0",
                "start each row with a new document",
            )
        bounds = [*starts, flat.numel()]
    else:
        bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds) if end > start]
    return PackedBatch.build(lengths, tokens=flat.numel(), device=flat.device)
