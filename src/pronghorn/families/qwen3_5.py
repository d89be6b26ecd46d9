"""Qwen3.5 and 3.6, text (`transformers.models.qwen3_5`): gated delta nets, gated attention in every fourth layer."""

from typing import Any

from pronghorn.families.spec import Attention, Experts, FamilySpec, GatedDelta, GatedMLP, ResidualBlock

GATED_ATTENTION = ResidualBlock(
    "self_attn", Attention(query_norm="q_norm", key_norm="k_norm", gated=True), before="input_layernorm"
)
MIXER_LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)

ROUTED = Experts(
    shared=GatedMLP(tuple(f"shared_expert.{name}" for name in GatedMLP().gate_up), "shared_expert.down_proj"),
    gated_shared=True,
)
"""A router with its experts, and an expert for all tokens with a gate of its own, which is called."""


def mixer_of(layer: Any, delta: GatedDelta) -> ResidualBlock:
    """Return what mixes the tokens of a layer: gated attention, or the gated delta net that is given."""
    return ResidualBlock("linear_attn", delta, "input_layernorm") if hasattr(layer, "linear_attn") else GATED_ATTENTION


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    return mixer_of(layer, GatedDelta()), ResidualBlock("mlp", GatedMLP(), before="post_attention_layernorm")


QWEN3_5 = FamilySpec(
    model_type="qwen3_5_text",
    members="Qwen3.5 and 3.6, text",
    source="transformers.models.qwen3_5",
    blocks=_blocks,
    norm_offset=1.0,
    refused_options={"hidden_act": ("silu",)},
)
