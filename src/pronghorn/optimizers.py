"""Optimisers by transformers' names: which package has them, where they can't work, and what their states take."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pronghorn.errors import ConfigError

ON_PARTS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Those that treat every number by itself, so that processes may step on parts of weights that they share."""
OptimizerName = Literal[
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "adafactor",
    "ademamix",
    "ademamix_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "lion_32bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop",
    "adagrad",
    "sgd",
]
SMALLEST = 4096
"""Elements of a tensor from which on its states are quantised, by both packages."""
BLOCK = 256
"""Elements that share a scale, as transformers asks for."""
PAGED_FROM = 100_000
"""Elements of a tensor from which on bitsandbytes pages its states."""


@dataclass(frozen=True)
class _Optimizer:
    """How an optimiser stores its states."""

    package: Literal["torch", "bitsandbytes", "torchao"] = "torch"
    bits: int = 32
    """Of an element of a state; 32 of torch's stands for the parameter's own dtype."""
    states: int = 2
    """How many each parameter has: the moments."""
    paged: bool = False
    """States of large tensors lie in memory that moves to the host when the device is full."""


_OPTIMIZERS: dict[str, _Optimizer] = {
    "adamw_torch_fused": _Optimizer(),
    "adamw_torch": _Optimizer(),
    "adamw_8bit": _Optimizer("bitsandbytes", 8),
    "adamw_bnb_8bit": _Optimizer("bitsandbytes", 8),
    "paged_adamw_32bit": _Optimizer("bitsandbytes", paged=True),
    "paged_adamw_8bit": _Optimizer("bitsandbytes", 8, paged=True),
    "lion_8bit": _Optimizer("bitsandbytes", 8, states=1),
    "adamw_torch_8bit": _Optimizer("torchao", 8),
    "adamw_torch_4bit": _Optimizer("torchao", 4),
    "adafactor": _Optimizer(states=0),  # sums over rows and columns, which are left out here
    "ademamix": _Optimizer("bitsandbytes", states=3),
    "ademamix_8bit": _Optimizer("bitsandbytes", 8, states=3),
    "paged_ademamix_32bit": _Optimizer("bitsandbytes", states=3, paged=True),
    "paged_ademamix_8bit": _Optimizer("bitsandbytes", 8, states=3, paged=True),
    "lion_32bit": _Optimizer("bitsandbytes", states=1),
    "paged_lion_32bit": _Optimizer("bitsandbytes", states=1, paged=True),
    "paged_lion_8bit": _Optimizer("bitsandbytes", 8, states=1, paged=True),
    "rmsprop": _Optimizer(states=1),
    "adagrad": _Optimizer(states=1),
    "sgd": _Optimizer(states=0),
}


@dataclass(frozen=True)
class TrainedTensor:
    """A trained tensor, as far as its states' size depends on it."""

    elements: int
    itemsize: int
    embedding: bool = False
    """The weight of an `nn.Embedding`, whose states transformers keeps in 32 bits with bitsandbytes."""


def check_optimizer(name: str, device: str) -> None:
    """Refuse an optimiser whose package is missing, or that can't work on this kind of device.

    Names that aren't in `OptimizerName` are transformers' to judge.

    Raises:
        ConfigError: names the optimiser and what to do.
    """
    optimizer = _OPTIMIZERS.get(name)
    if optimizer is None:
        return
    if importlib.util.find_spec(optimizer.package) is None:
        raise ConfigError(
            f"optimizer {name} needs {optimizer.package}, which is not installed", f"pip install {optimizer.package}"
        )
    if optimizer.paged and device == "cpu":
        raise ConfigError(
            f"optimizer {name} on the CPU: bitsandbytes pages the memory of GPUs only",
            f"use {'adamw_8bit' if optimizer.bits == 8 else 'adamw_torch'}",
        )


def state_bytes(name: str, tensors: Iterable[TrainedTensor]) -> tuple[int, int]:
    """Count the bytes of an optimiser's states on the device, and those that are paged.

    The counters of steps are left out, a few bytes a tensor. An optimiser that isn't in `OptimizerName` is counted as
    AdamW.
    """
    optimizer = _OPTIMIZERS.get(name, _Optimizer())
    device = paged = 0
    maps = False
    for tensor in tensors:
        elements, package = tensor.elements, optimizer.package
        scales = -(-elements // BLOCK) * 4
        quantised = optimizer.bits < 32 and elements >= SMALLEST
        if package == "bitsandbytes":
            quantised = quantised and not tensor.embedding
            codes, scales = (elements, scales) if quantised else (4 * elements, 0)
            maps = maps or quantised
        elif package == "torchao" and quantised and elements % BLOCK == 0:
            codes, scales = elements * optimizer.bits // 8, scales + 4 * 2**optimizer.bits  # and the codes' values
        else:
            codes, scales = elements * tensor.itemsize, 0
        if optimizer.paged and elements >= PAGED_FROM:
            paged += optimizer.states * codes
        else:
            device += optimizer.states * codes
        device += optimizer.states * scales
    tables = min(optimizer.states, 2) if maps else 0  # AdEMAMix's two means share one
    return device + 1024 * tables, paged  # the codes' values, once for all tensors


def place_again(optimizer: Any) -> None:
    """Put what a checkpoint was loaded into back where it was before a training: paged states, and learning rates."""
    _page_again(optimizer)
    _place_rates_again(optimizer)


def _place_rates_again(optimizer: Any) -> None:
    """Put learning rates that are tensors (torchao's) back where parameters are: accelerate does so before a training,
    and a checkpoint's come from the CPU. For these torchao's step would be compiled, and tuned, once more."""
    for group in optimizer.param_groups:
        if hasattr(group["lr"], "to"):
            group["lr"] = group["lr"].to(group["params"][0].device)


def _page_again(optimizer: Any) -> None:
    """Put states back into memory that moves to the host when the device is full: bitsandbytes loads a checkpoint's
    paged states to the device for good.

    Args:
        optimizer: any; only bitsandbytes' paged ones have something to do.
    """
    if not getattr(optimizer, "is_paged", False):
        return
    from bitsandbytes.functional import get_paged

    for parameter, state in optimizer.state.items():
        for name in {"state1", "state2"} & state.keys():
            loaded = state[name]
            if parameter.numel() >= PAGED_FROM and loaded.is_cuda:  # what is paged counts as the CPU's
                paged = get_paged(*loaded.shape, dtype=loaded.dtype, device=loaded.device)
                state[name] = paged.copy_(loaded)
                optimizer.page_mng.paged_tensors.append(paged)
