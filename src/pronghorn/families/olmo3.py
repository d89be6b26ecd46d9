"""Olmo 3 (`transformers.models.olmo3`): OLMo 2's layers, windows in most, and RoPE by the kind of layer."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.olmo2 import OLMO_BLOCKS, tied_head
from pronghorn.families.spec import FamilySpec


def _unlike(config: Any) -> str | None:
    kinds = ["full_attention" if number % 4 == 3 else "sliding_attention" for number in range(config.num_hidden_layers)]
    rope, in_windows = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    if list(config.layer_types) != kinds or not config.sliding_window:
        return "windows in other layers than three of four"
    if in_windows["rope_type"] != "default" or in_windows["rope_theta"] != rope["rope_theta"]:
        return "another RoPE in windows than the unscaled one"
    return tied_head(config)


OLMO3 = FamilySpec(
    model_type="olmo3",
    members="Olmo 3",
    source="transformers.models.olmo3",
    blocks=OLMO_BLOCKS,
    gguf=Gguf(
        "olmo2",
        values=lambda config: {"sliding_window": config.sliding_window},
        unlike=_unlike,
        head_sizes=False,
        rope=lambda config: config.rope_parameters["full_attention"],
    ),
)
