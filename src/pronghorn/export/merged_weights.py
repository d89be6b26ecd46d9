"""The weights of linears, embeddings and experts with their LoRA adapters in them.

W' = W + s · B A                                        LoRA (of embeddings transposed: they have a row for each token)
W' = m / ‖W + s · B A‖ ∘ (W + s · B A)                  DoRA, by outputs (Liu et al. 2024, arXiv:2402.09353)
b' = b + s · b_B                                        where B has a bias
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pronghorn.errors import UnsupportedError
from pronghorn.kernels.nf4 import dequantise
from pronghorn.kernels.packed import PackedTensor
from pronghorn.layers.linears import variant_of
from pronghorn.models.experts import low_rank_factors

DORA = "Dora"
"""What `variant_of` calls DoRA."""


def _active(layer: Any) -> list[str]:
    own = (*layer.lora_A, *layer.lora_embedding_A)
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in own]


def merged_linear(layer: Any) -> tuple[Tensor, Tensor]:
    """Compute a linear's weight, or an embedding's, without and with its active adapters, in float32."""
    weight = plain = dense_weight(layer.get_base_layer())
    for adapter in _active(layer):
        weight = weight + layer.get_delta_weight(adapter).float()
        if variant_of(layer, adapter) == DORA:
            norm = weight.norm(dim=0 if layer.fan_in_fan_out else 1, keepdim=True)
            weight = weight * layer.lora_magnitude_vector[adapter].weight.float().view_as(norm) / norm
    return plain, weight


def merged_bias(layer: Any) -> Tensor:
    """Compute the bias of a linear that has one, with its active adapters', in float32."""
    bias: Tensor = layer.get_base_layer().bias.float()
    for adapter in _active(layer):
        if layer.lora_bias.get(adapter):
            bias = bias + layer.scaling[adapter] * layer.lora_B[adapter].bias.float()
    return bias


def merged_experts(experts: Any) -> tuple[Tensor, Tensor]:
    """Compute the parameter of experts, or a router, without and with its active adapters, in float32."""
    weight = experts.get_param()
    if isinstance(weight, PackedTensor):
        weight = weight.dequantise()  # in its own dtype, as training multiplied it
    weight = plain = weight.float()
    for adapter in _active(experts):
        a, b = low_rank_factors(experts, adapter)
        delta = experts.scaling[adapter] * (b.float() @ a.float())
        # PEFT takes a parameter of two dimensions (experts' biases, a router) as [out, in] whatever experts have
        transposed = weight.dim() == 3 and getattr(experts.get_base_layer(), "is_transposed", False)
        weight = weight + (delta.mT if transposed else delta).reshape(weight.shape)
    return plain, weight


def check_merges(layer: Any, name: str) -> None:
    """Raise UnsupportedError for an active adapter that no weight and bias of a linear or embedding can hold."""
    from transformers.pytorch_utils import Conv1D

    active = [] if layer.disable_adapters else layer.active_adapters
    linear = hasattr(layer, "lora_A") and isinstance(layer.get_base_layer(), nn.Linear | Conv1D | nn.Embedding)
    remedy = "save the adapter with save_pretrained, or merge it with PEFT's merge_and_unload"
    for adapter in active:
        variant = variant_of(layer, adapter)
        biased = bool(getattr(layer, "lora_bias", {}).get(adapter))
        for kind, applies in (
            ("is not LoRA on a linear or an embedding", not linear),
            (f"is {variant}, more than W + s·B·A", variant not in (None, DORA)),
            ("is DoRA beside another", variant is not None and len(active) > 1),
            (
                "has a bias of its own, and the linear has none",
                biased and linear and layer.get_base_layer().bias is None,
            ),
        ):
            if applies:
                raise UnsupportedError(
                    f"the adapter of {name} {kind}, which save_pretrained_merged can't merge", remedy
                )


def dense_weight(linear: Any) -> Tensor:
    """Return a weight as float32, [out, in] of linears, dequantised if bitsandbytes holds it in 4 bits."""
    if getattr(linear.weight, "quant_state", None) is None:
        weight: Tensor = linear.weight.float()
        return weight
    return dequantise(linear.weight).float()
