"""The gated MLP's block: x → x + after(down(activation(gate(n)) ∘ up(n))), n = before(x), one autograd function.

Beside experts it leaves x as it is and gives what it would add by name.

Kept for the backward: x with its norm's result, and gate·up. The activation is computed again; so are, as the layer's
policy says, the norm's result and gate·up. In tiles of rows (`layers.tiles`) x alone is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pronghorn.kernels import glu
from pronghorn.kernels.quantise import RowCodes
from pronghorn.kernels.residual import LowRank
from pronghorn.layers import tiles
from pronghorn.layers.block import Block, Call, Gradients, NoNorm, Norm, Result, add, back_through_add, freed_after
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.memory.plan import Policy
from pronghorn.precision.source import Activation


class MLPSaved(NamedTuple):
    """What the backward of an MLP's block needs."""

    x: Tensor
    """[T, H]."""
    rstd: Tensor | None
    normed: Tensor | None
    """before(x); None where it is computed again."""
    gate_up: Tensor | None
    """[T, 2·I], gate in the first I columns; None where it is computed again."""
    xa: Tensor | None
    """[T, R], of gate's and up's adapters."""
    a_a: Tensor | None
    """[T, R], of down's adapter."""
    y: Tensor | None
    """What the norm after was given."""
    y_rstd: Tensor | None


class GatedMLPBlock(Block):
    """A gated MLP.

    Args:
        gate_up, down: the merged products.
        activation: what gate goes through.
        before, after: the block's norms.
        multiplier: of what the MLP adds.
        gives: name of what would be added to x, where it is given instead; there is a norm after then.
    """

    Saved = MLPSaved

    def __init__(
        self,
        gate_up: FusedLinear,
        down: FusedLinear,
        activation: glu.Activation,
        before: Norm | NoNorm,
        after: Norm | None,
        multiplier: float = 1.0,
        gives: str | None = None,
    ) -> None:
        self.outputs = () if gives is None else (gives,)
        self.linears = gate_up, down
        self.activation, self.before, self.after, self.multiplier = activation, before, after, multiplier
        after_weight = None if after is None else after.weight
        self.trained = [before.weight, after_weight, *gate_up.trained, *down.trained]

    def compute(self, x: Tensor, inputs: Sequence[Tensor], linears: Sequence[FusedLinear], call: Call) -> Result:
        if call.mlp_rows:
            return tiles.forward(self, x, linears, call)
        gate_up_linear, down = linears
        given, rstd = self.before.forward(x, gate_up_linear.dtype, gate_up_linear.source.wants_codes)
        parts, normed = gate_up_linear.parts(given), given.dense
        del given  # its codes go with it
        multiplies = call.output_wanted or self.after is not None  # whose backward needs y
        a, gate_up, xa = self._activated(*parts, gate_up_linear.ranks, multiplies and down.source.wants_codes)
        del parts
        y: Tensor | None
        if multiplies:
            y, low_rank = down.parts(a)
            a_a = None if low_rank is None else low_rank[0]
            del a
            out, y, y_rstd = add(None if self.outputs else x, y, low_rank, self.after, self.multiplier)
        else:  # the product of down, a quarter of a layer's operations, is left out
            a_a, out, y, y_rstd = down.inner(a), x.new_empty(()).expand_as(x), None, None
        saved = MLPSaved(
            x=x,
            rstd=rstd,
            normed=normed if call.keeps_norms else None,
            gate_up=None if call.policy is Policy.RECOMPUTE_MLP else gate_up,
            xa=xa,
            a_a=a_a,
            y=y,
            y_rstd=y_rstd,
        )
        return Result(x, (out,), saved) if self.outputs else Result(out, (), saved)

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
        if call.mlp_rows:
            return tiles.gradients(self, dx, saved.x, linears, call)
        gate_up_linear, down = linears
        dtype, d_out = gate_up_linear.dtype, dx
        if self.outputs:
            [given_grad] = d_outputs
            assert given_grad is not None
            d_out = given_grad.contiguous()
        x, rstd, normed, gate_up = saved.x, saved.rstd, saved.normed, saved.gate_up

        # what the policy left out; a buffer that nobody reads afterwards is overwritten
        donated = gate_up is None or freed_after()
        if gate_up is None:
            again = self.before.forward(x, dtype, gate_up_linear.source.wants_codes)[0]
            parts, normed = gate_up_linear.parts(again), again.dense
            del again  # its codes go with it
            gate_up = self._activated(*parts, gate_up_linear.ranks, False)[1]
            del parts

        # back through the norm after, down and the activation
        d_product, d_after = back_through_add(d_out, down, saved.y, saved.y_rstd, self.after, self.multiplier)
        a_a, xa = saved.a_a, saved.xa
        del saved
        da, given = down.input_grad(d_product, a_a)
        dy = d_product.dense
        del d_product  # its codes go with it
        d_gate_up = self._back_to(gate_up_linear, da, gate_up, donated)
        down_grads = down.gradients(dy, given, da)  # da holds the activation now
        del da, dy, gate_up

        # back through gate and up, and the norm before
        d_normed, given = gate_up_linear.input_grad(d_gate_up, xa)
        if normed is None:  # not before: a weight that was written out is gone, and the peak of memory behind
            normed = self.before.forward(x, dtype)[0].dense
        gate_up_grads = gate_up_linear.gradients(d_gate_up.dense, given, normed)
        del d_gate_up, normed
        dx, d_before = self.before.backward(d_normed, x, rstd, dx)
        return Gradients(dx, (), [d_before, d_after, *gate_up_grads, *down_grads])

    def _activated(
        self, gate_up: Tensor, low_rank: LowRank | None, ranks: list[int], codes: bool
    ) -> tuple[Activation, Tensor, Tensor | None]:
        """Return (the activation [T, I], gate·up [T, 2·I], x Aᵀ) of what gate's and up's product gave.

        Args:
            ranks: of the product's linears.
            codes: of the activation are wanted; it has them where no adapter is added on the way (`kernels.glu`).
        """
        if low_rank is not None and len(ranks) > 1:
            a = glu.forward_with_low_rank_(gate_up, *low_rank, self.activation, (ranks[0], sum(ranks[1:])))
            return Activation(a), gate_up, low_rank[0]
        xa: Tensor | None = None
        if low_rank is not None:  # gate and up are one linear, whose adapter adds to both
            xa, b, scale = low_rank
            gate_up = gate_up.addmm_(xa, b.t(), alpha=scale)
        made = RowCodes.like(gate_up.chunk(2, 1)[0]) if codes else None
        return Activation(glu.forward(gate_up, self.activation, made), made), gate_up, xa

    def _back_to(self, linear: FusedLinear, da: Tensor, gate_up: Tensor, donated: bool) -> Activation:
        """Return the gradient of gate·up, which `linear` gave, with codes if it wants them; see `glu.backward_`."""
        source = linear.source
        made = RowCodes.like(gate_up) if source.wants_gradient_codes else None
        return Activation(glu.backward_(da, gate_up, self.activation, donated, made, source.columns), made)
