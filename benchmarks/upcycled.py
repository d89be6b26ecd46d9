"""A real model with experts, made of a dense one: its MLP in four copies with a little noise, two for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from pronghorn.errors import UnsupportedError

EXPERTS, CHOSEN = 4, 2
NOISE = 0.05
"""Of a weight's root mean square, a copy's own."""
KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def with_experts(model: Any, noise: float = NOISE) -> Any:
    """Return a Mixtral of a Llama's weights, in their dtype; without noise it computes the same.

    Raises:
        UnsupportedError: another family, whose layers Mixtral's don't compute.
    """
    if model.config.model_type != "llama":
        raise UnsupportedError(f"--experts makes experts of a Llama's MLPs, not of {model.config.model_type!r}'s",
            "leave it out, or give a Llama as SmolLM2")  # fmt: skip
    fields = {name: getattr(model.config, name) for name in KEPT}
    config = MixtralConfig(**fields, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, sliding_window=None)
    made = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    generator = torch.Generator().manual_seed(0)

    def copies(weight: Tensor) -> Tensor:
        wide = weight.float()
        drawn = torch.randn(EXPERTS, *weight.shape, generator=generator)
        return wide + noise * wide.square().mean().sqrt() * drawn

    rest = {name: weight for name, weight in model.state_dict().items() if ".mlp." not in name}
    made.load_state_dict(rest, strict=False)
    with torch.no_grad():
        for layer, dense in zip(made.model.layers, model.model.layers, strict=True):
            gate_up = torch.cat([dense.mlp.gate_proj.weight, dense.mlp.up_proj.weight])
            layer.mlp.experts.gate_up_proj.copy_(copies(gate_up))
            layer.mlp.experts.down_proj.copy_(copies(dense.mlp.down_proj.weight))
            router = layer.mlp.gate.weight
            router.copy_(torch.randn(router.shape, generator=generator) * config.initializer_range)
    return made
