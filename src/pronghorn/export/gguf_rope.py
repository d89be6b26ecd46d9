"""Say in a GGUF file how positions rotate queries and keys: RoPE's base and dimensions, and how it is scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pronghorn.errors import UnsupportedError
from pronghorn.loading.gguf import scaled_rope

FACTORED = ("llama3", "proportional")
"""Kinds of scaling that are a tensor beside the weights (`rope_factors`)."""
_NEVER = 1e30
"""Divides a frequency into none."""


def rope_values(
    rope: Mapping[str, Any], head_dim: int, partial: bool, proportional: bool, remedy: str
) -> dict[str, Any]:
    """Return what the file says of RoPE, by the names of gguf.GGUFWriter's methods without `add_`.

    Args:
        rope: its parameters.
        head_dim: of attention.
        partial: whether the family's code reads which part of a head is rotated.
        proportional: whether the family says itself how many dimensions are rotated.
    Raises:
        UnsupportedError: a scaling that llama.cpp doesn't compute.
    """
    import gguf

    scaling = rope.get("rope_type", "default")
    if scaling not in ("default", "llama3", "linear", "yarn", *(["proportional"] if proportional else [])):
        raise UnsupportedError(f"RoPE scaling {scaling!r} is not written as GGUF here", remedy)
    found: dict[str, Any] = {
        "rope_freq_base": float(rope["rope_theta"]),
        "rope_dimension_count": int(head_dim * (rope.get("partial_rotary_factor", 1.0) if partial else 1)),
    }
    if scaling in ("linear", "yarn"):
        found["rope_scaling_type"] = gguf.RopeScalingType[scaling.upper()]
        found["rope_scaling_factor"] = float(rope["factor"])
    if scaling == "yarn":
        found["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
        found["rope_scaling_yarn_beta_fast"] = float(rope.get("beta_fast") or 32.0)
        found["rope_scaling_yarn_beta_slow"] = float(rope.get("beta_slow") or 1.0)
        found["rope_scaling_attn_factors"] = scaled_rope(rope, head_dim)[1] / _grown(rope["factor"])
    return found


def rope_note(config: Any) -> str | None:
    """Say in what llama.cpp's RoPE is always a little other than transformers', or None."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "yarn" or rope.get("truncate", True):
        return None
    return "llama.cpp begins and ends YaRN's ramp at whole frequencies (truncate: true), and this model between them"


def head_dim_of(config: Any) -> int:
    """Return the size of attention's heads, in models where all layers' are the same."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_factors(rope: Mapping[str, Any], config: Any) -> Tensor:
    """Return by what each frequency of RoPE is divided, float32 [head_dim / 2]: as Llama 3's are, or so that only the
    first pairs of a head are rotated."""
    return scaled_rope(rope, rope.get("head_dim") or head_dim_of(config))[0].clamp(max=_NEVER)


def _grown(factor: float) -> float:
    """Return YaRN's 0.1 ln(factor) + 1, by which llama.cpp multiplies unasked."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
