"""OLMoE (`transformers.models.olmoe`): queries' and keys' norms span all heads; experts in every layer."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf, of_experts
from pronghorn.families.spec import Attention, Experts, FamilySpec, llama_blocks, same_blocks


def _other_weights(config: Any) -> str | None:
    if config.num_key_value_heads != config.num_attention_heads:
        return "fewer heads of keys than of queries"
    return "weights of experts that sum to one" if config.norm_topk_prob else None


OLMOE = FamilySpec(
    model_type="olmoe",
    members="OLMoE",
    source="transformers.models.olmoe",
    blocks=same_blocks(
        *llama_blocks(
            Attention(query_norm="q_norm", key_norm="k_norm", norms_span="all heads"),
            Experts(),
        )
    ),
    experts=Experts(served="each"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    gguf=Gguf("olmoe", values=lambda config: of_experts(config, width=None), unlike=_other_weights, head_sizes=False),
    # transformers' flash attention has a window, where the configuration holds one, and its masks have none
    refused_options={"clip_qkv": (None,), "sliding_window": (None,)},
)
