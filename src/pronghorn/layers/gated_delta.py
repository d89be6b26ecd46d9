"""The gated delta net's block: x → x + after(out(norm(delta(conv(q·k·v), g, β), z))), one autograd function.

    q·k·v, z, b, a = products of n = before(x)      q, k, v = silu(conv(q·k·v))
    β = σ(b)      g = −exp(A) · softplus(a + dt)    o: the gated delta rule (`kernels.gated_delta`)

Kept for the backward: x with its norm's result, what the products left, and the rule's output and states. Convolution,
norms and gates are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.data.batch import PackedBatch
from pronghorn.families.spec import GatedDelta
from pronghorn.kernels import causal_conv, delta_gates, gated_delta, gated_norm
from pronghorn.layers.block import Block, Call, Gradients, Norm, Result, add, back_through_add, pick, spread
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.precision.source import Activation


@dataclass(frozen=True)
class DeltaLayout:
    """How the products' columns are laid out.

    Args:
        interleaved: by key heads (q, k, v, z of each; b, a of each), not all q, all k, …
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    interleaved: bool

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def _by_head(self) -> tuple[list[int], list[int]]:
        """Columns of q, k, v, z and of b, a for each key head."""
        values, shared = self.values // self.key_heads, self.value_heads // self.key_heads
        return [self.key_dim, self.key_dim, values, values], [shared, shared]

    def split(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (q·k·v [T, 2·H_k·D_k + H_v·D_v], z [T, H_v, D_v], b, a [T, H_v])."""
        if self.interleaved:
            heads, parts = (qkvz, ba), []
            for tensor, widths in zip(heads, self._by_head, strict=True):
                by_head = tensor.unflatten(1, (self.key_heads, -1)).split(widths, 2)
                parts += [part.flatten(1) for part in by_head]
            q, k, v, z, b, a = parts
            qkv = torch.cat([q, k, v], 1)
        else:
            qkv, z = qkvz.split([2 * self.keys + self.values, self.values], 1)
            b, a = ba.chunk(2, 1)
        return qkv, z.unflatten(1, (self.value_heads, self.value_dim)), b, a

    def merge(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `split`; z is [T, H_v·D_v]."""
        if not self.interleaved:
            return torch.cat([qkv, z], 1), torch.cat([b, a], 1)
        parts = *qkv.split([self.keys, self.keys, self.values], 1), z
        by_head = [[x.unflatten(1, (self.key_heads, -1)) for x in group] for group in (parts, (b, a))]
        qkvz, ba = (torch.cat(group, 2).flatten(1) for group in by_head)
        return qkvz, ba

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """View q, k [T, H_k, D_k] and v [T, H_v, D_v]."""
        q, k, v = qkv.split([self.keys, self.keys, self.values], 1)
        q, k = (x.unflatten(1, (self.key_heads, self.key_dim)) for x in (q, k))
        return q, k, v.unflatten(1, (self.value_heads, self.value_dim))


@dataclass(frozen=True)
class DeltaNet:
    """Convolution, gates and rule of a gated delta net, with gradients by hand.

    Args:
        weight: of the convolution, [C, 1, K].
        decay: A, [H_v]; step: dt, [H_v].
    """

    layout: DeltaLayout
    weight: Tensor
    decay: Tensor
    step: Tensor

    @property
    def trained(self) -> list[Tensor]:
        """The parameters, in the order of the gradients."""
        return [self.weight, self.decay, self.step]

    def forward(self, qkv: Tensor, b: Tensor, a: Tensor, packed: PackedBatch) -> tuple[Tensor, gated_delta.Saved]:
        """Return (the rule's output [T, H_v, D_v], what its backward needs)."""
        q, k, v = self.layout.heads(causal_conv.forward(qkv, self._filter, packed.document_ids))
        g, beta = delta_gates.forward(b, a, self.decay.detach(), self.step.detach())
        return gated_delta.forward(q, k, v, g, beta, packed.chunks, self.layout.key_dim**-0.5)

    def backward(
        self,
        do: Tensor,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        saved: gated_delta.Saved,
        packed: PackedBatch,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        """Return the gradients of qkv (in `out`, if given), b, a, and of `trained`, None where it isn't."""
        # convolution and gates again, and back through the rule
        layout, gates = self.layout, (b, a, self.decay.detach(), self.step.detach())
        q, k, v = layout.heads(causal_conv.forward(qkv, self._filter, packed.document_ids))
        g, beta = delta_gates.forward(*gates)
        scale = layout.key_dim**-0.5
        dq, dk, dv, dg, d_beta = gated_delta.backward(do, q, k, v, g, beta, saved, packed.chunks, scale)
        # back through the convolution with SiLU, and the gates
        d_convolved = torch.cat([x.flatten(1) for x in (dq, dk, dv)], 1)
        del dq, dk, dv
        d_qkv, d_weight = causal_conv.backward(
            d_convolved, qkv, self._filter, packed.document_ids, self.weight.requires_grad, out
        )
        db, da = delta_gates.backward(dg, d_beta, *gates)
        # dA = Σ dg · g, since g = −exp(A) · softplus(…); d dt = Σ da, of da before it is rounded
        trained: list[Tensor | None] = [
            None if d_weight is None else d_weight.view_as(self.weight),
            (dg * g).sum(0) if self.decay.requires_grad else None,
            None,
        ]
        if self.step.requires_grad:
            wide = a.to(g.dtype) + self.step.detach()
            trained[2] = (dg * -self.decay.detach().to(g.dtype).exp() * wide.sigmoid()).sum(0)
        named = zip(trained, self.trained, strict=True)
        return d_qkv, db, da, [None if x is None else x.to(p.dtype) for x, p in named]

    @property
    def _filter(self) -> Tensor:
        """The convolution's weight [C, K]."""
        return self.weight.detach().flatten(1)


def delta_net(module: Any, kind: GatedDelta) -> DeltaNet:
    """Read a gated delta net's sizes and parameters from its module."""
    sizes = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    weight = module.get_submodule(kind.convolution).weight
    return DeltaNet(DeltaLayout(*sizes, kind.interleaved), weight, module.A_log, module.dt_bias)


class DeltaSaved(NamedTuple):
    """What the backward of a gated delta net's block needs."""

    x: Tensor
    """[T, H]."""
    rstd: Tensor
    normed: Tensor | None
    """before(x); None where it is computed again."""
    qkvz: Tensor
    """[T, 2·H_k·D_k + 2·H_v·D_v], as the product left it."""
    ba: Tensor
    """[T, 2·H_v], as the product left it."""
    o: Tensor
    """[T, H_v, D_v], the rule's output."""
    qkvz_a: Tensor | None
    """[T, R], of q·k·v·z's adapters, as the next two of theirs."""
    ba_a: Tensor | None
    out_a: Tensor | None
    """[M, R]."""
    y: Tensor | None
    """What the norm after was given."""
    y_rstd: Tensor | None


class GatedDeltaBlock(Block):
    """A gated delta net.

    Args:
        linears: the merged products of q·k·v·z, of b·a, and of the output.
        norm: of the rule's output, a head each, gated by z.
        before, after: the block's norms.
    """

    Saved = DeltaSaved

    def __init__(
        self, linears: Sequence[FusedLinear], net: DeltaNet, norm: Norm, before: Norm, after: Norm | None
    ) -> None:
        self.linears, self.net, self.norm, self.before, self.after = linears, net, norm, before, after
        norms = before.weight, None if after is None else after.weight, norm.weight
        self.trained = [*norms, *net.trained, *(tensor for linear in linears for tensor in linear.trained)]

    def compute(self, x: Tensor, inputs: Sequence[Tensor], linears: Sequence[FusedLinear], call: Call) -> Result:
        qkvz_linear, ba_linear, out_linear = linears
        codes = any(linear.source.wants_codes for linear in (qkvz_linear, ba_linear))
        given, rstd = self.before.forward(x, qkvz_linear.dtype, codes)
        qkvz, qkvz_a = qkvz_linear.forward(given)
        ba, ba_a = ba_linear.forward(given)
        normed = given.dense
        del given  # its codes go with it
        qkv, z, b, a = self.net.layout.split(qkvz, ba)
        o, state = self.net.forward(qkv, b, a, call.packed)
        y, low_rank = out_linear.parts(Activation(self._gated(pick(o, call.rows), pick(z, call.rows))))
        h, after_y, after_rstd = add(pick(x, call.rows), y, low_rank, self.after, 1.0)
        saved = DeltaSaved(
            x=x,
            rstd=rstd,
            normed=normed if call.keeps_norms else None,
            qkvz=qkvz,
            ba=ba,
            o=o,
            qkvz_a=qkvz_a,
            ba_a=ba_a,
            out_a=None if low_rank is None else low_rank[0],
            y=after_y,
            y_rstd=after_rstd,
        )
        return Result(h, (), saved, tuple(state))

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
        qkvz_linear, ba_linear, out_linear = linears
        dh, rows = dx, call.rows

        # back through the norm after, and the output's product
        d_out, d_after = back_through_add(dh, out_linear, saved.y, saved.y_rstd, self.after, 1.0)
        d_gated, given = out_linear.input_grad(d_out, saved.out_a)
        dy = d_out.dense
        del d_out  # its codes go with it
        layout = self.net.layout
        qkv, z, b, a = layout.split(saved.qkvz, saved.ba)
        rule, z = pick(saved.o, rows), pick(z, rows)
        out_grads = out_linear.gradients(dy, given, self._gated(rule, z))

        # back through the norm, the rule and the convolution
        norm, d_qkvz, qkv_out, z_out = self.norm, None, None, None
        if rows is None and not layout.interleaved:  # both are written where the product's backward reads them
            d_qkvz = torch.empty_like(saved.qkvz)
            qkv_out, z_out, *_ = layout.split(d_qkvz, saved.ba)
        do, dz, d_norm = gated_norm.backward(
            d_gated.view_as(rule), rule, z, norm.weight, norm.eps, norm.weight.requires_grad, z_out
        )
        del d_gated
        if d_qkvz is None:
            do, dz = (spread(grad.flatten(1), rows, saved.x) for grad in (do, dz))
        d_qkv, db, da, d_net = self.net.backward(do.view_as(saved.o), qkv, b, a, state, call.packed, qkv_out)
        if d_qkvz is None:
            d_qkvz, d_ba = layout.merge(d_qkv, dz, db, da)
        else:
            d_ba = torch.cat([db, da], 1)
        del do, dz, d_qkv

        # back through the products, and the norm before
        normed = saved.normed
        if normed is None:
            normed = self.before.forward(saved.x, qkvz_linear.dtype)[0].dense
        needed = wanted or self.before.weight.requires_grad
        d_normed, given = qkvz_linear.input_grad(Activation(d_qkvz), saved.qkvz_a, needed)
        in_grads = qkvz_linear.gradients(d_qkvz, given, normed)
        d_more, given = ba_linear.input_grad(Activation(d_ba), saved.ba_a, needed)
        in_grads += ba_linear.gradients(d_ba, given, normed)
        d_before = None
        if needed:
            d_normed = d_normed.add_(d_more)
            dx, d_before = self.before.backward(d_normed, saved.x, saved.rstd, spread(dh, rows, saved.x))
        return Gradients(dx if wanted else None, (), [d_before, d_after, d_norm, *d_net, *in_grads, *out_grads])

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        """Return what the output's product is given, [M, H_v·D_v]."""
        return gated_norm.forward(o, z, self.norm.weight, self.norm.eps).flatten(1)
