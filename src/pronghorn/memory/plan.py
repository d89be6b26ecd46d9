"""The plan: what each decoder layer keeps, recomputes or offloads between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pronghorn.errors import ConfigError, UnsupportedError


class Policy(StrEnum):
    """What one layer does with its activations, from the most memory to the least."""

    KEEP = "keep"
    RECOMPUTE_CHEAP = "recompute the cheap parts"
    RECOMPUTE_MLP = "recompute the MLP"
    RECOMPUTE_LAYER = "recompute the layer"
    OFFLOAD = "recompute with the input offloaded"


@dataclass(frozen=True)
class Plan:
    """One policy a layer, and what the plan assumed when it was made.

    `keep` and `recompute` apply one policy to every layer; plans by layer come with the memory engine.
    """

    policies: tuple[Policy, ...] = (Policy.KEEP,)
    """One a layer; a single entry means every layer."""
    buffers: int = 0
    """Device buffers for offloaded activations."""
    device: str | None = None
    """The device the plan was made for; None for any."""
    world_size: int = 1
    """Processes the plan assumes to share the host's memory."""
    budget_bytes: int | None = None
    """Device memory the plan was held to; None for no limit."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Predicted bytes by kind and milliseconds a step; empty where nothing was predicted."""

    @classmethod
    def keep(cls) -> Plan:
        """Every layer keeps its activations: the fastest plan, and the one with the most memory."""
        return cls()

    @classmethod
    def recompute(cls) -> Plan:
        """Every layer keeps its input and is recomputed in the backward pass (gradient checkpointing)."""
        return cls(policies=(Policy.RECOMPUTE_LAYER,))

    def uniform_policy(self, layers: int) -> Policy:
        """The one policy of all layers.

        Raises:
            ConfigError: the plan was made for another number of layers.
            UnsupportedError: layers differ, or the policy needs the memory engine.
        """
        if len(self.policies) not in (1, layers):
            raise ConfigError(
                f"the plan has {len(self.policies)} policies for a model of {layers} layers",
                "make one policy a layer, or use Plan.keep() or Plan.recompute()",
            )
        kinds = set(self.policies)
        if len(kinds) > 1 or kinds - {Policy.KEEP, Policy.RECOMPUTE_LAYER}:
            raise UnsupportedError(
                f"policies {sorted(kinds)} need the memory engine, which is not built yet",
                "use Plan.keep() or Plan.recompute()",
            )
        return self.policies[0]
