"""Qwen3 with experts (`transformers.models.qwen3_moe`): Qwen3's attention; `mlp_only_layers` have a dense MLP."""

from typing import Any

from pronghorn.families.qwen3 import QWEN3_ATTENTION
from pronghorn.families.spec import Experts, FamilySpec, GatedMLP, ResidualBlock


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    kind = Experts() if hasattr(layer.mlp, "experts") else GatedMLP()
    return QWEN3_ATTENTION, ResidualBlock("mlp", kind, before="post_attention_layernorm")


QWEN3_MOE = FamilySpec(
    model_type="qwen3_moe",
    members="Qwen3 with experts",
    source="transformers.models.qwen3_moe",
    blocks=_blocks,
    experts=Experts(served="each"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
)
