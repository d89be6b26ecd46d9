"""Experts that never train: tokens went to them, and their slice of a trained tensor had no gradient.

The watch over whole tensors (`train.gradients`) can't see it, since an expert's weights and adapters are slices of one
tensor. Only tokens that the loss depends on count: an expert without such tokens (the padded tail's may be all that it
sees) has a zero gradient rightly, and is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.models.experts import expert_modules, index_of
from pronghorn.models.passes import after_forward


@dataclass
class RoutedTokens:
    """How many tokens that the loss depends on went to each expert of each layer while `count_tokens` was on."""

    model: nn.Module
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)
    """int64 [E] of each experts module."""

    def untrained(self) -> list[tuple[str, int, int]]:
        """List (tensor, expert, tokens) of experts that saw such tokens and whose slice has no gradient.

        After a backward; LoRA's A has none while B is zero.
        """
        found = []
        for name, parameter, owner in self.tensors():
            counts = self.counts[owner]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # PEFT's B [out, r·E] is expert-minor; weights [E, ...] and A [E·r, in] are expert-major.
            slices = gradient.reshape(-1, len(counts)).t() if ".lora_B." in name else gradient.reshape(len(counts), -1)
            wrong = (counts > 0) & ~slices.any(1).cpu()
            found += [(name, e, int(counts[e])) for e in wrong.nonzero().flatten().tolist()]
        return found

    def idle(self) -> int:
        """Count the experts that saw no such token."""
        return sum(int((counts == 0).sum()) for counts in self.counts.values())

    def tensors(self) -> Iterator[tuple[str, Tensor, nn.Module]]:
        """Yield (name, tensor, experts module) of each trained tensor of counted experts."""
        for prefix, module in self.model.named_modules():
            wrapped: Any = module
            owner = wrapped.get_base_layer() if hasattr(module, "parameter_name") else module
            if owner not in self.counts:
                continue
            for name, parameter in module.named_parameters(prefix, recurse=owner is not module):
                nested = owner is not module and ".base_layer." in name.removeprefix(prefix)
                if parameter.requires_grad and not nested:
                    yield name, parameter, owner


@contextmanager
def count_tokens(model: nn.Module) -> Iterator[RoutedTokens]:
    """Count each expert's tokens in the backwards inside the block (waits for the device: for diagnosis only)."""
    routed = RoutedTokens(model)

    def watch(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], out: Tensor) -> None:
        index = index_of(arguments, keywords)

        def count(gradient: Tensor) -> None:
            counts = torch.bincount(index[(gradient != 0).any(-1)].flatten(), minlength=module.num_experts).cpu()
            routed.counts[module] = routed.counts.get(module, 0) + counts

        if out.requires_grad:
            out.register_hook(count)

    with after_forward(expert_modules(model), watch, with_kwargs=True):
        yield routed
