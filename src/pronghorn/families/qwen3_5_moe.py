"""Qwen3.5 with experts, text (`transformers.models.qwen3_5_moe`): Qwen3.5's mixers; a gated shared expert besides."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.qwen3_5 import MIXER_LINEARS, ROUTED, gguf_parts, gguf_unlike, gguf_values, mixer_of
from pronghorn.families.spec import FamilySpec, GatedDelta, ResidualBlock


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    return mixer_of(layer, GatedDelta()), ResidualBlock("mlp", ROUTED, before="post_attention_layernorm")


def gguf_experts(config: Any) -> dict[str, Any]:
    """Return what llama.cpp is told of routed experts beside a shared one."""
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def _values(config: Any) -> dict[str, Any]:
    return {**gguf_values(config), **gguf_experts(config)}


QWEN3_5_MOE = FamilySpec(
    model_type="qwen3_5_moe_text",
    members="Qwen3.5 and 3.6 with experts, text",
    source="transformers.models.qwen3_5_moe",
    blocks=_blocks,
    norm_offset=1.0,
    lora_targets=MIXER_LINEARS,
    refused_options={"hidden_act": ("silu",)},
    gguf=Gguf("qwen35moe", values=_values, unlike=gguf_unlike, parts=gguf_parts),
)
