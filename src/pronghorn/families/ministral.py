"""Ministral 8B of 2024 (`transformers.models.ministral`): Mistral's layout, windows in some layers."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, llama_blocks, same_blocks, window_of_module

MINISTRAL = FamilySpec(
    model_type="ministral",
    members="Ministral 8B (2410)",
    source="transformers.models.ministral",
    blocks=same_blocks(*llama_blocks(Attention(window=window_of_module))),
    gguf=Gguf("llama", interleaved=True, biases=("attention_bias",), llama3_rope=True),
)
