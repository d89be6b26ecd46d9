"""Qwen3-Next (`transformers.models.qwen3_next`): Qwen3.5's mixers, q·k·v·z by key heads; experts or a dense MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronghorn.families.gguf_spec import Gguf, Part
from pronghorn.families.qwen3_5 import ROUTED, gguf_sizes, gguf_unlike, mixed_blocks
from pronghorn.families.qwen3_5_moe import gguf_experts
from pronghorn.families.spec import FamilySpec, GatedDelta, GatedMLP, ResidualBlock

_DELTA = GatedDelta(inputs=(("in_proj_qkvz",), ("in_proj_ba",)), interleaved=True)


def _blocks(layer: Any) -> tuple[ResidualBlock, ...]:
    return mixed_blocks(layer, _DELTA, ROUTED if hasattr(layer.mlp, "experts") else GatedMLP())


def _values(config: Any) -> dict[str, Any]:
    return {**gguf_sizes(config), **gguf_experts(config)}


def _unlike(config: Any) -> str | None:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "dense MLPs in some layers"
    return gguf_unlike(config) if config.norm_topk_prob else "weights of experts that don't sum to one"


def _parts(name: str, config: Any) -> Sequence[Part] | None:
    """Sort the rows of q, k, v and z, which lie by key heads, into those of q, k and v and those of z."""
    layer, found, leaf = name.partition(".linear_attn.")
    if not found:
        return None
    block = f"blk.{layer.rpartition('.')[2]}"
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    wide = config.linear_num_value_heads // keys * config.linear_value_head_dim  # a key head's values
    starts = [head * 2 * (size + wide) for head in range(keys)]
    q, k, v, z = (
        [start + row for start in starts for row in range(*between)]
        for between in ((0, size), (size, 2 * size), (2 * size, 2 * size + wide), (2 * size + wide, 2 * (size + wide)))
    )
    channels = 2 * keys * size + keys * wide
    return {
        "in_proj_qkvz.weight": [
            Part(f"{block}.attn_qkv.weight", rows=[*q, *k, *v]),
            Part(f"{block}.attn_gate.weight", rows=z),
        ],
        "conv1d.weight": [Part(shape=(channels, config.linear_conv_kernel_dim))],
        "dt_bias": [Part(f"{block}.ssm_dt.bias")],
        "A_log": [Part(f"{block}.ssm_a", change=lambda a_log: -a_log.exp())],
        "norm.weight": [Part()],  # which has no offset
    }.get(leaf)


QWEN3_NEXT = FamilySpec(
    model_type="qwen3_next",
    members="Qwen3-Next",
    source="transformers.models.qwen3_next",
    blocks=_blocks,
    partial_rotary=True,
    norm_offset=1.0,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    refused_options={"hidden_act": ("silu",)},
    gguf=Gguf("qwen3next", values=_values, unlike=_unlike, parts=_parts),
)
