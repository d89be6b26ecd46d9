"""Gemma 4, text (`transformers.models.gemma4`, `gemma4_unified`): layers that share keys and values, wide heads in
layers without a window, inputs of each token and layer, experts beside a dense MLP. A layer has what its modules say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pronghorn.families.spec import (
    Attention,
    ExpertsBeside,
    FamilySpec,
    GatedMLP,
    PerLayerInput,
    ResidualBlock,
    window_of_module,
)

PER_LAYER = PerLayerInput("per_layer_input_gate", "per_layer_projection")
DENSE = "dense MLP"
BESIDE = ExpertsBeside(
    inner="post_feedforward_layernorm_2", beside=DENSE, chosen=lambda router: router.config.top_k_experts
)


def _attention(attention: Any) -> Attention:
    shared = tuple(f"{attention.layer_type} {name}" for name in "kv")
    given = attention.store_full_length_kv and attention.config.num_kv_shared_layers > 0
    if attention.is_kv_shared_layer:
        return Attention(qkv=("q_proj",), query_norm="q_norm", window=window_of_module, reads=(shared[0], shared[1]))
    values_from_keys = attention.v_proj is None
    return Attention(
        qkv=("q_proj", "k_proj") if values_from_keys else ("q_proj", "k_proj", "v_proj"),
        query_norm="q_norm",
        key_norm="k_norm",
        value_norm="v_norm",
        values_from_keys=values_from_keys,
        window=window_of_module,
        gives=(shared[0], shared[1]) if given else None,
    )


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    kind = _attention(layer.self_attn)
    mixer = ResidualBlock("self_attn", kind, before="input_layernorm", after="post_attention_layernorm")
    pre, post = "pre_feedforward_layernorm", "post_feedforward_layernorm"
    mlp: tuple[ResidualBlock, ...] = (ResidualBlock("mlp", GatedMLP(), before=pre, after=post),)
    if getattr(layer, "enable_moe_block", False):
        dense = ResidualBlock("mlp", GatedMLP(), before=pre, after=f"{post}_1", gives=DENSE)
        mlp = dense, ResidualBlock("", BESIDE, before=f"{pre}_2", after=post)
    if not getattr(layer, "hidden_size_per_layer_input", 0):
        return mixer, *mlp
    return mixer, *mlp, ResidualBlock("", PER_LAYER, before=None, after="post_per_layer_input_norm")


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the layer's own input, and k and v [T, H_kv, D] of the layers that shared theirs."""
    per_layer = args[0] if args else kwargs.get("per_layer_input")
    named = {} if per_layer is None else {PER_LAYER.reads: per_layer.flatten(0, 1)}
    for layer_type, pair in (kwargs.get("shared_kv_states") or {}).items():
        named |= {f"{layer_type} {name}": x.transpose(1, 2).flatten(0, 1) for name, x in zip("kv", pair, strict=True)}
    return named


def _emit(named: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Share k and v where transformers does, and as it lays them out: [B, H_kv, T/B, D]."""
    states, rows = kwargs["shared_kv_states"], kwargs["position_embeddings"][0].shape[0]
    for layer_type in [name.removesuffix(" k") for name in named if name.endswith(" k")]:
        if layer_type not in states:
            k, v = (named[f"{layer_type} {name}"].unflatten(0, (rows, -1)).transpose(1, 2) for name in "kv")
            states[layer_type] = k, v


def _beside_embeds(backbone: Any, input_ids: Any) -> dict[str, Any]:
    if not getattr(backbone, "hidden_size_per_layer_input", 0):
        return {}
    return {"per_layer_inputs": backbone.get_per_layer_inputs(input_ids, None)}


GEMMA4 = FamilySpec(
    model_type="gemma4_text",
    members="Gemma 4 text (E2B, E4B, 26B-A4B, 31B)",
    source="transformers.models.gemma4",
    blocks=_blocks,
    bind=_bind,
    emit=_emit,
    output_scale="layer_scalar",
    beside_embeds=_beside_embeds,
    refused_options={"use_bidirectional_attention": (None, False, "vision")},  # of text all attention is causal then
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    members="Gemma 4 text (12B)",
    source="transformers.models.gemma4_unified",
)
