"""SmolLM3 (`transformers.models.smollm3`): every fourth layer has no RoPE; windows in some layers."""

from pronghorn.families.spec import Attention, FamilySpec, GatedMLP, ResidualBlock, same_blocks, window_of_module

SMOLLM3 = FamilySpec(
    model_type="smollm3",
    members="SmolLM3",
    source="transformers.models.smollm3",
    blocks=same_blocks(
        ResidualBlock(
            "self_attn",
            Attention(window=window_of_module, rotates=lambda attention: bool(attention.use_rope)),
            before="input_layernorm",
        ),
        ResidualBlock("mlp", GatedMLP(), before="post_attention_layernorm"),
    ),
)
