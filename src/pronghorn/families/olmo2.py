"""OLMo 2 (`transformers.models.olmo2`): norms after the blocks only; queries' and keys' norms span all heads."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, GatedMLP, ResidualBlock, same_blocks, window_of_module

OLMO_BLOCKS = same_blocks(
    ResidualBlock(
        "self_attn",
        Attention(query_norm="q_norm", key_norm="k_norm", norms_span="all heads", window=window_of_module),
        after="post_attention_layernorm",
    ),
    ResidualBlock("mlp", GatedMLP(), after="post_feedforward_layernorm"),
)
"""OLMo 2's layers have no windows, some of Olmo 3's have."""


def tied_head(config: Any) -> str | None:
    """Say so of a configuration whose head llama.cpp would look for."""
    return "a head that is the embeddings" if config.tie_word_embeddings else None


OLMO2 = FamilySpec(
    model_type="olmo2",
    members="OLMo 2",
    source="transformers.models.olmo2",
    blocks=OLMO_BLOCKS,
    gguf=Gguf("olmo2", unlike=tied_head, head_sizes=False),
)
