"""A residual block that calls the layer's own modules: x → x + m · after(f(before(x))), f being what transformers has.

It serves what can't be computed here: a module that somebody hooked or replaced, adapters that aren't plain LoRA, and
routers with their experts (whose products are computed by `models.experts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


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

    def __call__(self, x: Tensor, shape: tuple[int, ...], arguments: dict[str, Any]) -> Tensor:
        """Run the block on x [T, H]; modules see it in `shape` [B, S, H]."""
        states = x.view(shape)
        normed = states if self.before is None else self.before(states)
        y: Any = self.module(hidden_states=normed, **arguments) if self.mixes else self.module(normed)
        y = y[0] if isinstance(y, tuple) else y
        y = y.view(shape)
        y = y if self.after is None else self.after(y)
        return (states + (y if self.multiplier == 1 else self.multiplier * y)).view(x.shape)
