"""Ministral 8B of 2024 (`transformers.models.ministral`): Mistral's layout, windows in some layers."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, GatedMLP, ResidualBlock, same_blocks, window_of_module

MINISTRAL = FamilySpec(
    model_type="ministral",
    members="Ministral 8B (2410)",
    source="transformers.models.ministral",
    blocks=same_blocks(
        ResidualBlock("self_attn", Attention(window=window_of_module), before="input_layernorm"),
        ResidualBlock("mlp", GatedMLP(), before="post_attention_layernorm"),
    ),
    gguf=Gguf("llama", interleaved=True),
)
