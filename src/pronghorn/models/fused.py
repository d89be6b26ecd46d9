"""A decoder layer as one autograd function: what runs is written out, forward and backward.

    h   = x + attention(norm(x))    q·k·v in one product → RoPE (and qk-norm) → packed attention → o
    out = h + mlp(norm(h))          gate·up in one product → gated activation → down

Gemma 3 has two norms more, on what is added. Layers with another MLP (experts) have the attention half alone.

Where only some rows of the last layer's output are read (the loss's), all that follows its attention is computed for
these alone: h, out and what is between have M rows. The others' gradients are zero, so that no sum loses anything.

Kept for the backward: x and h with their norms' results, q·k·v, attention's output and log-sum-exp, gate·up. The
activation is computed again; so are, as the layer's policy says, the norms' results and gate·up. Source of the
gradients: the formulas in `kernels` and `models.merged`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pronghorn.attention import explicit
from pronghorn.attention.backends import Backend
from pronghorn.data.batch import PackedBatch
from pronghorn.errors import TrainingError
from pronghorn.kernels import glu, residual, rms_norm, rope
from pronghorn.kernels.residual import LowRank
from pronghorn.kernels.rope import Heads
from pronghorn.memory.plan import Policy
from pronghorn.models.merged import LinearGroup, Operands, read


@dataclass(frozen=True)
class AttentionParts:
    """One layer's attention: its linears and its geometry."""

    qkv: LinearGroup
    out: LinearGroup
    heads: Heads
    scale: float
    window: int | None
    backend: Backend
    sinks: Tensor | None = None
    """[H], scores that have no value (gpt-oss)."""

    @property
    def groups(self) -> list[LinearGroup]:
        """In the order of the forward."""
        return [self.qkv, self.out]

    def options(self, query: Tensor, packed: PackedBatch) -> explicit.Options:
        """What attention is told of a batch, for queries like this."""
        return explicit.Options.choose(self.backend, query, packed, self.scale, self.window)


@dataclass(frozen=True)
class MLPParts:
    """One layer's MLP."""

    gate_up: LinearGroup
    down: LinearGroup
    activation: glu.Activation


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's weight [H] and numbers."""

    weight: Tensor
    eps: float
    offset: float

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(y in `dtype`, r); see `kernels.rms_norm`."""
        return rms_norm.forward(x, self.weight, self.eps, self.offset, dtype)

    def backward(
        self, dy: Tensor, x: Tensor, rstd: Tensor, residual_grad: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(dx, dw or None); see `kernels.rms_norm`."""
        return rms_norm.backward(dy, x, self.weight, rstd, self.offset, self.weight.requires_grad, residual_grad)


@dataclass(frozen=True)
class LayerParts:
    """A whole layer."""

    attention: AttentionParts
    mlp: MLPParts
    before: tuple[Norm, Norm]
    """Of what attention and MLP are given."""
    after: tuple[Norm, Norm] | None
    """Of what they add to the residual stream, where the family has such."""

    @property
    def groups(self) -> list[LinearGroup]:
        """In the order of the forward."""
        return [*self.attention.groups, self.mlp.gate_up, self.mlp.down]


def attention(x: Tensor, cos: Tensor, sin: Tensor, packed: PackedBatch, parts: AttentionParts) -> Tensor:
    """x, y: [T, H], in the dtype of the products; cos, sin: [T, D]."""
    linears = read(parts.groups, x.dtype)
    more = parts.heads.query_norm, parts.heads.key_norm, parts.sinks
    return _Attention.apply(x, cos, sin, packed, parts, linears, *more, *_trained(linears))


def layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    packed: PackedBatch,
    parts: LayerParts,
    dtype: torch.dtype,
    policy: Policy,
    rows: Tensor | None = None,
    output_wanted: bool = True,
) -> Tensor:
    """x, y: [T, H], contiguous; cos, sin: [T, D]; products are in `dtype`.

    Args:
        rows: int64 [M]: y is [M, H] of these; one that is named more than once must have no gradient.
        output_wanted: whether y is wanted, or only what a backward needs (y's values mean nothing then): the product of
            down, a quarter of a layer's operations, is left out.
    """
    linears = read(parts.groups, dtype)
    norms = [norm.weight for norm in (*parts.before, *(parts.after or ()))]
    heads = parts.attention.heads
    more = *norms, heads.query_norm, heads.key_norm, parts.attention.sinks
    return _Layer.apply(x, cos, sin, packed, parts, policy, rows, output_wanted, linears, *more, *_trained(linears))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        packed: PackedBatch,
        parts: AttentionParts,
        linears: list[Operands],
        *weights: Tensor | None,
    ) -> Tensor:
        y, low_rank, ctx.options, kept = _attention_forward(x, cos, sin, packed, parts, linears)
        ctx.save_for_backward(*_copies(ctx, linears), x, cos, sin, *kept)
        ctx.parts, ctx.trained = parts, _versions(ctx, weights)
        return _whole(y, low_rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        _check_versions(ctx.trained)
        linears, (x, cos, sin, *kept) = _linears(ctx)
        wanted = ctx.needs_input_grad[0]
        dx, gradients = _attention_backward(dy, x, cos, sin, kept, ctx.options, ctx.parts, linears, wanted)
        _let_go(ctx)
        return dx, *(None,) * 5, *gradients


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        packed: PackedBatch,
        parts: LayerParts,
        policy: Policy,
        rows: Tensor | None,
        output_wanted: bool,
        linears: list[Operands],
        *weights: Tensor | None,
    ) -> Tensor:
        dtype = linears[0].dtype
        normed, rstd = parts.before[0].forward(x, dtype)
        y, low_rank, ctx.options, kept = _attention_forward(
            normed, cos, sin, packed, parts.attention, linears[:2], rows
        )
        h, after = _add(_picked(x, rows), y, low_rank, parts.after and parts.after[0])
        h_normed, h_rstd = parts.before[1].forward(h, dtype)
        a, gate_up, xa = _gate_up(h_normed, parts.mlp, linears[2])
        if output_wanted or parts.after is not None:  # whose backward needs y
            y, low_rank = linears[3].parts(a)
            a_a = low_rank and low_rank[0]
            del a
            out, h_after = _add(h, y, low_rank, parts.after and parts.after[1])
        else:
            a_a, out, h_after = linears[3].inner(a), h.new_empty(()).expand_as(h), (None, None)
        keep = policy is Policy.KEEP  # of a layer that is recomputed as a whole as little as may be, too
        large = (
            normed if keep else None,
            h_normed if keep else None,
            None if policy is Policy.RECOMPUTE_MLP else gate_up,
        )
        small = x, rstd, *after, h, h_rstd, *h_after, xa, a_a
        ctx.save_for_backward(*_copies(ctx, linears), *small, *large, rows, cos, sin, *kept)
        ctx.parts, ctx.trained = parts, _versions(ctx, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        _check_versions(ctx.trained)
        linears, saved = _linears(ctx)
        x, rstd, y, y_rstd, h, h_rstd, h_y, h_y_rstd, xa, a_a, *rest = saved
        normed, h_normed, gate_up, rows, cos, sin, *kept = rest
        del saved, rest  # what was made again for this backward goes when it was used
        parts: LayerParts = ctx.parts
        dtype = linears[0].dtype
        norms = [*parts.before, *(parts.after or ())]
        d_norms: list[Tensor | None] = [None] * len(norms)
        d_out = d_out.contiguous()

        dy = d_out
        if parts.after is not None:
            dy, d_norms[3] = norms[3].backward(d_out, h_y, h_y_rstd)
        donated = gate_up is None or _freed_after()
        if gate_up is None:
            h_normed = norms[1].forward(h, dtype)[0]
            gate_up = _gate_up(h_normed, parts.mlp, linears[2])[1]
        d_gate_up, down_grads = _down_backward(dy.to(dtype), gate_up, donated, a_a, parts.mlp, linears[3])
        if h_normed is None:  # not before: the peak of memory is behind
            h_normed = norms[1].forward(h, dtype)[0]
        d_normed, given = linears[2].input_grad(d_gate_up, xa)
        mlp_grads = [*linears[2].gradients(d_gate_up, given, h_normed), *down_grads]
        del d_gate_up
        dh, d_norms[1] = norms[1].backward(d_normed, h, h_rstd, d_out)
        del d_normed, h_normed, gate_up

        dy = dh
        if parts.after is not None:
            dy, d_norms[2] = norms[2].backward(dh, y, y_rstd)
        if normed is None:
            normed = norms[0].forward(x, dtype)[0]
        wanted = ctx.needs_input_grad[0] or norms[0].weight.requires_grad
        dx, gradients = _attention_backward(
            dy.to(dtype), normed, cos, sin, kept, ctx.options, parts.attention, linears[:2], wanted, rows
        )
        if dx is not None:
            dx, d_norms[0] = norms[0].backward(dx, x, rstd, _spread(dh, rows, x))
        _let_go(ctx)
        return dx, *(None,) * 8, *d_norms, *gradients, *mlp_grads


def _attention_forward(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    packed: PackedBatch,
    parts: AttentionParts,
    linears: list[Operands],
    rows: Tensor | None = None,
) -> tuple[Tensor, LowRank | None, explicit.Options, tuple[Tensor | None, ...]]:
    """(o's product of the rows, what its adapter adds, attention's options and what else the backward needs) of x
    [T, H]."""
    qkv, xa = linears[0].forward(x)
    q, k, v = rope.forward(qkv, cos, sin, parts.heads)
    options = parts.options(q, packed)
    mixed, state = explicit.forward(q, k, v, options, parts.sinks)
    y, low_rank = linears[1].parts(_picked(mixed.flatten(1), rows))
    return y, low_rank, options, (qkv, mixed, xa, low_rank and low_rank[0], *state)


def _attention_backward(
    dy: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    kept: list[Tensor],
    options: explicit.Options,
    parts: AttentionParts,
    linears: list[Operands],
    wanted: bool,
    rows: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dx if wanted, the gradients of q's and k's norms, the sinks and all of the linears that is trained)."""
    qkv, mixed, xa, mixed_a, *state = kept
    heads = parts.heads
    d_mixed, given = linears[1].input_grad(dy, mixed_a)
    out_grads = linears[1].gradients(dy, given, _picked(mixed.flatten(1), rows))
    d_mixed = _spread(d_mixed, rows, mixed)
    if heads.query_norm is None:
        (q, k, v), raw = heads.split(qkv), None
    else:
        (q, k, v), raw = rope.forward(qkv, cos, sin, heads), qkv
    dqkv, d_sinks = explicit.backward(d_mixed.view_as(mixed), q, k, v, mixed, state, options, parts.sinks)
    del d_mixed
    norm_grad = any(norm is not None and norm.requires_grad for norm in (heads.query_norm, heads.key_norm))
    dqkv, *norm_grads = rope.backward_(dqkv, cos, sin, heads, raw, norm_grad)
    dx, given = linears[0].input_grad(dqkv, xa, wanted)
    return dx, [*norm_grads, d_sinks, *linears[0].gradients(dqkv, given, x), *out_grads]


def _picked(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def _spread(grad: Tensor, rows: Tensor | None, like: Tensor) -> Tensor:
    """The gradient of all rows of a tensor like this from that of some, `_picked`."""
    return grad if rows is None else grad.new_zeros(len(like), grad.shape[1]).index_copy_(0, rows, grad)


def _gate_up(x: Tensor, parts: MLPParts, linear: Operands) -> tuple[Tensor, Tensor, Tensor | None]:
    """(the activation [T, I], gate·up [T, 2·I], x Aᵀ)."""
    gate_up, low_rank = linear.parts(x)
    if low_rank is None:
        return glu.forward(gate_up, parts.activation), gate_up, None
    gate, up = linear.ranks
    return glu.forward_with_low_rank_(gate_up, *low_rank, parts.activation, (gate, up)), gate_up, low_rank[0]


def _down_backward(
    dy: Tensor, gate_up: Tensor, donated: bool, a_a: Tensor | None, parts: MLPParts, down: Operands
) -> tuple[Tensor, list[Tensor]]:
    """(d(gate·up), the gradients of down that are trained). `donated`: gate·up may be overwritten."""
    da, given = down.input_grad(dy, a_a)
    d_gate_up = glu.backward_(da, gate_up, parts.activation, donated)
    return d_gate_up, down.gradients(dy, given, da)  # da holds the activation now


def _copies(ctx: Any, linears: list[Operands]) -> list[Tensor | None]:
    """Copies of weights, to be saved as activations are: they go with the graph, or when the layer is recomputed."""
    ctx.linears = [linear.with_copy(None) for linear in linears]
    return [linear.copy for linear in linears]


def _linears(ctx: Any) -> tuple[list[Operands], tuple[Tensor, ...]]:
    """The forward's linears, and the other saved tensors."""
    saved, count = ctx.saved_tensors, len(ctx.linears)
    return [linear.with_copy(copy) for linear, copy in zip(ctx.linears, saved[:count], strict=True)], saved[count:]


def _freed_after() -> bool:
    """Whether autograd frees what was saved after this backward pass: nobody retains the graph."""
    retained = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return retained is not None and not retained()


def _let_go(ctx: Any) -> None:
    """Of the weights, as autograd does of what is saved: a loss that is kept would keep the model."""
    if _freed_after():
        ctx.parts = ctx.linears = ctx.trained = None


def _add(
    x: Tensor, y: Tensor, low_rank: LowRank | None, norm: Norm | None
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """(x + y with its low-rank part, normed if there is a norm; what that norm's backward needs)."""
    if norm is None:
        return residual.add_(y, x, low_rank), (None, None)
    y = _whole(y, low_rank)
    normed, rstd = norm.forward(y, y.dtype)
    return residual.add_(normed, x, None), (y, rstd)


def _whole(y: Tensor, low_rank: LowRank | None) -> Tensor:
    return y if low_rank is None else y.addmm_(low_rank[0], low_rank[1].t(), alpha=low_rank[2])


def _versions(ctx: Any, weights: tuple[Tensor | None, ...]) -> list[tuple[Tensor, int]]:
    """The trained weights and how often each was written to: the backward reads them where they lie."""
    needed = ctx.needs_input_grad[-len(weights) :]
    return [
        (weight, weight._version) for weight, need in zip(weights, needed, strict=True) if weight is not None and need
    ]


def _check_versions(trained: list[tuple[Tensor, int]] | None) -> None:
    if trained and any(weight._version != version for weight, version in trained):
        raise TrainingError(
            "weights were updated between a forward and its backward",
            "step the optimiser after the backward of every forward before it",
        )


def _trained(linears: list[Operands]) -> list[Tensor]:
    return [tensor for linear in linears for tensor in linear.trained]
