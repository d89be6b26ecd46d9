"""Tiny random models of every family Pronghorn serves, and packed rows for them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from pronghorn.data.batch import Collator
from pronghorn.families.registry import FAMILIES as FAMILY_FACTS

stock_loss_on_cpu = pytest.mark.skipif(
    not hasattr(importlib.import_module("trl.kernels.chunked_logprob"), "_use_triton"),
    reason="TRL before 1.16 computes its loss with Triton only; tests/project/test_gpu.py has this mode",
)

VOCAB = 131
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
}
_DELTA: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
# A window shorter than the documents, so that it must be right inside them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 16},
    "qwen3_5_text": {**_DELTA},
}

_ROUTED = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **_ROUTED,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_moe": {**_ROUTED, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "mixtral": {**_ROUTED, "intermediate_size": 24, "sliding_window": 7},
    "olmoe": {**_ROUTED, "intermediate_size": 24},
    "qwen3_5_moe_text": {**_ROUTED, **_DELTA, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_next": {**_ROUTED, **_DELTA, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
}

DELTA_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""With gated delta nets, and gated attention in every second layer."""


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A float32 model in training mode, its weights spread enough that every part matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_COMMON, **(FAMILIES | MOE_FAMILIES)[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        stock = FAMILY_FACTS[family].load_attention
        model = AutoModelForCausalLM.from_config(config, attn_implementation=stock)
        if family in MOE_FAMILIES:
            model.set_experts_implementation("eager")  # the others have no float64
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def packed_row(lengths: list[int], row_tokens: int, vocab: int = VOCAB, seed: int = 0) -> dict[str, Any]:
    """A collated row of random documents, two thirds of their tokens labelled."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (sum(lengths),), generator=generator)
    labels = torch.where(torch.rand(len(ids), generator=generator) < 0.67, ids, -100)
    row = {"input_ids": ids.tolist(), "labels": labels.tolist(), "lengths": lengths}
    return Collator(row_tokens, pad_token_id=0)([row])


def in_4_bits(model: Any) -> Any:
    """The linears of the model's layers in bitsandbytes' NF4; call it before adapters are added."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.model.layers.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is torch.nn.Linear:
                new = Linear4bit(linear.in_features, linear.out_features, bias=linear.bias is not None)
                new.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
                new.bias = linear.bias
                setattr(module, name, new)
    model.is_loaded_in_4bit = True  # PEFT asks for it
    return model
