"""Seed-OSS (`transformers.models.seed_oss`): Llama's layout, biases on q, k and v."""

from pronghorn.families.spec import LLAMA_BLOCKS, FamilySpec, same_blocks

SEED_OSS = FamilySpec(
    model_type="seed_oss",
    members="Seed-OSS",
    source="transformers.models.seed_oss",
    blocks=same_blocks(*LLAMA_BLOCKS),
    refused_options={"residual_dropout": (0, None)},
)
