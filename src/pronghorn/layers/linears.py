"""A linear as PEFT and bitsandbytes left it: its base, its active adapter, and whether it is plain LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.kernels.packed import PackedTensor

_BY_FSDP = "_is_fsdp_managed_module"
"""The attribute of the modules whose weights FSDP gathers for a forward, plain then and in storage of its own."""

_PLAIN = ("VeloraLinearVariant", "MontecloraLinearVariant", "MiCALinearVariant", "MiCAEmbeddingVariant")
"""PEFT's variants of LoRA that train in another way, and then compute W x + s · B A x."""


@dataclass(frozen=True)
class Adapter:
    """A linear's active LoRA adapter: the parameters a [r, in] and b [out, r]."""

    a: Tensor
    b: Tensor
    scale: float


def adapter_of(linear: nn.Module) -> Adapter | None:
    """Return the one active adapter of PEFT's LoRA linear; None where there is none, or it is disabled or merged."""
    module: Any = linear
    active = active_adapters(module)
    if not active or module.disable_adapters or module.merged:
        return None
    name = active[0]
    return Adapter(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])


def variant_of(linear: Any, adapter: str) -> str | None:
    """Return what PEFT calls the variant of LoRA by which a trained adapter is more than W x + s · B A x (Dora, Kasa);
    None if it isn't."""
    variant = getattr(linear, "lora_variant", {}).get(adapter)
    name = type(variant).__name__
    return None if variant is None or name in _PLAIN else name.removesuffix("Variant").removesuffix("Linear")


def base_of(linear: Any) -> Any:
    """Return the linear under PEFT's wrapper, or the linear itself."""
    return getattr(linear, "base_layer", linear)


def unfused_reason(linears: list[nn.Module], dtype: torch.dtype) -> str | None:
    """Say why these linears can't be computed as one product in `dtype`, or None."""
    bases, scales = [base_of(linear) for linear in linears], set()
    for module, base in zip(linears, bases, strict=True):
        linear: Any = module
        active = active_adapters(linear)
        if type(base) is not nn.Linear and not is_written_out(base):
            return f"{type(base).__name__} is not a plain linear"
        if base.__dict__.get(_BY_FSDP):
            return "FSDP shards the weights"
        if type(base.weight) is not nn.Parameter and not is_written_out(base):
            return f"a weight is a {type(base.weight).__name__}: sharded, or computed"
        if linear is not base and "lora_A" not in linear._modules:  # not of what PEFT's ModulesToSaveWrapper passes on
            return f"{type(linear).__module__} is not LoRA"
        if len(active) > 1:
            return f"{len(active)} adapters are active at once"
        for name in active:
            if type(linear.lora_dropout[name]) is not nn.Identity:
                return "LoRA dropout"
            if name in linear.lora_variant or linear.lora_bias.get(name) or type(linear.lora_A[name]) is not nn.Linear:
                return "an adapter that is not plain LoRA"
            scales.add(linear.scaling[name])
    first = bases[0]
    if len({(type(x), x.weight.dtype, x.weight.device, x.weight.requires_grad, x.bias is None) for x in bases}) > 1:
        return "the linears differ in dtype, device or bias, or only some are trained"
    if len({is_written_out(base) for base in bases}) > 1:
        return "only some weights are stored in few bits"
    if any(x.bias is not None and x.bias.requires_grad is not x.weight.requires_grad for x in bases):
        return "only biases are trained, or only weights"
    if not is_written_out(first) and first.weight.dtype is not dtype and not first.weight.requires_grad:
        return f"the weights are {_name(first.weight.dtype)} and the products {_name(dtype)}"
    return "the linears' LoRA scales differ" if len(scales) > 1 else None


def active_adapters(linear: Any) -> list[str]:
    """List the active adapters of PEFT's LoRA linear, disabled ones too; another linear has none."""
    adapters = linear._modules.get("lora_A")
    return [] if adapters is None else [name for name in linear.active_adapters if name in adapters]


def is_4bit(base: Any) -> bool:
    """Tell whether it is bitsandbytes' 4-bit linear (by name: the package needn't be there)."""
    return type(base).__name__ == "Linear4bit" and getattr(base.weight, "quant_state", None) is not None


def is_written_out(base: Any) -> bool:
    """Tell whether a linear's weight is stored in few bits and written out for each product."""
    return is_4bit(base) or isinstance(getattr(base, "weight", None), PackedTensor)


def products_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that products of x are computed in: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def unmerge_disabled(linear: Any) -> None:
    """Take an adapter that was merged and then disabled out of the weight, as PEFT's own forward does."""
    if getattr(linear, "merged_adapters", None) and linear.disable_adapters:
        linear.unmerge()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def merged_into(linear: Any) -> Any:
    """Return what PEFT has merged into a linear's weight or experts': which adapters, and as they are now.

    Weights that it merges are written to through `.data`, which counts no version.
    """
    names = tuple(getattr(linear, "merged_adapters", ()))
    if not names:
        return names
    return names, tuple(linear.scaling.items()), tuple((id(each), each._version) for each in linear.parameters())
