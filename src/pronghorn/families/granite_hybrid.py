"""Granite 4 without state-space layers and experts (`transformers.models.granitemoehybrid`): Granite's multipliers, the
MLP under the name of the experts that every token goes through, with gate and up merged.

Its siblings with state-space layers or routed experts (granite-4.0-h) have the same model type, and are generic.
"""

from collections.abc import Sequence
from typing import Any

from pronghorn.families.gguf_spec import Gguf, Part
from pronghorn.families.granite import granite_scales
from pronghorn.families.spec import Attention, FamilySpec, GatedMLP, ResidualBlock


def _serves(config: Any) -> bool:
    kinds = set(config.layers_block_type)
    return kinds <= {"full_attention"} and not config.num_local_experts and config.position_embedding_type == "rope"


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    mlp = GatedMLP(gate_up=("input_linear",), down="output_linear", activation="activation")
    m = layer.residual_multiplier
    return (
        ResidualBlock("self_attn", Attention(), before="input_layernorm", multiplier=m),
        ResidualBlock("shared_mlp", mlp, before="post_attention_layernorm", multiplier=m),
    )


def _values(config: Any) -> dict[str, Any]:
    return {**granite_scales(config), "feed_forward_length": config.shared_intermediate_size}


def _parts(name: str, config: Any) -> Sequence[Part] | None:
    """Part gate from up: llama.cpp's Granite has both, and no experts."""
    layer, _, path = name.removeprefix("model.layers.").partition(".")
    width = config.shared_intermediate_size
    if path == "shared_mlp.input_linear.weight":
        gate, up = range(width), range(width, 2 * width)
        return [Part(f"blk.{layer}.ffn_gate.weight", rows=gate), Part(f"blk.{layer}.ffn_up.weight", rows=up)]
    if path == "shared_mlp.output_linear.weight":
        return [Part(f"blk.{layer}.ffn_down.weight")]
    return None


GRANITE_HYBRID = FamilySpec(
    model_type="granitemoehybrid",
    members="Granite 4, dense (micro)",
    source="transformers.models.granitemoehybrid",
    serves=_serves,
    blocks=_blocks,
    logit_scale=lambda config: 1 / config.logits_scaling,
    gguf=Gguf("granite", interleaved=True, values=_values, parts=_parts, biases=("attention_bias",), llama3_rope=True),
)
