"""Qwen2 and Qwen2.5 (`transformers.models.qwen2`): biases on q, k and v, windows in some layers."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, llama_blocks, same_blocks, window_of_module

QWEN2 = FamilySpec(
    model_type="qwen2",
    members="Qwen2 and Qwen2.5",
    source="transformers.models.qwen2",
    blocks=same_blocks(*llama_blocks(Attention(window=window_of_module))),
    as_text_of=("qwen2_vl_text", "qwen2_5_vl_text"),
    gguf=Gguf("qwen2", head_sizes=False),
)
