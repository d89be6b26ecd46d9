"""A residual block, x → x + after(f(before(x))), as one autograd function with named inputs and outputs.

A decoder layer is a tuple of blocks. A block is made once, at attach, and knows nothing of a batch; what a forward
tells it is a `Call`. What the backward needs is a NamedTuple of the block's own (`Saved`), so that nothing is found by
position. Blocks whose f can't be computed here call the layer's modules (`layers.stock`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pronghorn.attention import explicit
from pronghorn.data.batch import PackedBatch
from pronghorn.errors import TrainingError
from pronghorn.kernels import residual, rms_norm
from pronghorn.kernels.once import refuse_second_derivatives
from pronghorn.kernels.quantise import RowCodes
from pronghorn.kernels.residual import LowRank
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.memory.plan import Policy
from pronghorn.precision.source import Activation


@dataclass(frozen=True)
class Call:
    """What one forward tells the blocks of one layer."""

    packed: PackedBatch
    cos: Tensor
    """[T, D_r], of each position; D_r columns of a head are rotated."""
    sin: Tensor
    policy: Policy
    rows: Tensor | None
    """int64 [M]: the mixer returns these rows only. A row that is named more than once must have no gradient."""
    output_wanted: bool
    """Whether the last block's output is read, or only what its backward needs is (in a recomputation)."""
    mlp_rows: int = 0
    """Rows of the tiles that a gated MLP is computed in; 0: as a whole."""
    attention: explicit.Options | None = None
    """What packed attention goes through, chosen once for forward and backward."""
    positions: Tensor | None = None
    """Of each token in its document, of any shape; a layer whose family scales queries by them is given some."""

    @property
    def keeps_norms(self) -> bool:
        """Whether norms' results are kept; a layer that is recomputed as a whole keeps as little as it can."""
        return self.policy is Policy.KEEP


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: its weight [H] and numbers."""

    weight: Tensor
    eps: float
    offset: float

    def forward(self, x: Tensor, dtype: torch.dtype, codes: bool = False) -> tuple[Activation, Tensor]:
        """Return (y in `dtype`, with codes if they are wanted; r); see `kernels.rms_norm`."""
        made = RowCodes.like(x) if codes else None
        y, rstd = rms_norm.forward(x, self.weight, self.eps, self.offset, dtype, codes=made)
        return Activation(y, made), rstd

    def backward(
        self, dy: Tensor, x: Tensor, rstd: Tensor, residual_grad: Tensor | None = None, donated: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return (dx, dw or None); see `kernels.rms_norm`. `donated`: dx may take dy's place."""
        trained, out = self.weight.requires_grad, dy if donated and dy.dtype is x.dtype else None
        return rms_norm.backward(dy, x, self.weight, rstd, self.offset, trained, residual_grad, out)

    def backward_to(self, linear: FusedLinear, dy: Tensor, x: Tensor, rstd: Tensor) -> tuple[Activation, Tensor | None]:
        """Return (dx, with codes if `linear`, whose result x is, wants them; dw or None)."""
        source = linear.source
        made = RowCodes.like(x) if source.wants_gradient_codes else None
        dx, dw = rms_norm.backward(
            dy, x, self.weight, rstd, self.offset, self.weight.requires_grad, codes=made, columns=source.columns
        )
        return Activation(dx, made), dw


@dataclass(frozen=True)
class NoNorm:
    """Stands where a block has no norm before it (Olmo): f is given the residual stream."""

    weight: None = None

    def forward(self, x: Tensor, dtype: torch.dtype, codes: bool = False) -> tuple[Activation, None]:
        """Return x in `dtype`, without codes: nothing is made here."""
        return Activation(x.to(dtype)), None

    def backward(
        self, dy: Tensor, x: Tensor, rstd: None, residual_grad: Tensor, donated: bool = True
    ) -> tuple[Tensor, None]:
        """Return dy, which is overwritten, with the stream's own gradient."""
        return residual.add_(dy, residual_grad, None), None


class Result(NamedTuple):
    """What a block's forward gives."""

    x: Tensor
    """The residual stream after the block."""
    outputs: tuple[Tensor, ...]
    """The named outputs, in the order of `Block.outputs`."""
    saved: NamedTuple
    """What the backward needs, by name."""
    state: tuple[Tensor, ...] = ()
    """What it needs besides, of a number that depends on the batch."""


class Gradients(NamedTuple):
    """What a block's backward gives."""

    x: Tensor | None
    inputs: Sequence[Tensor | None]
    """Of the named inputs, in the order of `Block.inputs`."""
    trained: Sequence[Tensor | None]
    """In the order of `Block.trained`."""


