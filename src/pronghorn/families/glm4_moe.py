"""GLM-4.5 (`transformers.models.glm4_moe`): partial RoPE, dense first layers, then routed and shared experts.

The router, with its correction bias and groups, and the shared experts are called; the routed experts are computed.
"""

from typing import Any

from pronghorn.families.spec import Attention, Experts, FamilySpec, GatedMLP, ResidualBlock

_SHARED = GatedMLP(tuple(f"shared_experts.{name}" for name in GatedMLP().gate_up), "shared_experts.down_proj")


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    norms = ("q_norm", "k_norm") if layer.self_attn.use_qk_norm else (None, None)
    kind = Experts(shared=_SHARED) if hasattr(layer.mlp, "experts") else GatedMLP()
    return (
        ResidualBlock("self_attn", Attention(query_norm=norms[0], key_norm=norms[1]), before="input_layernorm"),
        ResidualBlock("mlp", kind, before="post_attention_layernorm"),
    )


GLM4_MOE = FamilySpec(
    model_type="glm4_moe",
    members="GLM-4.5 and GLM-4.5-Air",
    source="transformers.models.glm4_moe",
    blocks=_blocks,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
)
