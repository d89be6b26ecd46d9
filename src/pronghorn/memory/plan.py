"""The plan: what each decoder layer keeps, recomputes or offloads between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from pronghorn.errors import ConfigError

Checkpointing = bool | Literal["auto", "offload", "unsloth"]
"""Values of `use_gradient_checkpointing` and of a recipe's `memory.gradient_checkpointing`."""
POLICY = "_pronghorn_policy"
"""The attribute that holds a decoder layer's Policy while a plan is on it."""
MLP_ROWS = "_pronghorn_mlp_rows"
"""The attribute that holds the rows of its MLP's tiles while a plan with tiles is on it."""
TILE_ROWS = 16_384
"""Rows of a tile: their products are as fast as whole ones, and their gate·up takes 0.9 GB at 8B."""
FeedForward = Literal["auto", "tiled"]
"""Values of a recipe's `memory.feed_forward`."""
Codes = Literal["auto", "kept", "written"]
"""Values of `attach(codes=…)`."""
CODES_WRITTEN = "8-bit codes written out of 16 bits for each product"
"""What `Plan.codes_written` says, in words."""
WrittenOut = Literal["auto", "each", "once"]
"""When weights of few bits are written out in the products' dtype: for each product, or once, as a plan chooses."""
WRITTEN_ONCE = "weights of few bits kept as they are written out"
"""What `Plan.written_once` says, in words."""


class Policy(StrEnum):
    """What one layer does with its activations, from the most memory to the least."""

    KEEP = "keep"
    RECOMPUTE_NORMS = "recompute the norms"
    RECOMPUTE_MLP = "recompute the MLP"
    RECOMPUTE_LAYER = "recompute the layer"
    OFFLOAD = "recompute with the input offloaded"
    RECOMPUTE_CHEAP = "recompute the norms"
    """The name that `RECOMPUTE_NORMS` had; for one release."""


@dataclass(frozen=True)
class Plan:
    """One policy a layer, and what the plan assumed when it was made."""

    policies: tuple[Policy, ...] = (Policy.KEEP,)
    """One a layer; a single entry means every layer."""
    buffers: int = 2
    """Inputs that come back from the host at a time: 2 hides the copies behind compute, 1 is the ablation."""
    device: str | None = None
    """The device the plan was made for; None for any."""
    budget_bytes: int | None = None
    """Device memory the plan was held to; None for no limit."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Predicted bytes by kind and milliseconds a step; empty where nothing was predicted."""
    graph: bool = True
    """Whether CUDA graphs may take memory of their own: within the budget it is there."""
    mlp_rows: int = 0
    """Rows of the tiles that gated MLPs are computed in, forward and backward; 0 for MLPs as a whole."""
    codes_written: bool = False
    """Whether `compute="fp8"` writes its codes out of 16-bit weights for each product, and keeps none beside them."""
    written_once: bool = False
    """Whether linears' weights of 4 and 8 bits are kept as products read them, in 16 bits, besides."""
    undecided: bool = False
    """It stands in for `auto` until the size of a micro-batch is known: a trainer on CUDA then makes the plan."""

    def __post_init__(self) -> None:
        if self.buffers not in (1, 2):
            raise ConfigError(f"buffers = {self.buffers}", "use 2, or 1 to see what the second one saves")
        if self.mlp_rows < 0:
            raise ConfigError(f"mlp_rows = {self.mlp_rows}", f"use {TILE_ROWS:,}, or 0 for MLPs as a whole")

    @classmethod
    def keep(cls) -> Plan:
        """Let every layer keep its activations: the fastest plan, which takes the most memory."""
        return cls()

    @classmethod
    def recompute(cls) -> Plan:
        """Let every layer keep its input and be recomputed in the backward pass (gradient checkpointing)."""
        return cls(policies=(Policy.RECOMPUTE_LAYER,))

    @classmethod
    def offload(cls, buffers: int = 2) -> Plan:
        """Recompute every layer, and keep its input in host memory: the plan that takes the least device memory."""
        return cls(policies=(Policy.OFFLOAD,), buffers=buffers)

    @classmethod
    def asked(cls, value: Checkpointing, budget_bytes: int | None = None, feed_forward: FeedForward = "auto") -> Plan:
        """Return the plan that a switch asks for.

        False keeps, True recomputes, "offload" and "unsloth" offload. "auto" recomputes until a trainer on CUDA chooses
        by the budget, or the memory there is. `feed_forward` "tiled" computes MLPs in tiles of rows under any of these;
        "auto" does so only if `value` is "auto", too, and nothing else fits.

        Raises:
            ConfigError: another value.
        """
        if not any(value is known for known in (True, False)) and value not in ("auto", "offload", "unsloth"):
            raise ConfigError(
                f"use_gradient_checkpointing = {value!r} is unknown", "use True, False, 'auto', 'offload' or 'unsloth'"
            )
        rows = TILE_ROWS if feed_forward == "tiled" else 0
        if value in ("offload", "unsloth"):
            return replace(cls.offload(), mlp_rows=rows)
        if value == "auto":
            return cls((Policy.RECOMPUTE_LAYER,), budget_bytes=budget_bytes, mlp_rows=rows, undecided=True)
        return replace(cls.recompute() if value else cls.keep(), mlp_rows=rows)

    def by_layer(self, layers: int) -> tuple[Policy, ...]:
        """Return one policy for each of this many layers.

        Raises:
            ConfigError: the plan was made for another number of layers.
        """
        if len(self.policies) not in (1, layers):
            raise ConfigError(
                f"the plan has {len(self.policies)} policies for a model of {layers} layers",
                "make one policy a layer, or a single one for all",
            )
        return self.policies * (layers // len(self.policies))


def followed(policies: Sequence[Policy]) -> list[Policy]:
    """Return the policies as the offload engine follows them: the last offloaded input never leaves the device."""
    found = list(policies)
    if Policy.OFFLOAD in found:
        found[len(found) - 1 - found[::-1].index(Policy.OFFLOAD)] = Policy.RECOMPUTE_LAYER
    return found
