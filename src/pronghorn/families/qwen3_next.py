"""Qwen3-Next (`transformers.models.qwen3_next`): Qwen3.5's mixers, q·k·v·z by key heads; experts or a dense MLP."""

from typing import Any

from pronghorn.families.qwen3_5 import ROUTED, mixer_of
from pronghorn.families.spec import FamilySpec, GatedDelta, GatedMLP, ResidualBlock

_DELTA = GatedDelta(inputs=(("in_proj_qkvz",), ("in_proj_ba",)), interleaved=True)


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    kind = ROUTED if hasattr(layer.mlp, "experts") else GatedMLP()
    return mixer_of(layer, _DELTA), ResidualBlock("mlp", kind, before="post_attention_layernorm")


QWEN3_NEXT = FamilySpec(
    model_type="qwen3_next",
    members="Qwen3-Next",
    source="transformers.models.qwen3_next",
    blocks=_blocks,
    norm_offset=1.0,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    refused_options={"hidden_act": ("silu",)},
)
