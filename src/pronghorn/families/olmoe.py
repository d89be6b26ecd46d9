"""OLMoE (`transformers.models.olmoe`): queries' and keys' norms span all heads; experts in every layer."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, Experts, FamilySpec, ResidualBlock, same_blocks, window_of_config


def _experts(config: Any) -> dict[str, int]:
    return {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}


def _other_weights(config: Any) -> str | None:
    if config.num_key_value_heads != config.num_attention_heads:
        return "fewer heads of keys than of queries"
    return "weights of experts that sum to one" if config.norm_topk_prob else None


OLMOE = FamilySpec(
    model_type="olmoe",
    members="OLMoE",
    source="transformers.models.olmoe",
    blocks=same_blocks(
        ResidualBlock(
            "self_attn",
            Attention(query_norm="q_norm", key_norm="k_norm", norms_span="all heads", window=window_of_config),
            before="input_layernorm",
        ),
        ResidualBlock("mlp", Experts(), before="post_attention_layernorm"),
    ),
    experts=Experts(served="each"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    gguf=Gguf("olmoe", values=_experts, unlike=_other_weights),
    refused_options={"clip_qkv": (None,)},
)
