"""Residual blocks that call the layer's own modules: x → x + m · after(f(before(x))), f being what transformers has.

It serves what can't be computed here: a module that somebody hooked or replaced, adapters that aren't plain LoRA, and
routers with their experts (whose products are computed by `models.experts`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pronghorn.layers.expert_codes import LentCodes


@dataclass(frozen=True)
class StockBlock:
    """A block whose modules are called.

    Args:
        reason: why it isn't computed here; None where that is the block's own way (experts).
    """

    module: nn.Module
    before: nn.Module | None
    after: nn.Module | None
    mixes: bool
    """f reads other tokens, so that it is given all keywords of the layer."""
    reason: str | None
    multiplier: float = 1.0
    """Of what f adds to x."""
    gives: str | None = None
    """Name of what would be added to x, where it is given instead."""
    codes: LentCodes | None = None
    """Of the experts inside, where these multiply in 8 bits."""

    def lending(self) -> AbstractContextManager[None]:
        """Return what the block is to run under: its experts have their codes there."""
        return nullcontext() if self.codes is None else self.codes.lent()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors of each token that the block reads."""
        return ()

    def __call__(
        self, x: Tensor, shape: tuple[int, ...], arguments: dict[str, Any], named: dict[str, Tensor]
    ) -> Tensor:
        """Run the block on x [T, H]; modules see it in `shape` [B, S, H]."""
        states = x.view(shape)
        normed = states if self.before is None else self.before(states)
        y: Any = self.module(hidden_states=normed, **arguments) if self.mixes else self.module(normed)
        y = y[0] if isinstance(y, tuple) else y
        y = y.view(shape)
        y = y if self.after is None else self.after(y)
        if self.gives is not None:
            named[self.gives] = y.view(x.shape)
            return x
        return (states + (y if self.multiplier == 1 else self.multiplier * y)).view(x.shape)


@dataclass(frozen=True)
class StockPerLayerInput(StockBlock):
    """x → x + after(projection(activation(gate(x)) ∘ p)); `module` is the gate.

    Args:
        reads: name of p [T, P].
    """

    projection: nn.Module = field(kw_only=True)
    activation: nn.Module = field(kw_only=True)
    reads: str = field(kw_only=True)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.reads,)

    def __call__(
        self, x: Tensor, shape: tuple[int, ...], arguments: dict[str, Any], named: dict[str, Tensor]
    ) -> Tensor:
        assert self.after is not None
        return x + self.after(self.projection(self.activation(self.module(x)) * named[self.reads]))


@dataclass(frozen=True)
class ExpertsBesideBlock(StockBlock):
    """x → x + after(dense + inner(experts(before(x), router(x)))); `module` is the experts.

    Args:
        beside: name of the dense block's result [T, H].
    """

    router: nn.Module = field(kw_only=True)
    inner: nn.Module = field(kw_only=True)
    beside: str = field(kw_only=True)

    def __call__(
        self, x: Tensor, shape: tuple[int, ...], arguments: dict[str, Any], named: dict[str, Tensor]
    ) -> Tensor:
        assert self.before is not None and self.after is not None
        _, weights, chosen = self.router(x)
        routed = self.inner(self.module(self.before(x), chosen, weights))
        return x + self.after(named[self.beside] + routed)
