"""Mistral (`transformers.models.mistral`): Llama's layout, with one window for all layers."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, GatedMLP, ResidualBlock, same_blocks, window_of_config

MISTRAL = FamilySpec(
    model_type="mistral",
    members="Mistral",
    source="transformers.models.mistral",
    blocks=same_blocks(
        ResidualBlock("self_attn", Attention(window=window_of_config), before="input_layernorm"),
        ResidualBlock("mlp", GatedMLP(), before="post_attention_layernorm"),
    ),
    gguf=Gguf("llama", interleaved=True),
)
