"""Granite (`transformers.models.granite`): Llama's layout; what blocks add, and logits, have multipliers.

The embeddings' multiplier is the backbone's own affair, and attention's is its module's scaling.
"""

from dataclasses import replace
from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, ResidualBlock, llama_blocks


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    return tuple(replace(block, multiplier=layer.residual_multiplier) for block in llama_blocks(Attention()))


def granite_scales(config: Any) -> dict[str, float]:
    return {
        "attention_scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


GRANITE = FamilySpec(
    model_type="granite",
    members="Granite 3, dense",
    source="transformers.models.granite",
    blocks=_blocks,
    logit_scale=lambda config: 1 / config.logits_scaling,
    gguf=Gguf(
        "granite", interleaved=True, values=granite_scales, biases=("attention_bias", "mlp_bias"), llama3_rope=True
    ),
)
