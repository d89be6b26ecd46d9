"""Mixtral (`transformers.models.mixtral`): Mistral's attention, experts in every layer."""

from pronghorn.families.gguf_spec import Gguf, of_experts
from pronghorn.families.spec import Attention, Experts, FamilySpec, llama_blocks, same_blocks, window_of_config

MIXTRAL = FamilySpec(
    model_type="mixtral",
    members="Mixtral",
    source="transformers.models.mixtral",
    blocks=same_blocks(*llama_blocks(Attention(window=window_of_config), Experts())),
    experts=Experts(served="each"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    gguf=Gguf(
        "llama",
        interleaved=True,
        values=lambda config: of_experts(config, "num_local_experts", width=None),
        llama3_rope=True,
    ),
)
