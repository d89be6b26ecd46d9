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


def other_heads(config: Any) -> str | None:
    """Say in what a configuration's heads are not those of llama.cpp's model."""
    if config.tie_word_embeddings:
        return "a head that is the embeddings"
    narrow = config.hidden_size // config.num_attention_heads
    size = getattr(config, "head_dim", None) or narrow
    return None if size == narrow else f"heads of {size} and not hidden_size / num_attention_heads,"


OLMO2 = FamilySpec(
    model_type="olmo2",
    members="OLMo 2",
    source="transformers.models.olmo2",
    blocks=OLMO_BLOCKS,
    gguf=Gguf("olmo2", unlike=other_heads),
)
