"""Weight sources: how the weights of one merged product multiply.

    y = x Wᵀ (+ b)        dx = dy W + (s · dy B) A

A layer asks its source to multiply and never holds a weight tensor for the backward itself: the backward asks again. So
weights may be a view, be written out from 4 bits for each product, or be gathered from shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.nf4 import NF4Weight, write_out
from pronghorn.kernels.packed import PackedTensor
from pronghorn.kernels.quantise import RowCodes


class Activation(NamedTuple):
    """What a product is given: [T, K] in the products' dtype and, where the kernel that made it wrote them, codes."""

    dense: Tensor
    codes: RowCodes | None = None
    """Of dense; of a gradient, of dense · the source's `columns`."""


class LowRankGrad(NamedTuple):
    """What LoRA adds to dx: (s · dy B) A."""

    dya: Tensor
    """[T, R], s · dy B."""
    a: Tensor
    """[R, K]."""
    both: Tensor | None
    """[T, N + R], dy and dya side by side, where the source asked for them."""


class WeightSource:
    """One merged weight W [N, K]. A subclass multiplies; a source is static and knows nothing of a batch."""

    side_by_side: bool = False
    """`input_grad` wants dy and s · dy B in one tensor, since A lies below W."""
    wants_codes: bool = False
    """The forward multiplies codes. Whoever makes x may write them in the same pass; else the source makes them."""
    wants_gradient_codes: bool = False
    """The same of dy, in `input_grad`."""
    columns: Tensor | None = None
    """c [N], where dy's codes are wanted: they are those of dy · c."""

    def begin(self) -> tuple[WeightSource, Tensor | None]:
        """Return the source for one forward and its backward, and a tensor that must live as long (or None)."""
        return self, None

    def resume(self, saved: Tensor | None) -> WeightSource:
        """Return the source for a backward, from the tensor that `begin` gave for its forward."""
        return self

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b [T, N] of x [T, K]."""
        raise NotImplementedError

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        """Return dx [T, K] of dy [T, N], with LoRA's part."""
        raise NotImplementedError


class DenseSource(WeightSource):
    """W in the products' dtype, where it lies.

    Args:
        storage: [N, K], or [N + R, K] with room for LoRA's A below W.
        rows: N.
    """

    def __init__(self, storage: Tensor, rows: int) -> None:
        self.storage = storage
        self.weight = storage[:rows]
        self._transposed = self.weight.t()
        self.side_by_side = len(storage) > rows

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        return x.dense @ self._transposed if bias is None else torch.addmm(bias, x.dense, self._transposed)

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        if low_rank is not None and low_rank.both is not None:
            return low_rank.both @ self.storage
        dx = dy.dense @ self.weight
        return dx if low_rank is None else dx.addmm_(low_rank.dya, low_rank.a)


class CopiedSource(WeightSource):
    """Float32 weights that are trained, copied to the products' dtype for each forward."""

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._weights, self._dtype = list(weights), dtype

    def begin(self) -> tuple[WeightSource, Tensor | None]:
        rows = [len(weight) for weight in self._weights]
        copy = self._weights[0].new_empty(sum(rows), self._weights[0].shape[1], dtype=self._dtype)
        for part, weight in zip(copy.split(rows), self._weights, strict=True):
            part.copy_(weight.detach())  # one by one: all in one launch goes at two thirds of the bandwidth
        return DenseSource(copy, len(copy)), copy

    def resume(self, saved: Tensor | None) -> WeightSource:
        assert saved is not None
        return DenseSource(saved, len(saved))


class WrittenOutSource(WeightSource):
    """Weights in few bits, written out for each product.

    Args:
        shapes: [N_i, K] of weights that come one below the other.
        stored: the dtype that they are written out in, before they get the products' `dtype`.
        below: R, rows of LoRA's A that come below W when dx is computed; 0 for none.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], stored: torch.dtype, dtype: torch.dtype, below: int) -> None:
        self._rows, self._columns = [shape[0] for shape in shapes], shapes[0][1]
        self._stored, self._dtype, self._below = stored, dtype, below
        self.side_by_side = below > 0

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        weight = self.write_out(x.dense.device, 0).t()
        return x.dense @ weight if bias is None else torch.addmm(bias, x.dense, weight)

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        if low_rank is not None and low_rank.both is not None:
            whole = self.write_out(dy.dense.device, self._below)
            whole[-self._below :] = low_rank.a
            return low_rank.both @ whole
        dx = dy.dense @ self.write_out(dy.dense.device, 0)
        return dx if low_rank is None else dx.addmm_(low_rank.dya, low_rank.a)

    def write_out(self, device: torch.device, more: int) -> Tensor:
        """Return W [N + more, K] in the products' dtype, the last rows uninitialised."""
        whole = torch.empty(sum(self._rows) + more, self._columns, dtype=self._stored, device=device)
        for index, part in enumerate(whole.split([*self._rows, more])[: len(self._rows)]):
            self._write(index, part)
        return whole.to(self._dtype)

    def _write(self, index: int, out: Tensor) -> None:
        """Write one of the weights into `out`."""
        raise NotImplementedError


class NF4Source(WrittenOutSource):
    """bitsandbytes' 4-bit weights (`Params4bit`)."""

    def __init__(self, weights: Sequence[Any], dtype: torch.dtype, below: int) -> None:
        self._weights = [NF4Weight.of(weight) for weight in weights]
        super().__init__([weight.shape for weight in self._weights], weights[0].quant_state.dtype, dtype, below)

    def _write(self, index: int, out: Tensor) -> None:
        write_out(self._weights[index], out)


class PackedSource(WrittenOutSource):
    """Weights of a packed checkpoint (`PackedTensor`)."""

    def __init__(self, weights: Sequence[PackedTensor], dtype: torch.dtype, below: int) -> None:
        self._weights = list(weights)
        super().__init__([weight.shape for weight in weights], weights[0].dtype, dtype, below)

    def _write(self, index: int, out: Tensor) -> None:
        self._weights[index].write_out(out)
