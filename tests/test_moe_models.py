"""Experts of whole models against transformers' own eager experts and PEFT's folding: losses and every gradient."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.models import experts

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 5, "intermediate_size": 24, "swiglu_limit": 0.5},
}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def tiny_moe(family: str, **changes: Any) -> Any:
    """A float32 model in training mode with transformers' eager experts, its weights spread enough to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_experts_implementation("eager")
    return model.train()


def with_expert_lora(model: Any, **options: Any) -> Any:
    """PEFT's own LoRA on attention and experts, B away from zero."""
    from peft import LoraConfig, get_peft_model

    given = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": TARGETS, **options}
    adapted = get_peft_model(model, LoraConfig(**given))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return adapted


def losses_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(3))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, missing
    return {"loss": loss.detach(), **found}


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, wanted in theirs.items():
        torch.testing.assert_close(mine[name], wanted, rtol=2e-4, atol=2e-6 + 2e-5 * wanted.abs().max().item(), msg=name)


@pytest.mark.parametrize("trained", ["everything", "expert lora", "attention lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_equal_eager_experts(family: str, trained: str) -> None:
    model = tiny_moe(family)
    if trained != "everything":
        model = with_expert_lora(model, **({} if trained == "expert lora" else {"target_parameters": None}))
    other = copy.deepcopy(model)
    base = getattr(other, "base_model", other) if trained == "everything" else other.get_base_model()
    base = other if trained == "everything" else base
    layers = experts.enable(base, "once")
    assert layers is not None and layers.refused is None
    assert base.config._experts_implementation == experts.NAME
    assert_same(losses_and_gradients(other), losses_and_gradients(model))
