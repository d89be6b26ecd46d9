"""Qwen3 (`transformers.models.qwen3`): norms of each query and key head, windows in some layers."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, llama_blocks, same_blocks, window_of_module

QWEN3_ATTENTION = Attention(query_norm="q_norm", key_norm="k_norm", window=window_of_module)

QWEN3 = FamilySpec(
    model_type="qwen3",
    members="Qwen3",
    source="transformers.models.qwen3",
    blocks=same_blocks(*llama_blocks(QWEN3_ATTENTION)),
    as_text_of=("qwen3_vl_text",),
    gguf=Gguf("qwen3"),
)
