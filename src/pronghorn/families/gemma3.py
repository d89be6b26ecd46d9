"""Gemma 3, text (`transformers.models.gemma3`): norms before and after each part, norms of each head, windows."""

from pronghorn.families.spec import Attention, FamilySpec, GatedMLP, ResidualBlock, same_blocks, window_of_module

GEMMA3 = FamilySpec(
    model_type="gemma3_text",
    members="Gemma 3 text",
    source="transformers.models.gemma3",
    blocks=same_blocks(
        ResidualBlock(
            "self_attn",
            Attention(query_norm="q_norm", key_norm="k_norm", window=window_of_module),
            before="input_layernorm",
            after="post_attention_layernorm",
        ),
        ResidualBlock("mlp", GatedMLP(), before="pre_feedforward_layernorm", after="post_feedforward_layernorm"),
    ),
    norm_offset=1.0,
)
