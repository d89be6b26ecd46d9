"""The attention block: x → x + after(o(attention(rope(qkv(before(x)))))), one autograd function.

Kept for the backward: x with its norm's result, q·k·v, attention's output and log-sum-exp. Where only some rows of the
layer's output are read, all that follows attention is computed for these alone: the others' gradients are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pronghorn.attention import explicit
from pronghorn.attention.backends import Backend
from pronghorn.data.batch import PackedBatch
from pronghorn.layers.block import Block, Call, Gradients, NoNorm, Norm, Result, add, back_through_add, pick, spread
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.layers.heads import QKV
from pronghorn.precision.source import Activation


class AttentionSaved(NamedTuple):
    """What the backward of an attention block needs."""

    x: Tensor
    """[T, H]."""
    rstd: Tensor | None
    normed: Tensor | None
    """before(x); None where it is computed again."""
    qkv: Tensor
    """[T, (H + 2·H_kv)·D], fewer columns where values are keys or both are another layer's: rotated, or as the product
    left it where norms are computed again."""
    mixed: Tensor
    """[T, H, D], attention's output."""
    xa: Tensor | None
    """[T, R], of q·k·v's adapters."""
    mixed_a: Tensor | None
    """[M, R], of o's adapter."""
    y: Tensor | None
    """What the norm after was given."""
    y_rstd: Tensor | None


class AttentionBlock(Block):
    """Softmax attention with grouped heads and RoPE.

    Args:
        qkv, out: the merged products.
        heads: how q, k and v are laid out, normed and rotated.
        scale: of the scores.
        window: tokens that a query sees, itself included; None for no limit.
        backend: of packed attention.
        before, after: the block's norms.
        sinks: [H], scores that have no value (gpt-oss).
        multiplier: of what attention adds.
        gives: names that k and v are given by, to later layers.
        reads: names of the k and v [T, H_kv, D] that an earlier layer gave.
    """

    Saved = AttentionSaved

    def __init__(
        self,
        qkv: FusedLinear,
        out: FusedLinear,
        heads: QKV,
        scale: float,
        window: int | None,
        backend: Backend,
        before: Norm | NoNorm,
        after: Norm | None,
        sinks: Tensor | None,
        multiplier: float = 1.0,
        gives: tuple[str, ...] = (),
        reads: tuple[str, ...] = (),
    ) -> None:
        self.linears = qkv, out
        self.inputs, self.outputs = reads, gives
        self.heads, self.scale, self.window, self.backend = heads, scale, window, backend
        self.before, self.after, self.sinks, self.multiplier = before, after, sinks, multiplier
        norms = before.weight, None if after is None else after.weight, *heads.norm_weights
        self.trained = [*norms, sinks, *qkv.trained, *out.trained]

    def options(self, query: Tensor, packed: PackedBatch) -> explicit.Options:
        """Choose how packed attention goes for queries like this [..., D]."""
        return explicit.Options.choose(self.backend, query, packed, self.scale, self.window)

    def compute(self, x: Tensor, inputs: Sequence[Tensor], linears: Sequence[FusedLinear], call: Call) -> Result:
        qkv_linear, out_linear = linears
        given, rstd = self.before.forward(x, qkv_linear.dtype, qkv_linear.source.wants_codes)
        qkv, xa = qkv_linear.forward(given)
        normed = given.dense
        del given  # its codes go with it
        q, k, v, _ = self.heads.forward(qkv, call)
        if self.inputs:
            k, v = (y.to(q.dtype) for y in inputs)
        assert call.attention is not None
        mixed, state = explicit.forward(q, k, v, call.attention, self.sinks)
        gated = self.heads.gate(pick(mixed.flatten(1), call.rows), self._gates_of(qkv, call.rows))
        y, low_rank = out_linear.parts(Activation(gated))
        h, after_y, after_rstd = add(pick(x, call.rows), y, low_rank, self.after, self.multiplier)
        saved = AttentionSaved(
            x=x,
            rstd=rstd,
            normed=normed if call.keeps_norms else None,
            qkv=qkv,
            mixed=mixed,
            xa=xa,
            mixed_a=None if low_rank is None else low_rank[0],
            y=after_y,
            y_rstd=after_rstd,
        )
        return Result(h, (k, v) if self.outputs else (), saved, (*inputs, *state))

    def _gates_of(self, qkv: Tensor, rows: Tensor | None) -> Tensor:
        """Return these rows of the product that gates are columns of; the product itself, which isn't read, without."""
        return pick(qkv, rows) if self.heads.gated else qkv

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
        qkv_linear, out_linear = linears
        dh, rows, mixed = dx, call.rows, saved.mixed

        # back through the norm after, and the product of o
        d_out, d_after = back_through_add(dh, out_linear, saved.y, saved.y_rstd, self.after, self.multiplier)
        d_mixed, given = out_linear.input_grad(d_out, saved.mixed_a)
        dy = d_out.dense
        del d_out  # its codes go with it
        attended, product = pick(mixed.flatten(1), rows), self._gates_of(saved.qkv, rows)
        out_grads = out_linear.gradients(dy, given, self.heads.gate(attended, product))
        d_mixed, d_gate = self.heads.gate_backward(d_mixed, attended, product)
        d_mixed = spread(d_mixed, rows, mixed)
        del attended, product

        # back through attention, RoPE and the heads' norms
        if self.heads.reads_raw:
            (q, k, v, rstd), raw = self.heads.forward(saved.qkv, call), saved.qkv
        else:
            (q, k, v), rstd, raw = self.heads.heads.split(saved.qkv), [], None
        if self.inputs:
            k, v = (y.to(q.dtype) for y in state[:2])
        assert call.attention is not None
        state = list(state[len(self.inputs) :])
        d_qkv, d_sinks = explicit.backward(d_mixed.view_as(mixed), q, k, v, mixed, state, call.attention, self.sinks)
        del d_mixed
        d_inputs: list[Tensor] = []
        parts = d_qkv.split([q.shape[1], k.shape[1], k.shape[1]], 1)
        if self.inputs:  # by themselves: a view would keep the whole until gradients are summed
            d_inputs = [grad.to(y.dtype, copy=True) for grad, y in zip(parts[1:], (k, v), strict=True)]
            d_qkv = parts[0].contiguous()
        for grad, more in zip(parts[1:], d_outputs, strict=False):
            if more is not None:
                grad.add_(more)
        del parts, k, v
        d_qkv, d_query_norm, d_key_norm = self.heads.backward_(d_qkv, call, raw, rstd)
        d_qkv = self.heads.merge(d_qkv, None if d_gate is None else spread(d_gate, rows, mixed))

        # back through the product of q, k and v, and the norm before
        normed = saved.normed
        if normed is None:
            normed = self.before.forward(saved.x, qkv_linear.dtype)[0].dense
        trains = self.before.weight is not None and self.before.weight.requires_grad
        needed = wanted or trains
        d_normed, given = qkv_linear.input_grad(Activation(d_qkv), saved.xa, needed)
        qkv_grads = qkv_linear.gradients(d_qkv, given, normed)
        d_before = None
        if needed:
            dx, d_before = self.before.backward(d_normed, saved.x, saved.rstd, spread(dh, rows, saved.x), donated=True)
        trained = [d_before, d_after, d_query_norm, d_key_norm, d_sinks, *qkv_grads, *out_grads]
        return Gradients(dx if wanted else None, d_inputs, trained)
