"""Llama 2 and 3, CodeLlama, SmolLM (`transformers.models.llama`)."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, llama_blocks, same_blocks

LLAMA = FamilySpec(
    model_type="llama",
    members="Llama 2 and 3, CodeLlama, SmolLM",
    source="transformers.models.llama",
    blocks=same_blocks(*llama_blocks(Attention())),
    gguf=Gguf("llama", interleaved=True, biases=("attention_bias", "mlp_bias"), llama3_rope=True),
)
