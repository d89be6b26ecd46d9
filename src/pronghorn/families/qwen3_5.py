"""Qwen3.5 and 3.6, text (`transformers.models.qwen3_5`): gated delta nets, gated attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronghorn.families.gguf_spec import Gguf, Part
from pronghorn.families.spec import (
    Attention,
    BlockKind,
    Experts,
    FamilySpec,
    GatedDelta,
    GatedMLP,
    ResidualBlock,
    llama_blocks,
)

GATED_ATTENTION = Attention(query_norm="q_norm", key_norm="k_norm", gated=True)
MIXER_LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)

ROUTED = Experts(
    shared=GatedMLP(tuple(f"shared_expert.{name}" for name in GatedMLP().gate_up), "shared_expert.down_proj"),
    gated_shared=True,
)
"""A router with its experts, and an expert for all tokens with a gate of its own, which is called."""


def mixed_blocks(layer: Any, delta: GatedDelta, feed_forward: BlockKind) -> tuple[ResidualBlock, ...]:
    """Describe a layer whose tokens are mixed by gated attention, or by the gated delta net that is given."""
    attention, after = llama_blocks(GATED_ATTENTION, feed_forward)
    has_delta = hasattr(layer, "linear_attn")
    return ResidualBlock("linear_attn", delta, attention.before) if has_delta else attention, after


def gguf_sizes(config: Any) -> dict[str, Any]:
    """Return what llama.cpp is told of gated delta nets, and of the layers that have none."""
    return {
        "ssm_conv_kernel": config.linear_conv_kernel_dim,
        "ssm_state_size": config.linear_key_head_dim,
        "ssm_group_count": config.linear_num_key_heads,
        "ssm_time_step_rank": config.linear_num_value_heads,
        "ssm_inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": _interval(config),
    }


def gguf_values(config: Any) -> dict[str, Any]:
    """Return what a file says of a Qwen3.5, whose frequencies belong to three dimensions of positions in turns."""
    pairs = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
    return {
        **gguf_sizes(config),
        "rope_dimension_sections": [*(len(range(kind, pairs, 3)) for kind in range(3)), 0],
    }


def gguf_unlike(config: Any) -> str | None:
    """Say what llama.cpp's mixers of Qwen3.5 and Qwen3-Next can't be told."""
    interval = _interval(config)
    kinds = [
        "linear_attention" if number % interval else "full_attention"
        for number in range(1, len(config.layer_types) + 1)
    ]
    rope = config.rope_parameters["rope_type"]
    if config.linear_key_head_dim != config.linear_value_head_dim:
        return (
            f"keys of {config.linear_key_head_dim} and values of {config.linear_value_head_dim} in a delta net's head"
        )
    if list(config.layer_types) != kinds:
        return "full attention in other layers than every so many"
    return None if rope == "default" else f"RoPE scaling {rope!r}"


def gguf_parts(name: str, config: Any) -> Sequence[Part] | None:
    """Reorder the value heads of a gated delta net, as llama.cpp pairs value head i with key head i mod (key heads),
    where transformers pairs it with i ÷ (value heads of a key head)."""
    layer, found, leaf = name.partition(".linear_attn.")
    if not found:
        return None
    number, size = layer.rpartition(".")[2], config.linear_value_head_dim
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    heads = [key * each + value for value in range(each) for key in range(keys)]
    before = 2 * keys * config.linear_key_head_dim  # rows of q and k
    values = [head * size + row for head in heads for row in range(size)]
    all_rows = [*range(before), *(before + row for row in values)]
    part = {
        "in_proj_qkv.weight": Part(rows=all_rows),
        "conv1d.weight": Part(rows=all_rows, shape=(len(all_rows), config.linear_conv_kernel_dim)),
        "in_proj_z.weight": Part(rows=values),
        "in_proj_a.weight": Part(rows=heads),
        "in_proj_b.weight": Part(rows=heads),
        "dt_bias": Part(f"blk.{number}.ssm_dt.bias", rows=heads),
        "A_log": Part(f"blk.{number}.ssm_a", rows=heads, change=lambda a_log: -a_log.exp()),
        "norm.weight": Part(),  # which has no offset
        "out_proj.weight": Part(columns=values),
    }.get(leaf)
    return None if part is None else [part]


def _interval(config: Any) -> int:
    """Return after how many layers there is one of full attention, going by the first."""
    kinds = list(config.layer_types)
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1


QWEN3_5 = FamilySpec(
    model_type="qwen3_5_text",
    members="Qwen3.5 and 3.6, text",
    source="transformers.models.qwen3_5",
    blocks=lambda layer: mixed_blocks(layer, GatedDelta(), GatedMLP()),
    norm_offset=1.0,
    partial_rotary=True,
    refused_options={"hidden_act": ("silu",)},
    gguf=Gguf("qwen35", values=gguf_values, unlike=gguf_unlike, parts=gguf_parts),
)
