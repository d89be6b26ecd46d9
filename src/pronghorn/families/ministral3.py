"""Ministral 3 (`transformers.models.ministral3`): Mistral's layout; queries grow with their position, as in Llama 4."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, llama_blocks, same_blocks, window_of_config


def _query_scale(attention: Any) -> tuple[float, int] | None:
    rope = attention.config.rope_parameters
    return rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]


MINISTRAL3 = FamilySpec(
    model_type="ministral3",
    members="Ministral 3, text",
    source="transformers.models.ministral3",
    blocks=same_blocks(*llama_blocks(Attention(window=window_of_config, query_scale=_query_scale))),
    gguf=Gguf(
        "mistral3",
        interleaved=True,
        values=lambda config: {"attn_temperature_scale": config.rope_parameters["llama_4_scaling_beta"]},
    ),
)
