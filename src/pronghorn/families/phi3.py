"""Phi-3 and Phi-4 (`transformers.models.phi3`): merged q, k and v, merged gate and up, partial RoPE in some."""

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, GatedMLP, ResidualBlock, same_blocks, window_of_config

PHI3 = FamilySpec(
    model_type="phi3",
    members="Phi-3, Phi-4 and Phi-4-mini",
    source="transformers.models.phi3",
    blocks=same_blocks(
        ResidualBlock(
            "self_attn",
            Attention(qkv=("qkv_proj",), window=window_of_config),
            before="input_layernorm",
            dropout="resid_attn_dropout",
        ),
        ResidualBlock(
            "mlp",
            GatedMLP(gate_up=("gate_up_proj",), activation="activation_fn"),
            before="post_attention_layernorm",
            dropout="resid_mlp_dropout",
        ),
    ),
    partial_rotary=True,
    gguf=Gguf("phi3", head_sizes=False),
    refused_options={"resid_pdrop": (0, None)},
)
