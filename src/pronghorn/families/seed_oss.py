"""Seed-OSS (`transformers.models.seed_oss`): Llama's layout, biases on q, k and v."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, llama_blocks, same_blocks

SEED_OSS = FamilySpec(
    model_type="seed_oss",
    members="Seed-OSS",
    source="transformers.models.seed_oss",
    blocks=same_blocks(*llama_blocks(Attention())),
    gguf=Gguf("seed_oss", biases=("attention_bias",)),
)
