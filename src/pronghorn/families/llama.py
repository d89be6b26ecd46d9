"""Llama 2 and 3, CodeLlama, SmolLM (`transformers.models.llama`)."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import LLAMA_BLOCKS, FamilySpec, same_blocks

LLAMA = FamilySpec(
    model_type="llama",
    members="Llama 2 and 3, CodeLlama, SmolLM",
    source="transformers.models.llama",
    blocks=same_blocks(*LLAMA_BLOCKS),
    gguf=Gguf("llama", interleaved=True),
)
