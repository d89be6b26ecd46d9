"""Qwen3.5 with experts, text (`transformers.models.qwen3_5_moe`): Qwen3.5's mixers; a gated shared expert besides."""

from typing import Any

from pronghorn.families.qwen3_5 import MIXER_LINEARS, ROUTED, mixer_of
from pronghorn.families.spec import FamilySpec, GatedDelta, ResidualBlock


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    return mixer_of(layer, GatedDelta()), ResidualBlock("mlp", ROUTED, before="post_attention_layernorm")


QWEN3_5_MOE = FamilySpec(
    model_type="qwen3_5_moe_text",
    members="Qwen3.5 and 3.6 with experts, text",
    source="transformers.models.qwen3_5_moe",
    blocks=_blocks,
    norm_offset=1.0,
    lora_targets=MIXER_LINEARS,
    refused_options={"hidden_act": ("silu",)},
)
