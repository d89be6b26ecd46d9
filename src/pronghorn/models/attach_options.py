"""How a model is attached: the options that users give, and the switches that measurements turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pronghorn.attention.backends import Backend
from pronghorn.attention.packed import Metadata
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.models import experts
from pronghorn.models.families import check_config, has_experts
from pronghorn.models.graph import Graph
from pronghorn.precision.compute import Compute

Attention = Literal["auto", "tiled", "flash", "per_document"]
Layers = Literal["auto", "fused", "stock"]


@dataclass(frozen=True)
class Experimental:
    """Switches for measurements: each turns off one thing that makes packed rows fast. Nothing to train with."""

    packing_metadata: Metadata = "once"
    """`per_layer` and `per_layer_mask` make documents' bounds, or the dense mask, again in every layer."""
    moe_routing: experts.Routing = "once"
    """`loop` leaves the experts to transformers' eager code."""
    masked_attention: bool = False
    """Packed attention over a dense mask."""

    @classmethod
    def of(cls, given: Experimental | Mapping[str, Any] | None) -> Experimental:
        """Return switches as they are given, or made of their fields by name."""
        if isinstance(given, Experimental):
            return given
        known = [field.name for field in fields(cls)]
        for name in given or ():
            if name not in known:
                raise ConfigError(f"experimental {name!r} is unknown", f"use one of {', '.join(known)}")
        return cls(**(given or {}))


@dataclass(frozen=True)
class AttachOptions:
    """How a model is attached; see `attach`."""

    attention: Attention = "auto"
    layers: Layers = "auto"
    graph: Graph = "auto"
    compute: Compute = Compute.DTYPE
    experimental: Experimental = Experimental()

    @property
    def backend(self) -> Backend:
        """The backend of packed attention."""
        return "masked" if self.experimental.masked_attention else self.attention

    def check(self, config: Any) -> None:
        """Raise ConfigError for a value that is unknown, or that the model has no use for."""
        switches = self.experimental
        for name, value, known in (
            ("attention", self.attention, Attention),
            ("layers", self.layers, Layers),
            ("graph", self.graph, Graph),
            ("packing_metadata", switches.packing_metadata, Metadata),
            ("moe_routing", switches.moe_routing, experts.Routing),
        ):
            if value not in get_args(known):
                raise ConfigError(f"{name} {value!r} is unknown", f"use one of {', '.join(get_args(known))}")
        if switches.moe_routing == "loop" and not has_experts(config):
            raise ConfigError("moe_routing 'loop' for a model without experts", "leave moe_routing out")

    def fuses(self, model: Any) -> bool:
        """Tell whether a model's layers get their fused classes."""
        wanted = self.layers == "fused" or (self.layers == "auto" and next(model.parameters()).is_cuda)
        if check_config(model.config).generic:
            if self.layers == "fused" or self.experimental != Experimental():
                raise UnsupportedError(
                    f"{model.config.model_type} is no family whose layers Pronghorn computes itself",
                    "leave layers and experimental out",
                )
            return False
        return wanted and self.backend != "masked" and self.experimental.packing_metadata == "once"

    def graphs(self, model: Any) -> bool:
        """Tell whether a model's layers may be launched as CUDA graphs."""
        return self.fuses(model) and self.graph != "off" and next(model.parameters()).is_cuda
