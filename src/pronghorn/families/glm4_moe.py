"""GLM-4.5 (`transformers.models.glm4_moe`): partial RoPE, dense first layers, then routed and shared experts.

The router, with its correction bias and groups, and the shared experts are called; the routed experts are computed.
"""

import re
from collections.abc import Mapping
from typing import Any

from pronghorn.families.gguf_spec import Gguf, Rows, all_rows, of_experts
from pronghorn.families.spec import Attention, Experts, FamilySpec, GatedMLP, ResidualBlock, llama_blocks

_SHARED = GatedMLP(tuple(f"shared_experts.{name}" for name in GatedMLP().gate_up), "shared_experts.down_proj")


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    norms = ("q_norm", "k_norm") if layer.self_attn.use_qk_norm else (None, None)
    kind = Experts(shared=_SHARED, float32_router=True) if hasattr(layer.mlp, "experts") else GatedMLP()
    return llama_blocks(Attention(query_norm=norms[0], key_norm=norms[1]), kind)


def _values(config: Any) -> Mapping[str, Any]:
    some = config.topk_group < config.n_group  # llama.cpp loads no file that chooses all groups
    return {
        **of_experts(config, "n_routed_experts"),
        "expert_shared_count": config.n_shared_experts,
        "expert_group_count": config.n_group if some else 1,
        "expert_group_used_count": config.topk_group if some else 1,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": config.first_k_dense_replace,
    }


def _split(name: str, config: Any) -> Mapping[str, Rows]:
    """Leave out layers beyond the model's own, which predict further tokens: transformers doesn't load them."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None and int(layer[1]) >= config.num_hidden_layers:
        return {}
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): all_rows}


GLM4_MOE = FamilySpec(
    model_type="glm4_moe",
    members="GLM-4.5 and GLM-4.5-Air",
    source="transformers.models.glm4_moe",
    blocks=_blocks,
    partial_rotary=True,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    gguf=Gguf("glm4moe", values=_values, split=_split, biases=("attention_bias",)),
)
