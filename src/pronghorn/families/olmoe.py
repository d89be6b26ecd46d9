"""OLMoE (`transformers.models.olmoe`): queries' and keys' norms span all heads; experts in every layer."""

from pronghorn.families.spec import Attention, Experts, FamilySpec, ResidualBlock, same_blocks, window_of_config

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
    refused_options={"clip_qkv": (None,)},
)
