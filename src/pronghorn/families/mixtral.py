"""Mixtral (`transformers.models.mixtral`): Mistral's attention, experts in every layer."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, Experts, FamilySpec, ResidualBlock, same_blocks, window_of_config


def _experts(config: Any) -> dict[str, int]:
    return {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}


MIXTRAL = FamilySpec(
    model_type="mixtral",
    members="Mixtral",
    source="transformers.models.mixtral",
    blocks=same_blocks(
        ResidualBlock("self_attn", Attention(window=window_of_config), before="input_layernorm"),
        ResidualBlock("mlp", Experts(), before="post_attention_layernorm"),
    ),
    experts=Experts(served="each"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    gguf=Gguf("llama", interleaved=True, values=_experts),
)
