"""Several linears of one input as one product, with their LoRA adapters.

    y = x Wᵀ + b + s · (x Aᵀ) Bᵀ        W: the weights of the linears, one below the other
                                        A: their A one below the other, B: their B along the diagonal

Weights in the dtype of the products become row slices of one storage, so they save, load and move as before; what moved
them is noticed, and they are put together again. Below the weight of a linear with a wide input (down) lies its A: then

    dx = [dy, s · dy B] [W; A]

is one product, where adding (s · dy B) A would read and write the wide dx once more. Float32 weights that are trained
in 16 bits (autocast), and adapters, are copied once a forward; 4-bit weights are written out for each product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.kernels import adapter_gradients
from pronghorn.kernels.adapter_gradients import matmul
from pronghorn.kernels.residual import LowRank
from pronghorn.models.linears import Adapter, adapter_of, base_of, is_4bit, take_out

WIDE = 2
"""Inputs an output from which on A lies below W: to put dy and s · dy B side by side costs a copy of dy."""
LowRankGrads = tuple[Tensor, list[Tensor]]
"""(s · dy B [T, R], each adapter's dB [N_i, r])."""
STEP = 8
"""Columns, of 16 bits each, that rows of a product's operands are a multiple of."""


class LinearGroup:
    """Linears with the same input, which `refusal` doesn't refuse."""

    def __init__(self, linears: list[nn.Module]) -> None:
        self.linears = linears
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._a: Tensor | None = None
        self._b: Tensor | None = None
        self._blocks: list[tuple[int, int]] = []
        """First column and rank of each block of `_b` that was ever filled: the rest is zero."""

    def weight(self, bases: list[Any], dtype: torch.dtype) -> Tensor:
        """[N, in] in `dtype`: the weights themselves where they have it, else a copy made now."""
        weights = [base.weight for base in bases]
        if is_4bit(bases[0]):
            return _written_out(weights, dtype)
        if weights[0].dtype is not dtype:
            copy = weights[0].new_empty(sum(weight.shape[0] for weight in weights), weights[0].shape[1], dtype=dtype)
            for part, weight in zip(copy.split([len(weight) for weight in weights]), weights, strict=True):
                part.copy_(weight.detach())  # one by one: all in one launch goes at two thirds of the bandwidth
            return copy
        rows = sum(base.out_features for base in bases)
        if self._weight is None or not _in_place(self._weight[:rows], weights):
            self._weight = _merge(weights)
        return self._weight[:rows]

    def is_settled(self, dtype: torch.dtype) -> bool:
        """Whether `read` would leave the weights where they are, or put one that has its A below where it was."""
        weights, below = [base_of(linear).weight for linear in self.linears], self._rows_below(dtype)
        if below:
            return weights[0].untyped_storage().nbytes() == (len(weights[0]) + below) * weights[0][0].nbytes
        return below is None or all(_follows(part, before) for before, part in pairwise(weights))

    def move(self, dtype: torch.dtype) -> None:
        """Put the weights together in other memory; not those that `read` moves anyway, or writes out or copies."""
        if self._rows_below(dtype) == 0:
            self._weight = _merge([base_of(linear).weight for linear in self.linears], anew=True)

    def _rows_below(self, dtype: torch.dtype) -> int | None:
        """Rows of A below the weight, often none; None where weights are written out or copied for each forward."""
        base, adapter = base_of(self.linears[0]), adapter_of(self.linears[0])
        if is_4bit(base) or base.weight.dtype is not dtype:
            return None
        rank = 0 if adapter is None else len(adapter.a)
        return rank if rank and self.stacks(base, rank, dtype) else 0

    def stacks(self, base: Any, rank: int, dtype: torch.dtype) -> bool:
        """Whether A [rank, in] of the only linear lies below its weight, which is frozen, or written out."""
        wide, weight = base.in_features >= WIDE * base.out_features, base.weight
        there = weight.dtype is dtype and not weight.requires_grad
        fits = len(self.linears) == 1 and wide and rank % STEP == 0
        return fits and (is_4bit(base) or (there and not self._is_taken(weight, rank)))

    def stacked(self, base: Any, rank: int) -> Tensor:
        """[out + rank, in]: the weight with room for A below."""
        weight, rows = base.weight, base.out_features
        if self._weight is None or not self._has_room(weight, rank):
            self._weight = torch.cat([weight.detach(), weight.new_zeros(rank, base.in_features)])
            weight.data = self._weight[:rows]
        return self._weight

    def _has_room(self, weight: Tensor, rank: int) -> bool:
        whole = self._weight
        return whole is not None and len(whole) == len(weight) + rank and _in_place(whole[: len(weight)], [weight])

    def _is_taken(self, weight: Tensor, rank: int) -> bool:
        """Whether another layer of the same weight (PEFT's layer_replication) has put its A below it."""
        known = self._weight is not None and not self._has_room(weight, rank)
        return known and weight.untyped_storage().nbytes() > weight.nbytes

    def bias(self, bases: list[Any], dtype: torch.dtype) -> Tensor | None:
        """[N] in `dtype`, or None."""
        biases = [base.bias for base in bases]
        if biases[0] is None:
            return None
        if biases[0].dtype is not dtype or is_4bit(bases[0]):
            return torch.cat([bias.detach().to(dtype) for bias in biases])
        if self._bias is None or not _in_place(self._bias, biases):
            self._bias = _merge(biases)
        return self._bias

    def low_rank(
        self,
        adapters: list[tuple[slice, Adapter]],
        shape: tuple[int, int],
        dtype: torch.dtype,
        stacked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """A [R, in] and B [N, R] for all adapters, and the copies that fill them as (target, source).

        Kept from forward to forward, so that B's other blocks stay zero. `shape` is (N, in); A is in `stacked`, if any.
        """
        source = adapters[0][1].a
        blocks = [(columns.start, adapter.a.shape[0]) for columns, adapter in adapters]
        b, ranks = self._b, sum(rank for _, rank in blocks)
        if b is None or self._blocks != blocks or (b.dtype, b.device) != (dtype, source.device):
            b = self._b = source.new_zeros(shape[0], ranks, dtype=dtype)
            self._a, self._blocks = None, blocks
        if stacked is not None:  # not kept: it would keep a weight that was replaced
            a, self._a = stacked[shape[0] :], None
        else:
            a = self._a = source.new_zeros(ranks, shape[1], dtype=dtype) if self._a is None else self._a
        copies, rank = [], 0
        for columns, adapter in adapters:
            r = adapter.a.shape[0]
            copies.append((a[rank : rank + r], adapter.a.detach()))
            copies.append((b[columns, rank : rank + r], adapter.b.detach()))
            rank += r
        return a, b, copies


@dataclass(frozen=True)
class Operands:
    """What a group multiplies with in one step, read from the model at its forward."""

    group: LinearGroup
    bases: list[Any]
    dtype: torch.dtype
    _weight: Tensor | None
    """None where it is written out for each product."""
    full: bool
    """Whether the weights and biases themselves are trained."""
    adapters: list[tuple[slice, Adapter]]
    """The active adapters, and the columns of y that each adds to."""
    a: Tensor | None
    b: Tensor | None
    stacks: bool
    _stacked: Tensor | None
    """[N + R, in]: the weight with A below, where `stacks`; None where it is written out for each product."""

    @property
    def stacked(self) -> Tensor:
        """[N + R, in], where `stacks`."""
        if self._stacked is not None:
            return self._stacked
        assert self.a is not None
        whole = _written_out([base.weight for base in self.bases], self.dtype, len(self.a))
        whole[-len(self.a) :] = self.a
        return whole

    @property
    def weight(self) -> Tensor:
        """[N, in]."""
        return self.group.weight(self.bases, self.dtype) if self._weight is None else self._weight

    @property
    def copy(self) -> Tensor | None:
        """The weights in the products' dtype, if they were made for this step."""
        made = self._weight is not None and self._weight.dtype is not self.bases[0].weight.dtype
        return self._weight if made else None

    def with_copy(self, copy: Tensor | None) -> Operands:
        """The same with another copy; without one it is made when it is needed."""
        return self if copy is self.copy else replace(self, _weight=copy)

    @property
    def scale(self) -> float:
        """s, the same for all adapters."""
        return self.adapters[0][1].scale

    @property
    def ranks(self) -> list[int]:
        """Of each linear's adapter, 0 where it has none."""
        found = {columns.start: len(adapter.a) for columns, adapter in self.adapters}
        ends = accumulate(base.out_features for base in self.bases)
        return [found.get(end - base.out_features, 0) for base, end in zip(self.bases, ends, strict=True)]

    @property
    def trained(self) -> list[Tensor]:
        """The trained tensors, in the order of `gradients`: weights, biases, then a and b of each adapter."""
        found = [base.weight for base in self.bases if self.full]
        found += [base.bias for base in self.bases if self.full and base.bias is not None]
        return found + [tensor for _, adapter in self.adapters for tensor in (adapter.a, adapter.b)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(y [T, N], x Aᵀ [T, R] or None without adapters) of x [T, in]."""
        y, low_rank = self.parts(x)
        if low_rank is None:
            return y, None
        xa, b, scale = low_rank
        return y.addmm_(xa, b.t(), alpha=scale), xa

    def parts(self, x: Tensor) -> tuple[Tensor, LowRank | None]:
        """x Wᵀ + b, and what is to be added to it: (x Aᵀ, B, s) of s · (x Aᵀ) Bᵀ, or None without adapters."""
        bias = self.group.bias(self.bases, self.dtype)
        y = x @ self.weight.t() if bias is None else torch.addmm(bias, x, self.weight.t())
        xa = self.inner(x)
        return y, None if xa is None or self.b is None else (xa, self.b, self.scale)

    def inner(self, x: Tensor) -> Tensor | None:
        """x Aᵀ [T, R], or None without adapters."""
        return None if self.a is None else x @ self.a.t()

    def input_grad(self, dy: Tensor, xa: Tensor | None, wanted: bool = True) -> tuple[Any, LowRankGrads | None]:
        """(dx [T, in], if wanted; what adapters' gradients need of dy, if there are any) from dy [T, N] and x Aᵀ."""
        both = dy.new_empty(len(dy), sum(self.b.shape)) if self.b is not None and wanted and self.stacks else None
        given = self._low_rank(dy, xa, both)
        if not wanted:
            return None, given
        if given is None or self.a is None:
            return dy @ self.weight, None
        if both is not None:
            return both @ self.stacked, given
        return (dy @ self.weight).addmm_(given[0], self.a), given

    def _low_rank(self, dy: Tensor, xa: Tensor | None, both: Tensor | None) -> LowRankGrads | None:
        """`both` [T, N + R], if any, is filled with dy and s·dy B, side by side."""
        if self.b is None or xa is None:
            return None
        columns, ranks = [each for each, _ in self.adapters], [len(adapter.a) for _, adapter in self.adapters]
        dtype = self.adapters[0][1].b.dtype
        return adapter_gradients.products(dy, self.b, xa, columns, ranks, self.scale, dtype, both)

    def gradients(self, dy: Tensor, given: LowRankGrads | None, x: Tensor) -> list[Tensor]:
        """Those of `trained`, from dy [T, N], what `input_grad` gave, and x [T, in]."""
        grads: list[Tensor] = []
        if self.full:
            widths = [base.out_features for base in self.bases]
            grads += matmul(dy.t(), x, self.bases[0].weight.dtype).split(widths)
            if self.bases[0].bias is not None:
                grads += dy.sum(0, dtype=self.bases[0].bias.dtype).split(widths)
        if given is None:
            return grads
        dya, dbs = given
        das = matmul(dya.t(), x, self.adapters[0][1].a.dtype).split([len(adapter.a) for _, adapter in self.adapters])
        return grads + [grad for pair in zip(das, dbs, strict=True) for grad in pair]


@torch.inference_mode(False)
def read(groups: list[LinearGroup], dtype: torch.dtype) -> list[Operands]:
    """The groups as they are now, for products in `dtype`; all adapters are copied in one launch.

    Tensors that are kept for other forwards are ordinary ones, also where this one is in inference mode.
    """
    found, copies = [], []
    for group in groups:
        bases = [base_of(linear) for linear in group.linears]
        adapters, start = [], 0
        for linear, base in zip(group.linears, bases, strict=True):
            take_out(linear)
            adapter = adapter_of(linear)
            if adapter is not None:
                adapters.append((slice(start, start + base.out_features), adapter))
            start += base.out_features
        a = b = stacked = None
        stacks = bool(adapters) and group.stacks(bases[0], adapters[0][1].a.shape[0], dtype)
        if adapters:
            if stacks and not is_4bit(bases[0]):
                stacked = group.stacked(bases[0], adapters[0][1].a.shape[0])
            a, b, made = group.low_rank(adapters, (start, bases[0].in_features), dtype, stacked)
            copies += made
        weight = None if is_4bit(bases[0]) else group.weight(bases, dtype)
        full = bases[0].weight.requires_grad
        found.append(Operands(group, bases, dtype, weight, full, adapters, a, b, stacks, stacked))
    if copies:
        torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])
    return found


@torch.inference_mode(False)
def settle(groups: list[LinearGroup], dtype: torch.dtype) -> None:
    """Put together and keep what `read` gives, before there are activations: it would come to lie between them, and
    hold pages of the allocator's memory around it when they go.

    Where one of a layer's weights has to be moved, all are. What they leave is then a single piece, into which the next
    layer's fit; between weights that stay behind it would be pieces too small for anything. In this order those that
    have grown by their A come first: of all orders it leaves the least.
    """
    settled = all(group.is_settled(dtype) for group in groups)
    for group in reversed(groups):
        if not settled:
            group.move(dtype)
        read([group], dtype)


def _written_out(weights: list[Any], dtype: torch.dtype, more: int = 0) -> Tensor:
    """4-bit weights, one below the other, and room for `more` rows."""
    from bitsandbytes.functional import dequantize_4bit

    states = [weight.quant_state for weight in weights]
    rows = [state.shape[0] for state in states]
    whole = torch.empty(sum(rows) + more, states[0].shape[1], dtype=states[0].dtype, device=weights[0].device)
    for weight, state, part in zip(weights, states, whole.split([*rows, more]), strict=False):
        if part.is_cuda:
            dequantize_4bit(weight.data, state, out=part)
        else:  # bitsandbytes has it for GPUs only
            part.copy_(dequantize_4bit(weight.data, state))
    return whole.to(dtype)


def _in_place(merged: Tensor, parts: list[Tensor]) -> bool:
    """Whether the parts are still the slices of the merged tensor that they were made."""
    at = merged.data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.dtype is not merged.dtype or part.device != merged.device:
            return False
        at += part.numel() * part.element_size()
    return at == merged.data_ptr() + merged.numel() * merged.element_size()


def _merge(parts: list[Tensor], anew: bool = False) -> Tensor:
    """The parts in one tensor, whose slices they become; they stay where they are if another group made them so, unless
    it shall be `anew`."""
    rows, first = [part.shape[0] for part in parts], parts[0].detach()
    if not anew and all(_follows(part, before) for before, part in pairwise(parts)):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    merged = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, merged.split(rows), strict=True):
        part.data = place
    return merged


def _follows(part: Tensor, before: Tensor) -> bool:
    begins = part.data_ptr() == before.data_ptr() + before.nbytes and part.is_contiguous() and before.is_contiguous()
    return begins and part.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
