"""SmolLM3 (`transformers.models.smollm3`): every fourth layer has no RoPE; windows in some layers."""

from typing import Any

from pronghorn.families.gguf_spec import Gguf
from pronghorn.families.spec import Attention, FamilySpec, llama_blocks, same_blocks, window_of_module


def _other_rotations(config: Any) -> str | None:
    every_fourth_not = [int(number % 4 != 3) for number in range(config.num_hidden_layers)]
    return None if config.no_rope_layers == every_fourth_not else "RoPE in other layers than three of four"


SMOLLM3 = FamilySpec(
    model_type="smollm3",
    members="SmolLM3",
    source="transformers.models.smollm3",
    blocks=same_blocks(
        *llama_blocks(Attention(window=window_of_module, rotates=lambda attention: bool(attention.use_rope)))
    ),
    gguf=Gguf("smollm3", interleaved=True, unlike=_other_rotations),
)
