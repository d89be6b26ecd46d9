"""The model families Pronghorn serves, and where their parts live.

A family is listed once its packed forward and gradients are shown to equal one document at a time
(tests/test_parity.py, tests/test_moe_families.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from pronghorn.errors import UnsupportedError
from pronghorn.kernels.glu import Activation
from pronghorn.memory.plan import POLICY, Policy

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

ACTIVATIONS: dict[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
"""The activations that kernels gate with, by transformers' and torch's classes of `act_fn`."""


@dataclass(frozen=True)
class Family:
    """What Pronghorn needs to know of a family of decoder models."""

    model_type: str
    """`config.model_type` of transformers."""
    members: str
    """Models of the family, for people."""
    stock_attention: str = "sdpa"
    """transformers' attention to load with; SDPA has no attention sinks."""


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "Llama 2 and 3, CodeLlama, SmolLM"),
        Family("mistral", "Mistral"),
        Family("qwen2", "Qwen2 and Qwen2.5"),
        Family("qwen3", "Qwen3"),
        Family("gemma3_text", "Gemma 3 text"),
        Family("gpt_oss", "gpt-oss 20b and 120b", stock_attention="eager"),
        Family("qwen3_moe", "Qwen3 with experts"),
        Family("mixtral", "Mixtral"),
        Family("olmoe", "OLMoE"),
    )
}


def has_experts(config: Any) -> bool:
    """Whether layers of this model route tokens to experts."""
    return bool(getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0))


def rope_limit(config: Any) -> int | None:
    """The tokens up to which RoPE's frequencies are always the same; beyond them they depend on a batch's longest
    position. None where they never do."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one for each kind of layer
    most = config.max_position_embeddings
    limits = [most for kind in kinds if "dynamic" in str(kind.get("rope_type"))]
    limits += [
        kind.get("original_max_position_embeddings", most) for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def base_causal_lm(model: Any) -> Any:
    """The transformers causal LM inside a PEFT or data-parallel wrapper (or the model itself)."""
    if hasattr(model, "module") and not hasattr(model, "config"):
        model = model.module
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def check_config(config: Any) -> Family:
    """The family of a model's config.

    Raises:
        UnsupportedError: the family is not supported, or the config asks for something packed attention can't isolate.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = "; ".join(f"{f.model_type} ({f.members})" for f in FAMILIES.values())
        raise UnsupportedError(
            f"Pronghorn does not support the model type {config.model_type!r} yet. Supported: {known}",
            "train one of these, or use TRL without Pronghorn",
        )
    for name, allowed in (
        ("attention_dropout", (0, None)),
        ("use_bidirectional_attention", (False, None)),
        ("attn_logit_softcapping", (None,)),
    ):
        value = getattr(config, name, None)
        if value not in allowed:
            raise UnsupportedError(
                f"config.{name} = {value!r} is not served by packed attention",
                f"set config.{name} to {allowed[0]!r} if the model allows it",
            )
    return family


def recomputes_layers(model: nn.Module) -> bool:
    """Whether decoder layers, or parts of them, are recomputed in the backward pass (gradient checkpointing)."""
    parts = (Policy.RECOMPUTE_CHEAP, Policy.RECOMPUTE_MLP)
    return any(
        getattr(module, "gradient_checkpointing", False) or module.__dict__.get(POLICY) in parts
        for module in model.modules()
    )


def recompute_layers(model: Any, on: bool) -> None:
    """Switch gradient checkpointing, non-reentrant, by whichever name this transformers has for it."""
    if on == recomputes_layers(model):
        return
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        # transformers hooks the embeddings to require gradients, which only reentrant checkpointing needs, adds one
        # more at every call and leaves them behind: keep as many as there were.
        hooked = bool(getattr(model, "_require_grads_hooks", None))
        model.disable_input_require_grads()
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
        if not hooked:
            model.disable_input_require_grads()
    else:
        getattr(model, f"{name}_checkpointing_disable")()
