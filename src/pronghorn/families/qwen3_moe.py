"""Qwen3 with experts (`transformers.models.qwen3_moe`): Qwen3's attention; `mlp_only_layers` have a dense MLP."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.qwen3 import QWEN3_ATTENTION
from pronghorn.families.spec import Experts, FamilySpec, GatedMLP, ResidualBlock


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    kind = Experts() if hasattr(layer.mlp, "experts") else GatedMLP()
    return QWEN3_ATTENTION, ResidualBlock("mlp", kind, before="post_attention_layernorm")


def _experts(config: Any) -> dict[str, int]:
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def _other_layers(config: Any) -> str | None:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "dense MLPs in some layers"
    return None if config.norm_topk_prob else "weights of experts that don't sum to one"


QWEN3_MOE = FamilySpec(
    model_type="qwen3_moe",
    members="Qwen3 with experts",
    source="transformers.models.qwen3_moe",
    blocks=_blocks,
    experts=Experts(served="each"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    gguf=Gguf("qwen3moe", values=_experts, unlike=_other_layers),
)
