"""The block of a layer's own input: x → x + after(projection(activation(gate(x)) ∘ p)), one autograd function.

Kept for the backward: x, gate(x), p and what the norm after was given. The activation is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels import glu
from pronghorn.kernels.quantise import RowCodes
from pronghorn.layers.block import Block, Call, Gradients, Norm, Result, add, back_through_add
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.precision.source import Activation


class PerLayerInputSaved(NamedTuple):
    """What the backward needs."""

    x: Tensor
    """[T, H]."""
    gated: Tensor
    """[T, P], gate(x)."""
    per_layer: Tensor
    """p [T, P], as it was given: a view of what all layers' are in."""
    xa: Tensor | None
    """[T, R], of gate's adapter."""
    a_a: Tensor | None
    """[T, R], of projection's adapter."""
    y: Tensor
    """What the norm after was given."""
    y_rstd: Tensor


class PerLayerInputBlock(Block):
    """What each token has for this layer, gated by x.

    Args:
        gate, projection: the products.
        activation: what gate goes through.
        after: the norm.
        reads: name of p.
    """

    Saved = PerLayerInputSaved

    def __init__(
        self, gate: FusedLinear, projection: FusedLinear, activation: glu.Activation, after: Norm, reads: str
    ) -> None:
        self.linears, self.inputs = (gate, projection), (reads,)
        self.activation, self.after = activation, after
        self.trained = [after.weight, *gate.trained, *projection.trained]

    def compute(self, x: Tensor, inputs: Sequence[Tensor], linears: Sequence[FusedLinear], call: Call) -> Result:
        (gate, projection), [per_layer] = linears, inputs
        gated, xa = gate.forward(Activation(x.to(gate.dtype)))
        made = RowCodes.like(gated) if projection.source.wants_codes else None
        a = glu.forward(self._side_by_side(gated, per_layer), self.activation, made)
        y, low_rank = projection.parts(Activation(a, made))
        out, normed_from, rstd = add(x, y, low_rank, self.after, 1.0)
        assert normed_from is not None and rstd is not None
        a_a = None if low_rank is None else low_rank[0]
        return Result(out, (), PerLayerInputSaved(x, gated, per_layer, xa, a_a, normed_from, rstd))

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
        gate, projection = linears

        # back through the norm after, projection and activation
        dy, d_after = back_through_add(dx, projection, saved.y, saved.y_rstd, self.after, 1.0)
        da, given = projection.input_grad(dy, saved.a_a)
        both = self._side_by_side(saved.gated, saved.per_layer)
        d_gated, d_per_layer = glu.backward_(da, both, self.activation, True).chunk(2, 1)
        projection_grads = projection.gradients(dy.dense, given, da)  # da holds the activation now

        # back through gate, and to p
        d_gated = d_gated.contiguous()
        d_through, given = gate.input_grad(Activation(d_gated), saved.xa)
        gate_grads = gate.gradients(d_gated, given, saved.x.to(gate.dtype))
        d_input = d_per_layer.to(saved.per_layer.dtype)
        return Gradients(dx + d_through, [d_input], [d_after, *gate_grads, *projection_grads])

    def _side_by_side(self, gated: Tensor, per_layer: Tensor) -> Tensor:
        return torch.cat([gated, per_layer.to(gated.dtype)], 1)
