"""Where the weights of a merged product lie: row slices of one storage, which stay the model's own parameters.

They save, load and move as before. Whatever moves them (`.to`, `load_state_dict(assign=True)`) is noticed by their
addresses, and they are merged again. Below the weight of a linear with a wide input (down) lies room for its LoRA A.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.errors import UnsupportedError
from pronghorn.kernels.fp8_blocks import has_own_codes
from pronghorn.kernels.packed import PackedTensor
from pronghorn.kernels.quantise import transposed
from pronghorn.layers.linears import adapter_of, base_of, is_written_out, merged_into
from pronghorn.parallel.sharded import IN_BUFFER
from pronghorn.precision.fp8 import FP8Weight
from pronghorn.precision.int8 import RotatedWeight
from pronghorn.precision.source import WrittenOutSource

WIDE = 2
"""Inputs an output from which on A lies below W: putting dy and s · dy B side by side costs a copy of dy."""
STEP = 8
"""Columns, of 16 bits each, that rows of a product's operands are a multiple of."""


class GroupStorage:
    """The merged storage of the linears of one product; lives as long as the model is attached."""

    def __init__(self, linears: list[nn.Module], before: GroupStorage | None = None) -> None:
        self.linears = linears
        self._moved: bool = before is not None and before._moved
        """Whether weights or biases were moved out of storages of their own, maybe by the storage before."""
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._below: Tensor | None = None
        """The A that there is room for: a backward may still read it when another adapter is switched on, which has
        none then. Reference passes of preference training switch in each step."""
        self._codes: tuple[Any, FP8Weight] | None = None
        self._written: tuple[Any, Tensor] | None = None
        self._lent: int | None = None
        """Where the A lies that `_written` has room for."""
        self._integers: dict[bool, tuple[Any, RotatedWeight]] = {}
        self._tied = False
        """Another product has these weights, too: no A can lie below them."""
        self.scattered = False
        """One of the weights or biases is there a second time, beside others: it can't lie in both places."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupStorage:
        """Return an empty storage of the copied linears, whose weights lie as these do."""
        return GroupStorage(copy.deepcopy(self.linears, memo), before=self)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Merge the weights, which have `dtype`, where they aren't yet, and return [N, K], or [N + R, K] with room."""
        weights, below = self._weights(), self.rows_below(dtype)
        rows = sum(len(weight) for weight in weights)
        if below:
            adapter = adapter_of(self.linears[0])
            assert adapter is not None
            known = self._below is not None and self._below.data_ptr() == adapter.a.data_ptr()
            if not (known and self._has_room(weights[0], below)):
                self._below = adapter.a.detach()
                grown = torch.cat([weights[0].detach(), weights[0].new_zeros(below, weights[0].shape[1])])
                weights[0].data = grown[:rows]
                self._weight, self._moved = grown, True
        elif self._weight is None or not in_place(self._weight[:rows], weights):
            self._weight = self._merge(weights)
        assert self._weight is not None
        return self._weight if below else self._weight[:rows]

    def bias(self) -> Tensor:
        """Merge the biases where they aren't yet, and return [N]."""
        biases = [base_of(linear).bias for linear in self.linears]
        if self._bias is None or not in_place(self._bias, biases):
            self._bias = self._merge(biases)
        return self._bias

    def codes(self, forward: bool) -> FP8Weight:
        """Return the weights in 8 bits, quantised again only where one was moved, written to or merged into.

        Codes of a checkpoint that have a scale a row are taken as they are, put one below the other.

        Args:
            forward: codes are wanted for the forward's product, too.
        """
        of_forward = self._codes is not None and self._codes[1].codes is not None
        if self._codes is None or self._codes[0] != self._state() or of_forward != forward:
            self._codes = None  # freed before the others are made
            weights = self._weights()
            if all(map(has_own_codes, weights)):
                codes = merge([weight.parts[0] for weight in weights])
                across = None if hasattr(weights[0].parts[0], IN_BUFFER) else transposed(codes)
                scales = torch.cat([weight.row_scales() for weight in weights])
                made = FP8Weight(codes if forward or across is None else None, scales, across)
            else:
                made = FP8Weight.of(weights, forward)
            self._codes = self._state(), made
        return self._codes[1]

    def written_out(self, source: WrittenOutSource, dtype: torch.dtype, below: int) -> Tensor:
        """Return weights in few bits as `source` writes them out, again only where one changed.

        It is [N + below, K] for the adapter that was there when they were written, and [N, K] for others: a backward
        may still read its A.

        Raises:
            UnsupportedError: processes share the weights, which may be another layer's by now.
        """
        if self.is_shared():
            raise UnsupportedError(
                "weights that processes share can't be kept as they are written out",
                "leave written_once of the plan, or written_out = 'once', out",
            )
        state, adapter = (dtype, self._state()), adapter_of(self.linears[0])
        of = None if adapter is None or not below else adapter.a.data_ptr()
        if self._written is None or self._written[0] != state:
            self._written = None  # freed before the other is made
            self._written = state, source.write_out(self._weights()[0].device, below)
            self._lent = of
        whole, rows = self._written[1], sum(base_of(linear).out_features for linear in self.linears)
        return whole if of is not None and of == self._lent else whole[:rows]

    def drop_written(self) -> None:
        """Let the weights go that were written out."""
        self._written = None

    def is_shared(self) -> bool:
        """Tell whether processes share the weights: what lies in memory may be another layer's by now."""
        return any(
            hasattr(part, IN_BUFFER) for weight in self._weights() for part in getattr(weight, "parts", (weight,))
        )

    def integers(self, across: bool, dtype: torch.dtype, kept: bool) -> RotatedWeight:
        """Return the weights in 8-bit integers, of W or, if `across`, of Wᵀ; quantised again when `codes` are.

        Args:
            dtype: of the rows that they are multiplied by.
            kept: with their codes; else these are written out for each product.
        """
        state = dtype, self._state()
        before, made = self._integers.get(across, (None, None))
        if made is None or before != state or (kept and made.codes is None):
            self._integers.pop(across, None)  # freed before the others are made
            made = RotatedWeight.of(self._weights(), across, dtype)
        made = made if kept else made._replace(codes=None)
        self._integers[across] = state, made
        return made

    def drop_codes(self) -> None:
        """Let the weights in 8 bits go."""
        self._codes = None
        self._integers.clear()

    def _state(self) -> Any:
        """Return what the codes depend on: how and where weights lie, their versions, adapters merged into them."""
        weights = self._weights()
        parts = [part for weight in weights for part in getattr(weight, "parts", (weight,))]
        return (
            [*map(id, weights)],
            [(part.data_ptr(), part._version, part.shape, part.stride()) for part in parts],
            [*map(merged_into, self.linears)],
        )

    def is_merged(self, dtype: torch.dtype) -> bool:
        """Tell whether `weight` would leave the weights where they are."""
        weights, below = self._weights(), self.rows_below(dtype)
        if below:
            return weights[0].untyped_storage().nbytes() == (len(weights[0]) + below) * weights[0][0].nbytes
        return below is None or all(_follows(part, before) for before, part in pairwise(weights))

    def move(self, dtype: torch.dtype) -> None:
        """Merge the weights into new memory, but for those that `weight` moves anyway or that are copied for use."""
        if self.rows_below(dtype) == 0:
            self._weight = self._merge(self._weights(), into_new=True)

    def separate(self) -> None:
        """Give each weight and bias that was merged a storage of its own."""
        self._weight = self._bias = self._below = None
        for linear in self.linears if self._moved else ():
            for parameter in (base_of(linear).weight, base_of(linear).bias):
                if parameter is None or isinstance(parameter, PackedTensor):
                    continue
                if parameter.untyped_storage().nbytes() > parameter.nbytes:
                    parameter.data = parameter.detach().clone()

    def rows_below(self, dtype: torch.dtype) -> int | None:
        """Count the rows of A below the weight, often 0; None where weights are written out or copied for use."""
        base = base_of(self.linears[0])
        if is_written_out(base) or base.weight.dtype is not dtype:
            return None
        return self.rank_below(dtype)

    def rank_below(self, dtype: torch.dtype) -> int:
        """Return the rank of A if it lies below the frozen (or written out) weight of the only linear, else 0."""
        base, adapter = base_of(self.linears[0]), adapter_of(self.linears[0])
        if adapter is None or len(self.linears) != 1 or base.in_features < WIDE * base.out_features:
            return 0
        rank, weight = len(adapter.a), base.weight
        if rank % STEP or self._is_lent_to_another(adapter.a):
            return 0
        frozen = weight.dtype is dtype and not weight.requires_grad and not hasattr(weight, IN_BUFFER)
        return rank if is_written_out(base) or (frozen and not self._tied) else 0

    def _merge(self, parts: list[Any], into_new: bool = False) -> Tensor:
        before = [part.data_ptr() for part in parts]
        merged = merge(parts, into_new)
        self._moved |= before != [part.data_ptr() for part in parts]
        return merged

    def _weights(self) -> list[Any]:
        return [base_of(linear).weight for linear in self.linears]

    def _has_room(self, weight: Tensor, rank: int) -> bool:
        whole = self._weight
        return whole is not None and len(whole) == len(weight) + rank and in_place(whole[: len(weight)], [weight])

    def _is_lent_to_another(self, a: Tensor) -> bool:
        """Tell whether the room is for another A that the linear still has."""
        if self._below is None or self._below.data_ptr() == a.data_ptr():
            return False
        linear: Any = self.linears[0]
        return self._below.data_ptr() in [each.weight.data_ptr() for each in linear.lora_A.values()]

    def _merged(self) -> list[tuple[int, ...]]:
        """Return who the weights are that are merged, and the biases."""
        bases = [base for linear in self.linears if not is_written_out(base := base_of(linear))]
        held = [[getattr(base, name, None) for base in bases] for name in ("weight", "bias")]
        return [tuple(id(part) for part in parts if part is not None) for parts in held]


