"""Mixtral (`transformers.models.mixtral`): Mistral's attention, experts in every layer."""

from pronghorn.families.spec import Attention, Experts, FamilySpec, ResidualBlock, same_blocks, window_of_config

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
)
