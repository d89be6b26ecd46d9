"""Mistral (`transformers.models.mistral`): Llama's layout, with one window for all layers."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, llama_blocks, same_blocks, window_of_config

MISTRAL = FamilySpec(
    model_type="mistral",
    members="Mistral",
    source="transformers.models.mistral",
    blocks=same_blocks(*llama_blocks(Attention(window=window_of_config))),
    gguf=Gguf("llama", interleaved=True, llama3_rope=True),
)
