"""Say in a GGUF file how positions turn queries and keys: RoPE's base and dimensions, and how it is scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import UnsupportedError
from pronghorn.families.gguf_spec import Gguf


def describe_rope(writer: Any, config: Any, form: Gguf, remedy: str) -> None:
    """Write the RoPE parameters of a model. Llama 3's scaling is a tensor beside them (`llama3_factors`).

    Raises:
        UnsupportedError: a scaling that llama.cpp doesn't compute.
    """
    import gguf

    rope = form.rope(config)
    scaling = rope.get("rope_type", "default")
    if scaling not in ("default", "llama3", "linear", "yarn"):
        raise UnsupportedError(f"RoPE scaling {scaling!r} is not written as GGUF here", remedy)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_dimension_count(int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    if scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif scaling == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32.0))
        writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1.0))
        writer.add_rope_scaling_attn_factors(_yarn_scale(rope) / _grown(rope["factor"]))


def rope_note(config: Any) -> str | None:
    """Say in what llama.cpp's RoPE is always a little other than transformers', or None."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "yarn" or rope.get("truncate", True):
        return None
    return "llama.cpp begins and ends YaRN's ramp at whole frequencies (truncate: true), and this model between them"


def head_dim(config: Any) -> int:
    """Return the size of a head."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def llama3_factors(rope: Mapping[str, Any], config: Any) -> Tensor:
    """Return by what each frequency of Llama 3's RoPE is divided, [head_dim / 2]."""
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for pair in range(head_dim(config) // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim(config))
        mix = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - mix) / rope["factor"] + mix))
    return torch.tensor(factors)


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """Return what cosines and sines are multiplied by, as transformers chooses it."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    if scales[0] and scales[1]:
        return _grown(rope["factor"], scales[0]) / _grown(rope["factor"], scales[1])
    return _grown(rope["factor"])


def _grown(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's 0.1 s ln(factor) + 1, by which llama.cpp multiplies unasked (with s = 1)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
