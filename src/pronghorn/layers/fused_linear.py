"""Several linears of one input as one product, with their LoRA adapters.

    y = x Wᵀ + b + s · (x Aᵀ) Bᵀ        W: the weights of the linears, one below the other
                                        A: their A one below the other, B: their B along the diagonal

Built once, from the model as it is, and built again only when the model changed (`layers.watch`). W multiplies through
its `WeightSource`; A and B are copied in the products' dtype once a model forward (`copies`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import UnsupportedError
from pronghorn.kernels import adapter_gradients
from pronghorn.kernels.adapter_gradients import matmul
from pronghorn.kernels.fp8_blocks import has_own_codes
from pronghorn.kernels.int8 import GROUP, LONGEST
from pronghorn.kernels.quantise import ROW_SCALES
from pronghorn.kernels.residual import LowRank
from pronghorn.layers.linears import Adapter, adapter_of, base_of, is_4bit, is_written_out, unmerge_disabled
from pronghorn.layers.weight_layout import GroupStorage
from pronghorn.parallel.sharded import lie_wide, narrowed
from pronghorn.precision.compute import MULTIPLE, Compute, Numbers, Rule, has_products
from pronghorn.precision.fp8 import BackwardSource, CodesSource, FP8Source, WrittenCodesSource, is_nf4
from pronghorn.precision.int8 import Int8Source, WrittenInt8Source
from pronghorn.precision.source import (
    Activation,
    CopiedSource,
    DenseSource,
    LowRankGrad,
    NF4Source,
    PackedSource,
    WeightSource,
    WrittenOutSource,
)

LowRankGrads = tuple[Tensor, list[Tensor]]
"""(s · dy B [T, R], each adapter's dB [N_i, r])."""


class FusedLinear:
    """One merged product, ready to multiply in `dtype`.

    Args:
        storage: of linears that `linears.unfused_reason` doesn't refuse.
        rule: in what a frozen weight multiplies.
        exact: 8-bit floats are summed exactly.
        codes_written: 8-bit codes of 16-bit weights are written out for each product, and none kept.
        written_once: weights in few bits are kept as they are written out, as integers too, but not as codes in e4m3.
    """

    def __init__(
        self,
        storage: GroupStorage,
        dtype: torch.dtype,
        rule: Rule = Compute.DTYPE.rule,
        exact: bool = False,
        codes_written: bool = False,
        written_once: bool = False,
    ) -> None:
        for linear in storage.linears:
            unmerge_disabled(linear)
        self.bases = [base_of(linear) for linear in storage.linears]
        self.dtype, first = dtype, self.bases[0]
        # of the weights: whoever cuts these may leave out_features as it was
        self.widths = [base.out_features if is_written_out(base) else len(base.weight) for base in self.bases]
        ends = list(accumulate(self.widths))
        self.adapters: list[tuple[slice, Adapter]] = []
        self.ranks = [0] * len(self.bases)
        for index, (linear, width, end) in enumerate(zip(storage.linears, self.widths, ends, strict=True)):
            adapter = adapter_of(linear)
            if adapter is not None:
                self.adapters.append((slice(end - width, end), adapter))
                self.ranks[index] = len(adapter.a)
        self.full: bool = first.weight.requires_grad
        self.rule = rule
        self.in_8_bits: bool = not self.full and fits_8_bits(storage, dtype, rule)
        self.read_narrow: list[Tensor] = []
        """Trained weights that other processes share, and whose 16 bits are gathered."""
        # rows of A that lie below W, so that dx is one product: [dy, s · dy B] [W; A]
        below = 0 if self.in_8_bits else storage.rank_below(dtype)
        if not self.in_8_bits:
            self.source: WeightSource = self._source(storage, below, written_once)
        elif rule.forward is rule.backward is Numbers.E4M3:
            self.source = _fp8_source(storage, True, exact, codes_written)
        else:
            forward, backward = (numbers is Numbers.INT8 for numbers in rule)
            self.source = BackwardSource(
                self._integers(storage, False, written_once) if forward else self._source(storage, below, written_once),
                self._integers(storage, True, written_once)
                if backward
                else _fp8_source(storage, False, exact, codes_written),
            )
        self.scale = self.adapters[0][1].scale if self.adapters else 1.0
        self.columns = [columns for columns, _ in self.adapters]
        self.adapter_ranks = [len(adapter.a) for _, adapter in self.adapters]
        self.a: Tensor | None = None
        self.b: Tensor | None = None
        self.copies: list[tuple[Tensor, Tensor]] = []
        """(target, source) pairs that bring A and B up to date."""
        if self.adapters:
            self._place_adapters(ends[-1])
        self._a_transposed = None if self.a is None else self.a.t()
        self._b_transposed = None if self.b is None else self.b.t()
        self._biased = first.bias is not None
        self._static_bias = self._bias(storage)
        self.trained = self._trained()
        self.gradient_dtype: torch.dtype | None = None
        """Of the gradients that `input_grad` and `gradients` give; None for that of each trained tensor."""

    def _source(self, storage: GroupStorage, below: int, written_once: bool) -> WeightSource:
        weights = [base.weight for base in self.bases]
        if is_written_out(self.bases[0]):
            kind = NF4Source if is_4bit(self.bases[0]) else PackedSource
            source: WrittenOutSource = kind(weights, self.dtype, below)
            if not written_once:
                storage.drop_written()
                return source
            return DenseSource(storage.written_out(source, self.dtype, below), sum(self.widths))
        if weights[0].dtype is not self.dtype:
            gathered = narrowed(weights, self.dtype)
            self.read_narrow = [] if gathered is None else weights
            return CopiedSource(weights, self.dtype) if gathered is None else DenseSource(gathered, len(gathered))
        lie_wide(weights)
        return DenseSource(storage.weight(self.dtype), sum(self.widths))

    def _integers(self, storage: GroupStorage, across: bool, written_once: bool) -> Int8Source:
        kept = written_once or not is_written_out(self.bases[0])
        turned = storage.integers(across, self.dtype, kept)
        if kept:
            return Int8Source(turned)
        return WrittenInt8Source([base.weight for base in self.bases], self.widths, turned, across)

    def _place_adapters(self, rows: int) -> None:
        """Make A [R, K] (below W, if there is room) and B [N, R], zero outside the adapters' blocks."""
        example, total = self.adapters[0][1].a, sum(self.adapter_ranks)
        source = self.source
        a = source.storage[rows:] if isinstance(source, DenseSource) and source.side_by_side else None
        self.a = example.new_zeros(total, self.bases[0].in_features, dtype=self.dtype) if a is None else a
        self.b = example.new_zeros(rows, total, dtype=self.dtype)
        rank = 0
        for columns, adapter in self.adapters:
            r = len(adapter.a)
            self.copies.append((self.a[rank : rank + r], adapter.a.detach()))
            self.copies.append((self.b[columns, rank : rank + r], adapter.b.detach()))
            rank += r

    def _bias(self, storage: GroupStorage) -> Tensor | None:
        first = self.bases[0].bias
        merges = first is not None and first.dtype is self.dtype and not is_4bit(self.bases[0])
        return storage.bias() if merges else None

    def _trained(self) -> list[Tensor]:
        found = [base.weight for base in self.bases if self.full]
        found += [base.bias for base in self.bases if self.full and base.bias is not None]
        return found + [tensor for _, adapter in self.adapters for tensor in (adapter.a, adapter.b)]

    def begin(self) -> tuple[FusedLinear, Tensor | None]:
        """Return this linear for one forward and its backward, and a tensor that must live as long (or None)."""
        source, saved = self.source.begin()
        return self._with(source), saved

    def resume(self, saved: Tensor | None) -> FusedLinear:
        """Return this linear for a backward, from the tensor that `begin` gave for its forward."""
        return self._with(self.source.resume(saved))

    def _with(self, source: WeightSource) -> FusedLinear:
        if source is self.source:
            return self
        other = copy.copy(self)
        other.source = source
        return other

    def summing(self) -> FusedLinear:
        """Return this linear with gradients in float32 or wider, which are to be summed over tiles of rows."""
        other = copy.copy(self)
        other.gradient_dtype = torch.promote_types(self.dtype, torch.float32)
        return other

    @property
    def bias(self) -> Tensor | None:
        """b [N] in the products' dtype, or None."""
        if not self._biased or self._static_bias is not None:
            return self._static_bias
        return torch.cat([base.bias.detach().to(self.dtype) for base in self.bases])

    def forward(self, x: Activation) -> tuple[Tensor, Tensor | None]:
        """Return (y [T, N], x Aᵀ [T, R] or None without adapters) of x [T, K]."""
        y, low_rank = self.parts(x)
        if low_rank is None or self._b_transposed is None:
            return y, None
        return y.addmm_(low_rank[0], self._b_transposed, alpha=self.scale), low_rank[0]

    def parts(self, x: Activation) -> tuple[Tensor, LowRank | None]:
        """Return x Wᵀ + b, and (x Aᵀ, B, s) of the s · (x Aᵀ) Bᵀ that is still to be added (None without adapters)."""
        y = self.source.forward(x, self.bias)
        if self.b is None or self._a_transposed is None:
            return y, None
        return y, (x.dense @ self._a_transposed, self.b, self.scale)

    def inner(self, x: Activation) -> Tensor | None:
        """Return x Aᵀ [T, R], or None without adapters."""
        return None if self._a_transposed is None else x.dense @ self._a_transposed

    def input_grad(self, dy: Activation, xa: Tensor | None, wanted: bool = True) -> tuple[Any, LowRankGrads | None]:
        """Return (dx [T, K] if wanted, what adapters' gradients need of dy or None) of dy [T, N] and x Aᵀ."""
        if self.b is None or self.a is None or xa is None:
            return (self.source.input_grad(dy, None) if wanted else None), None
        # s · dy B, beside dy where dx wants them so, and dB
        dense = dy.dense
        both = dense.new_empty(len(dense), sum(self.b.shape)) if wanted and self.source.side_by_side else None
        dtype = self.gradient_dtype or self.adapters[0][1].b.dtype
        given = adapter_gradients.products(dense, self.b, xa, self.columns, self.adapter_ranks, self.scale, dtype, both)
        if not wanted:
            return None, given
        return self.source.input_grad(dy, LowRankGrad(given[0], self.a, both)), given

    def gradients(self, dy: Tensor, given: LowRankGrads | None, x: Tensor) -> list[Tensor]:
        """Return the gradients of `trained`, from dy [T, N], what `input_grad` gave, and x [T, K]."""
        # dW = dyᵀ x and db = Σ dy, cut by linears
        grads: list[Tensor] = []
        if self.full:
            grads += matmul(dy.t(), x, self.gradient_dtype or self.bases[0].weight.dtype).split(self.widths)
            if self.bases[0].bias is not None:
                grads += dy.sum(0, dtype=self.gradient_dtype or self.bases[0].bias.dtype).split(self.widths)
        if given is None:
            return grads
        # dA = (s · dy B)ᵀ x, cut by adapters; dB was made with it
        dya, dbs = given
        das = matmul(dya.t(), x, self.gradient_dtype or self.adapters[0][1].a.dtype).split(self.adapter_ranks)
        return grads + [grad for pair in zip(das, dbs, strict=True) for grad in pair]


def fits_8_bits(storage: GroupStorage, dtype: torch.dtype, rule: Rule) -> bool:
    """Tell whether a group's weights are to multiply in 8 bits and can, beside activations in 16."""
    return rule.in_8_bits and dtype is not torch.float32 and unfit_for_8_bits(storage, rule) is None


def unfit_for_8_bits(storage: GroupStorage, rule: Rule) -> str | None:
    """Say which of a group's weights can't multiply in 8 bits, or None if all can, or needn't.

    Sizes are the products', and 4-bit blocks that codes are written out of end with the rows.
    """
    bases = [base_of(linear) for linear in storage.linears]
    if not rule.in_8_bits:
        return None
    sizes = ", ".join(f"{base.out_features} x {base.in_features}" for base in bases)
    if Numbers.INT8 in rule:
        if storage.is_shared():
            return "weights that processes share: its codes are of whole weights"
        # rows of x, and of the outputs' gradients side by side
        columns = bases[0].in_features, sum(base.out_features for base in bases)
        if all(size % GROUP == 0 and size <= LONGEST for size in columns):
            return None
        limits = f"multiples of {GROUP} and at most {LONGEST:,}"
        return f"weights of {sizes}: inputs, and the outputs of all, must be {limits}"
    blocks = [base.weight.blocksize for base in bases if is_4bit(base)]
    whole = all(base.in_features % base.weight.blocksize == 0 for base in bases if is_4bit(base))
    if whole and not any(size % MULTIPLE for base in bases for size in (base.in_features, base.out_features)):
        return None
    rows = f", and rows whole 4-bit blocks of {blocks[0]} weights" if blocks else ""
    return f"weights of {sizes}: sizes must be multiples of {MULTIPLE}{rows}"


def check_8_bits(storages: Sequence[tuple[GroupStorage, Rule]], compute: Compute) -> None:
    """Refuse a compute that some of a model's weights can't have.

    Raises:
        UnsupportedError: a weight's sizes don't fit, or processes share weights that another compute needs so.
    """
    for storage, rule in storages:
        if (reason := unfit_for_8_bits(storage, rule)) is not None:
            fits = all(unfit_for_8_bits(each, Compute.FP8.rule) is None for each, _ in storages)
            fits &= has_products(Compute.FP8, base_of(storage.linears[0]).weight.device)
            other = "use compute = 'fp8', or " * (compute is Compute.INT8 and fits)
            raise UnsupportedError(
                f"compute = '{compute}' for {reason}", f"{other}leave compute out (products in the model's dtype)"
            )
        if not is_ready_for_8_bits(storage, rule):
            raise UnsupportedError(
                f"compute = '{compute}', and processes share the layers' weights as another compute needs them",
                "give share_layers the same compute",
            )


def is_ready_for_8_bits(storage: GroupStorage, rule: Rule) -> bool:
    """Tell whether a group's weights can be quantised now, or were made ready for a compute before processes shared
    them (`models.share`): after that they may be another layer's."""
    if not storage.is_shared() or not rule.in_8_bits:
        return True
    weights = [base_of(linear).weight for linear in storage.linears]
    written = [hasattr(weight, ROW_SCALES) and (is_nf4(weight) or rule.forward is Numbers.DTYPE) for weight in weights]
    return all(each or has_own_codes(weight) for each, weight in zip(written, weights, strict=True))


def _fp8_source(storage: GroupStorage, forward: bool, exact: bool, codes_written: bool) -> CodesSource:
    bases = [base_of(linear) for linear in storage.linears]
    if codes_written or is_4bit(bases[0]) or hasattr(bases[0].weight, ROW_SCALES):
        storage.drop_codes()
        return WrittenCodesSource([base.weight for base in bases], exact)
    return FP8Source(storage.codes(forward), exact)