class Block:
    """One residual block that is computed here. A subclass computes forward and backward."""

    inputs: tuple[str, ...] = ()
    """Tensors that it reads besides x and that may have gradients, by name."""
    outputs: tuple[str, ...] = ()
    """Tensors that it gives besides x, by name."""
    Saved: ClassVar[type]
    """A NamedTuple of tensors (or None)."""
    linears: Sequence[FusedLinear]
    multiplier: float = 1.0
    """Of what f adds to x."""
    trained: Sequence[Tensor | None]
    """Everything that may be trained, in the order of the gradients; None for a part that the block lacks."""

    def compute(self, x: Tensor, inputs: Sequence[Tensor], linears: Sequence[FusedLinear], call: Call) -> Result:
        """Compute the block of x [T, H]."""
        raise NotImplementedError

    def gradients(
        self,
        dx: Tensor,
        d_outputs: Sequence[Tensor | None],
        saved: Any,
        state: Sequence[Tensor],
        linears: Sequence[FusedLinear],
        call: Call,
        wanted: bool,
    ) -> Gradients:
        """Compute the gradients from those of the results. `wanted`: whether x's own is read."""
        raise NotImplementedError

    def __call__(self, x: Tensor, named: dict[str, Tensor], call: Call) -> Tensor:
        """Run the block on x [T, H], read its named inputs from `named` and add its named outputs there."""
        given = [named[name] for name in self.inputs]
        found = _Residual.apply(self, call, x, *given, *self.tracked[1])
        if not self.outputs:
            return found
        x, *outputs = found
        named.update(zip(self.outputs, outputs, strict=True))
        return x

    @cached_property
    def tracked(self) -> tuple[list[int], list[Tensor]]:
        """The positions in `trained` of what is trained as the model is now, and these tensors."""
        found = [(i, t) for i, t in enumerate(self.trained) if t is not None and t.requires_grad]
        return [i for i, _ in found], [t for _, t in found]


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Block, call: Call, x: Tensor, *tensors: Tensor | None) -> Any:
        begun = [linear.begin() for linear in block.linears]
        linears = [linear for linear, _ in begun]
        result = block.compute(x, tensors[: len(block.inputs)], linears, call)  # type: ignore[arg-type]
        ctx.save_for_backward(*(saved for _, saved in begun), *result.saved, *result.state)
        ctx.block, ctx.call = block, call
        ctx.versions = [tensor._version for tensor in block.tracked[1]]
        return (result.x, *result.outputs) if block.outputs else result.x

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, dx: Tensor, *d_outputs: Tensor | None) -> Any:
        block: Block = ctx.block
        positions, tracked = block.tracked
        if ctx.versions != [tensor._version for tensor in tracked]:  # the backward reads them where they lie
            raise TrainingError(
                "weights were updated between a forward and its backward",
                "step the optimiser after the backward of every forward before it",
            )
        tensors = list(ctx.saved_tensors)
        linears = [linear.resume(tensors.pop(0)) for linear in block.linears]
        # no name here holds what was saved: what was made again for this backward goes when it was used
        found = block.gradients(
            dx.contiguous(),
            d_outputs,
            _taken(tensors, block.Saved),
            tensors,
            linears,
            ctx.call,
            ctx.needs_input_grad[2],
        )
        if freed_after():  # a loss that is kept doesn't keep the model
            ctx.block = ctx.call = ctx.versions = None
        return None, None, found.x, *found.inputs, *(found.trained[position] for position in positions)


def times(multiplier: float, grad: Tensor) -> Tensor:
    """Return the gradient of what was added to x this many times."""
    return grad if multiplier == 1 else multiplier * grad


def pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return these rows of x, or x."""
    return x if rows is None else x[rows]


def spread(grad: Tensor, rows: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient of all rows of a tensor like this from that of some, as `pick` took them."""
    return grad if rows is None else grad.new_zeros(len(like), grad.shape[1]).index_copy_(0, rows, grad)


def add(
    x: Tensor | None, y: Tensor, low_rank: LowRank | None, norm: Norm | None, multiplier: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x + m · y with its low-rank part, normed if there is a norm, and what the norm's backward needs (y, r).

    Without x, which needs a norm, nothing is added.
    """
    if norm is None:
        assert x is not None
        return residual.add_(y, x, low_rank, multiplier), None, None
    y = y if low_rank is None else y.addmm_(low_rank[0], low_rank[1].t(), alpha=low_rank[2])
    normed, rstd = norm.forward(y, y.dtype)
    return normed.dense if x is None else residual.add_(normed.dense, x, None, multiplier), y, rstd


def back_through_add(
    dx: Tensor, linear: FusedLinear, y: Tensor | None, rstd: Tensor | None, norm: Norm | None, multiplier: float
) -> tuple[Activation, Tensor | None]:
    """Return (the gradient of `add`'s y, a result of `linear`'s; that of the norm's weight, or None).

    Args:
        dx: of what was added to x, times m.
        y, rstd: what `add` returned for its norm.
    """
    grad = times(multiplier, dx)
    if norm is None:
        return Activation(grad.to(linear.dtype)), None
    assert y is not None and rstd is not None
    return norm.backward_to(linear, grad, y, rstd)


def freed_after() -> bool:
    """Tell whether autograd frees what was saved after this backward: nobody retains the graph.

    Without torch's own word for it (a private name) the answer is no, and nothing that was saved is overwritten.
    """
    retained = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return retained is not None and not retained()


def _taken(tensors: list[Tensor], kind: Any) -> Any:
    """Move the first tensors of the list into a NamedTuple of that kind."""
    count = len(kind._fields)
    saved = kind(*tensors[:count])
    del tensors[:count]
    return saved
