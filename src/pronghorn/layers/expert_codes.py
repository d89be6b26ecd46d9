"""Experts' frozen weights in 8 bits, beside those that the model holds: made where layers are built, lent for a call.

A block lends the codes to its experts module while it runs, so that nothing but packed steps multiplies in 8 bits:
padded batches, `generate()`, merging and saving read the weights themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.families.spec import Experts
from pronghorn.kernels.grouped_codes import CodedExperts, Codes
from pronghorn.kernels.int8 import GROUP, LONGEST
from pronghorn.kernels.packed import PackedTensor
from pronghorn.layers.linears import merged_into
from pronghorn.parallel.sharded import IN_BUFFER
from pronghorn.precision.compute import Compute
from pronghorn.precision.int8 import column_factors

_LENT = "_pronghorn_codes"
"""The attribute of an experts module that holds its `LentCodes` during a call."""


@dataclass(frozen=True, eq=False)
class LentCodes:
    """The codes of one experts module, and the weights that they stand for."""

    module: nn.Module
    weights: tuple[Tensor, ...]
    codes: tuple[CodedExperts, CodedExperts]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the experts find their codes while the block runs."""
        self.module.__dict__[_LENT] = self
        try:
            yield
        finally:
            del self.module.__dict__[_LENT]


def codes_for(module: nn.Module, *weights: Tensor) -> tuple[CodedExperts, CodedExperts] | None:
    """Return the codes that experts are lent, if they stand for the very weights that are about to be multiplied."""
    lent: LentCodes | None = module.__dict__.get(_LENT)
    same = lent is not None and all(a is b for a, b in zip(lent.weights, weights, strict=True))
    return lent.codes if lent is not None and same else None


def coded(weight: Tensor, compute: Compute) -> CodedExperts:
    """Quantise W [E, K, N], any strides, for the products that `compute` has in 8 bits."""
    if compute is Compute.INT8:
        forward, backward = (Codes.of(side, column_factors(side.detach())) for side in (weight.mT, weight))
        return CodedExperts(forward, backward, exact=False)
    return CodedExperts.of(weight, compute is Compute.FP8_EXACT, compute.forward_in_fp8)


class ExpertStorage:
    """The codes of one layer's experts; lives as long as the model is attached.

    Args:
        outer: the experts as the layer holds them, under PEFT's wrappers if there are some.
    """

    def __init__(self, outer: nn.Module, kind: Experts) -> None:
        self.outer, self._kind, self._wrappers = outer, kind, list[Any]()
        module: Any = outer
        while hasattr(module, "base_layer"):
            self._wrappers.append(module)
            module = module.base_layer
        self.module = module
        self._made: tuple[Any, LentCodes] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertStorage:
        """Return a storage without codes of the copied experts."""
        return ExpertStorage(copy.deepcopy(self.outer, memo), self._kind)

    def reason(self, dtype: torch.dtype, compute: Compute) -> str | None:
        """Say why these experts don't multiply in the 8 bits of `compute` where products are in `dtype`, or None."""
        weights = [self.module._parameters.get(name) for name in (self._kind.gate_up, self._kind.down)]
        for weight in weights:
            if weight is None or weight.dim() != 3:
                return "their weights are computed"
            if isinstance(weight, PackedTensor):
                return "their weights are in 4 bits"
            if weight.requires_grad:
                return "their weights are trained"
            if hasattr(weight, IN_BUFFER):
                return "processes share their weights"
            if weight.dtype is not dtype or dtype.itemsize != 2:
                return f"their weights are {str(weight.dtype).removeprefix('torch.')}"
            if compute is Compute.INT8 and any(size % GROUP or size > LONGEST for size in weight.shape[1:]):
                sizes, limits = " x ".join(map(str, weight.shape[1:])), f"multiples of {GROUP}, at most {LONGEST:,}"
                return f"their weights are {sizes}, and integers of rotated rows need {limits}"
        return None

    def codes(self, compute: Compute) -> LentCodes:
        """Return the weights in 8 bits, quantised again only where one was moved, written to or merged into."""
        if self._made is None or self._made[0] != self._state():
            self._made = None  # freed before the others are made
            weights = tuple(getattr(self.module, name) for name in (self._kind.gate_up, self._kind.down))
            transposed: Any = self.module.is_transposed
            gate_up, down = (coded(weight if transposed else weight.mT, compute) for weight in weights)
            self._made = self._state(), LentCodes(self.module, weights, (gate_up, down))
        return self._made[1]

    def separate(self) -> None:
        """Drop the codes."""
        self._made = None

    def _state(self) -> Any:
        """Return what the codes depend on: where the weights lie, their versions, and adapters merged into them."""
        weights: list[Tensor] = [getattr(self.module, name) for name in (self._kind.gate_up, self._kind.down)]
        merged = [(wrapper.parameter_name, merged_into(wrapper)) for wrapper in self._wrappers]
        return [(id(weight), weight.data_ptr(), weight._version) for weight in weights], merged
