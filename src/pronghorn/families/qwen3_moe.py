"""Qwen3 with experts (`transformers.models.qwen3_moe`): Qwen3's attention; `mlp_only_layers` have a dense MLP."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf, of_experts
from pronghorn.families.qwen3 import QWEN3_ATTENTION
from pronghorn.families.spec import Experts, FamilySpec, GatedMLP, ResidualBlock, llama_blocks


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    return llama_blocks(QWEN3_ATTENTION, Experts() if hasattr(layer.mlp, "experts") else GatedMLP())


def _other_layers(config: Any) -> str | None:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "dense MLPs in some layers"
    return None if config.norm_topk_prob else "weights of experts that don't sum to one"


QWEN3_MOE = FamilySpec(
    model_type="qwen3_moe",
    members="Qwen3 with experts",
    source="transformers.models.qwen3_moe",
    blocks=_blocks,
    experts=Experts(served="each"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    gguf=Gguf("qwen3moe", values=of_experts, unlike=_other_layers),
)
