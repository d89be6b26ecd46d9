"""gpt-oss (`transformers.models.gpt_oss`): attention sinks, windows in every other layer, experts with biases."""

from pronghorn.families.spec import Attention, Experts, FamilySpec, ResidualBlock, same_blocks, window_of_module

EXPERTS = Experts(clamped_gate="GptOssExperts._apply_gate", served="together")

GPT_OSS = FamilySpec(
    model_type="gpt_oss",
    members="gpt-oss 20b and 120b",
    source="transformers.models.gpt_oss",
    blocks=same_blocks(
        ResidualBlock("self_attn", Attention(window=window_of_module, sinks="sinks"), before="input_layernorm"),
        ResidualBlock("mlp", EXPERTS, before="post_attention_layernorm"),
    ),
    experts=EXPERTS,
    load_attention="eager",
    halved_rotary=True,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
)
