"""Gemma 3, text (`transformers.models.gemma3`): norms before and after each part, norms of each head, windows."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, GatedMLP, ResidualBlock, same_blocks, window_of_module

LARGEST = 62
"""Layers of the 27B model, by which llama.cpp knows its scale of attention."""


def _windows(config: Any) -> dict[str, Any]:
    return {
        "sliding_window": config.sliding_window,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope_freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }


def _other_layers(config: Any) -> str | None:
    kinds = ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(config.num_hidden_layers)]
    wide = config.hidden_size // config.num_attention_heads
    scale = wide if config.num_hidden_layers == LARGEST else config.head_dim
    if list(config.layer_types) != kinds:
        return "windows in other layers than five of six"
    if config.query_pre_attn_scalar != scale:
        return f"attention scaled by {config.query_pre_attn_scalar}, not {scale},"
    if config.rope_parameters["full_attention"]["rope_type"] == "yarn":
        return "YaRN beside windows"
    return "attention in both directions" if config.use_bidirectional_attention else None


GEMMA3 = FamilySpec(
    model_type="gemma3_text",
    members="Gemma 3 text",
    source="transformers.models.gemma3",
    blocks=same_blocks(
        ResidualBlock(
            "self_attn",
            Attention(query_norm="q_norm", key_norm="k_norm", window=window_of_module),
            before="input_layernorm",
            after="post_attention_layernorm",
        ),
        ResidualBlock("mlp", GatedMLP(), before="pre_feedforward_layernorm", after="post_feedforward_layernorm"),
    ),
    norm_offset=1.0,
    float16=False,  # 103,821 after layer 14 of the 270M model, on questions of GSM8K
    gguf=Gguf(
        "gemma3",
        values=_windows,
        unlike=_other_layers,
        activation="gelu_pytorch_tanh",
        rope=lambda config: config.rope_parameters["full_attention"],
    ),
)
