"""Gemma 4, text (`transformers.models.gemma4`, `gemma4_unified`): layers that share keys and values, wide heads in
layers without a window, inputs of each token and layer, experts beside a dense MLP. A layer has what its modules say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pronghorn.families.gguf_spec import Gguf, Part
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


def _full_rope(config: Any) -> dict[str, Any]:
    return {**config.rope_parameters["full_attention"], "head_dim": _head_dim(config, "full_attention")}


def _head_dim(config: Any, kind: str) -> int:
    """Return the size of heads in layers of a kind, which is one; where there are none, another layer's."""
    number = config.layer_types.index(kind) if kind in config.layer_types else 0
    return int(config.per_layer_config[number].head_dim)


def _per_layer(config: Any) -> int:
    """Return the size of a token's input of each layer; 0 where a configuration knows none (`gemma4_unified`)."""
    return getattr(config, "hidden_size_per_layer_input", 0)


def _gguf_values(config: Any) -> dict[str, Any]:
    wide, narrow = _head_dim(config, "full_attention"), _head_dim(config, "sliding_attention")
    layers, first_shared = range(config.num_hidden_layers), config.num_hidden_layers - config.num_kv_shared_layers
    doubled = [config.use_double_wide_mlp and number >= first_shared for number in layers]
    experts: dict[str, Any] = {}
    if getattr(config, "enable_moe_block", False):
        experts = {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return {
        **experts,
        "feed_forward_length": [config.intermediate_size * (1 + double) for double in doubled],
        "head_count_kv": [config.per_layer_config[number].num_key_value_heads for number in layers],
        "key_length": wide,
        "value_length": wide,
        "key_length_swa": narrow,
        "value_length_swa": narrow,
        "rope_dimension_count": wide,
        "rope_dimension_count_swa": narrow,
        "rope_freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "sliding_window": config.sliding_window,
        "sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": _per_layer(config),
        "final_logit_softcapping": config.final_logit_softcapping or 0.0,  # 30 unless llama.cpp is told
    }


def _gguf_unlike(config: Any) -> str | None:
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    ropes = [config.rope_parameters[kind] for kind in ("sliding_attention", "full_attention")]
    scaled = [rope["rope_type"] for rope in ropes] != ["default", "proportional"] or ropes[1].get("factor", 1.0) != 1.0
    own = getattr(config, "vocab_size_per_layer_input", config.vocab_size)
    if config.num_kv_shared_layers and list(config.layer_types[:first_shared][-2:]) != [
        "sliding_attention",
        "full_attention",
    ]:
        return "shared keys and values of other layers than a last one with a window and then one without"
    if _per_layer(config) and own != config.vocab_size:
        return f"{own} tokens with inputs of each layer, of {config.vocab_size},"
    return "another RoPE than Gemma 4's" if scaled else None


def _gguf_parts(name: str, config: Any) -> Sequence[Part] | None:
    layer, _, leaf = name.partition(".router.")
    block = f"blk.{layer.rpartition('.')[2]}"
    scales = {"scale": f"{block}.ffn_gate_inp.scale", "per_expert_scale": f"{block}.ffn_down_exps.scale"}
    return [Part(scales[leaf])] if leaf in scales else None


_TURNS_TO_READ = (
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)

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
    gguf=Gguf(
        "gemma4",
        values=_gguf_values,
        unlike=_gguf_unlike,
        activation="gelu_pytorch_tanh",
        rope=_full_rope,
        parts=_gguf_parts,
        merged_pieces="gemma4",
        shown=_TURNS_TO_READ,
    ),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    members="Gemma 4 text (12B)",
    source="transformers.models.gemma4_unified",
)