def find_tied(groups: Iterable[GroupStorage]) -> None:
    """Find weights that several products have, as PEFT's layer_replication makes them: what is merged twice has a copy
    that nobody writes to. They may lie in one place if all of a product's weights are another's, in the same order."""
    groups = list(dict.fromkeys(groups))  # a layer may run more than once
    users = defaultdict[int, list[tuple[int, ...]]](list)
    for group in groups:
        for parts in group._merged():
            for part in parts:
                users[part].append(parts)
    for group in groups:
        found = [(parts, users[part]) for parts in group._merged() for part in parts]
        group._tied = any(len(others) > 1 for _, others in found)
        group.scattered = any(len({*parts}) < len(parts) or {*others} != {parts} for parts, others in found)


def merge_weights(groups: list[GroupStorage], dtype: torch.dtype) -> None:
    """Merge each group's frozen weights into one storage, once, before training starts.

    Must run before any activation is allocated: a later merge would place long-lived weights between short-lived
    activations and fragment the caching allocator. If one weight of a layer has to move, all of them move, so that the
    freed memory is a single block that the next layer's weights fit into. Groups whose storage grows by LoRA's A are
    moved first; this order leaves the smallest holes.
    """
    merged = all(group.is_merged(dtype) for group in groups)
    for group in reversed(groups):
        if not merged:
            group.move(dtype)
        if group.rows_below(dtype) is not None:
            group.weight(dtype)


