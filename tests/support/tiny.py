"""Tiny random models of every family Pronghorn serves, and packed rows for them."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

from pronghorn.data.batch import Collator
from pronghorn.families.registry import FAMILIES as FAMILY_FACTS
from pronghorn.kernels.nf4_experts import quantise_experts
from pronghorn.loading.weights import keep_packed_4bit_layout
from pronghorn.models.experts import weight_names

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
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 12}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "sliding_window": 5,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_DELTA: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
SIZES_IN_8_BITS: dict[str, dict[str, int]] = {
    "qwen3_5_text": {"linear_num_key_heads": 16, "linear_num_value_heads": 16},
    "gemma4_text": {"hidden_size_per_layer_input": 64},
}
"""What families' tiny models need besides an MLP of a multiple of 16 for products in 8 bits."""
# A window shorter than the documents, so that it must be right inside them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 16},
    "phi3": {"pad_token_id": None, "sliding_window": 7, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.75}},
    "smollm3": {"pad_token_id": None, "no_rope_layers": [1, 0, 1]},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 6,
        "layer_types": _MIXED,
        "rope_parameters": {"full_attention": _YARN, "sliding_attention": _ROPE},
    },
    "ministral": {"sliding_window": 6, "layer_types": _MIXED},
    "ministral3": {"sliding_window": None, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.4}},
    "granite": {
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.3,
    },
    "granitemoehybrid": {
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.3,
        "shared_intermediate_size": 88,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "layer_types": ["attention"] * 3,
        "mamba_n_heads": 8,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    # layers that share keys and values, wider MLPs there, an input of each layer
    "gemma4_text": {
        **_GEMMA4,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    # values that are keys, with fewer and wider heads, in layers without a window
    "gemma4_unified_text": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
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
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    # experts beside a dense MLP
    "gemma4_text with experts": {
        **_GEMMA4,
        "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "qwen3_5_moe_text": {**_ROUTED, **_DELTA, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_next": {**_ROUTED, **_DELTA, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
}

DELTA_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""With gated delta nets, and gated attention in every second layer."""


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A float32 model in training mode, its weights spread enough that every part matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type = family.partition(" ")[0]
    fields = {**_COMMON, **(FAMILIES | MOE_FAMILIES)[family], **changes}
    for name in {"layer_types", "no_rope_layers"} & fields.keys() - changes.keys():  # as many as layers, in turns
        fields[name] = [fields[name][index % len(fields[name])] for index in range(fields["num_hidden_layers"])]
    config = AutoConfig.for_model(model_type, **copy.deepcopy(fields))  # some configurations write into rope_parameters
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        stock = FAMILY_FACTS[model_type].load_attention
        model = AutoModelForCausalLM.from_config(config, attn_implementation=stock)
        if family in MOE_FAMILIES:
            model.set_experts_implementation("eager")  # the others have no float64
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            for layer in model.model.layers:
                # else scores, and the errors of float32, are far from trained ones'
                if getattr(getattr(layer, "self_attn", None), "scaling", None) == 1:
                    layer.self_attn.q_norm.weight.mul_(layer.self_attn.head_dim**-0.5)
            for name in {name for name, _ in model.named_buffers()} & model.state_dict().keys():
                buffer = model.get_buffer(name)
                if name.endswith("e_score_correction_bias"):  # by what routers choose, not by what they weigh
                    buffer.copy_(torch.randn_like(buffer) * 0.3)
                else:
                    buffer.mul_(0.8)  # a layer's scalar
    return model.train()


def packed_row(lengths: list[int], row_tokens: int, vocab: int = VOCAB, seed: int = 0) -> dict[str, Any]:
    """A collated row of random documents, two thirds of their tokens labelled."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (sum(lengths),), generator=generator)
    labels = torch.where(torch.rand(len(ids), generator=generator) < 0.67, ids, -100)
    row = {"input_ids": ids.tolist(), "labels": labels.tolist(), "lengths": lengths}
    return Collator(row_tokens, pad_token_id=0)([row])


def in_4_bits(model: Any) -> Any:
    """Quantise the linears and experts of the model's layers to NF4; call it before adapters are added."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.model.layers.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is torch.nn.Linear:
                new = Linear4bit(linear.in_features, linear.out_features, bias=linear.bias is not None)
                new.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
                new.bias = linear.bias
                setattr(module, name, new)
    for path in list(weight_names(model)):
        holder, _, name = path.rpartition(".")
        packed = quantise_experts(model.get_parameter(path).detach(), nested=True)
        setattr(model.get_submodule(holder), name, torch.nn.Parameter(packed, requires_grad=False))
    model.is_loaded_in_4bit = True  # PEFT asks for it
    return keep_packed_4bit_layout(model)
