"""Qwen3.5 with experts, text (`transformers.models.qwen3_5_moe`): Qwen3.5's mixers; a gated shared expert besides."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf, of_experts
from pronghorn.families.qwen3_5 import MIXER_LINEARS, ROUTED, gguf_parts, gguf_unlike, gguf_values, mixed_blocks
from pronghorn.families.spec import FamilySpec, GatedDelta


def gguf_experts(config: Any) -> dict[str, Any]:
    """Return what llama.cpp is told of routed experts beside a shared one."""
    return {**of_experts(config), "expert_shared_feed_forward_length": config.shared_expert_intermediate_size}


QWEN3_5_MOE = FamilySpec(
    model_type="qwen3_5_moe_text",
    members="Qwen3.5 and 3.6 with experts, text",
    source="transformers.models.qwen3_5_moe",
    blocks=lambda layer: mixed_blocks(layer, GatedDelta(), ROUTED),
    norm_offset=1.0,
    partial_rotary=True,
    lora_targets=MIXER_LINEARS,
    refused_options={"hidden_act": ("silu",)},
    gguf=Gguf(
        "qwen35moe",
        values=lambda config: {**gguf_values(config), **gguf_experts(config)},
        unlike=gguf_unlike,
        parts=gguf_parts,
    ),
)