def separate_state_dict(original: Any) -> Any:
    """Make a layer's `state_dict`, which gives each merged weight where it lies, in a storage of its own.

    Of tensors in one storage accelerate saves the first alone, and safetensors and huggingface_hub refuse them.
    """

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state, prefix = original.state_dict(self, *args, **kwargs), kwargs.get("prefix", (*args, "", "")[1])
        for name, _ in self.named_parameters(remove_duplicate=False):
            tensor = state.get(prefix + name)
            if type(tensor) is Tensor and tensor.untyped_storage().nbytes() > tensor.nbytes:
                with torch.inference_mode(False):  # else it could never be trained
                    state[prefix + name] = torch.from_dlpack(torch.to_dlpack(tensor))
        return state

    return state_dict


def in_place(merged: Tensor, parts: list[Tensor]) -> bool:
    """Tell whether the parts are still the slices of the merged tensor that they were made."""
    at = merged.data_ptr()
    for part in parts:
        alike = part.dtype is merged.dtype and part.device == merged.device and part.is_contiguous()
        if part.data_ptr() != at or not alike:
            return False
        at += part.numel() * part.element_size()
    return at == merged.data_ptr() + merged.numel() * merged.element_size()


def merge(parts: list[Tensor], into_new: bool = False) -> Tensor:
    """Return the parts in one tensor and make them its row slices.

    They stay where they are if they lie so already, unless `into_new`.
    """
    rows, first = [part.shape[0] for part in parts], parts[0].detach()
    together = all(_follows(part, before) for before, part in pairwise(parts))
    if together and (not into_new or hasattr(parts[0], IN_BUFFER)):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    if any(hasattr(part, IN_BUFFER) for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UnsupportedError(
            f"weights of {shapes} are multiplied as one, and the processes that share them hold them apart",
            "use launch.strategy: copies",
        )
    merged = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, merged.split(rows), strict=True):
        part.data = place
    return merged


def _follows(part: Tensor, before: Tensor) -> bool:
    begins = part.data_ptr() == before.data_ptr() + before.nbytes and part.is_contiguous() and before.is_contiguous()
    return begins and part.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
