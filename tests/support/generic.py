"""Tiny random models of families that no file of the package knows."""

from __future__ import annotations

from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"head_dim": 16, "num_heads": 8, "state_size": 16, "n_groups": 1},
    "starcoder2": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "head_dim": 16},
}


def generic_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A float32 model in training mode, its weights spread enough that every part matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SMALL, **OWN.get(model_type, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()
