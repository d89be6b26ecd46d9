"""How a model is attached: the options that users give, and the switches that measurements turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pronghorn.attention.backends import Backend
from pronghorn.attention.packed import Metadata
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.families.registry import why_generic
from pronghorn.kernels.quantise import ROW_SCALES
from pronghorn.layers.decoder import FusedLayers
from pronghorn.layers.linears import is_written_out
from pronghorn.memory.plan import Codes, Plan, WrittenOut
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
    written_out: WrittenOut = "auto"
    """`each` writes linears' weights of few bits out for each product; `once` keeps them as they are written out in the
    model's dtype, where the plan doesn't say so, too. Input gradients in 8 bits still have their codes written out."""

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
    codes: Codes = "auto"
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
            ("codes", self.codes, Codes),
            ("packing_metadata", switches.packing_metadata, Metadata),
            ("moe_routing", switches.moe_routing, experts.Routing),
            ("written_out", switches.written_out, WrittenOut),
        ):
            if value not in get_args(known):
                raise ConfigError(f"{name} {value!r} is unknown", f"use one of {', '.join(get_args(known))}")
        if switches.written_out == "once" and self.compute.forward_in_fp8:
            raise ConfigError(
                f"written_out 'once' for compute '{self.compute}', which multiplies codes", "leave written_out out"
            )
        if switches.moe_routing == "loop" and not has_experts(config):
            raise ConfigError("moe_routing 'loop' for a model without experts", "leave moe_routing out")

    def writes_codes(self, plan: Plan | None) -> bool:
        """Tell whether 8-bit codes are written out of 16-bit weights for each product, and none kept beside them."""
        return self.codes == "written" or (self.codes == "auto" and plan is not None and plan.codes_written)

    def writes_once(self, plan: Plan | None) -> bool:
        """Tell whether linears' weights of few bits are kept as they are written out."""
        asked = self.experimental.written_out
        return asked == "once" or (asked == "auto" and plan is not None and plan.written_once)

    def check_codes(self, plan: Plan | None, layers: FusedLayers | None) -> None:
        """Refuse a choice of where 8-bit codes are from, of the options or the plan, that these layers don't have.

        Raises:
            UnsupportedError: another compute than `fp8`, or weights that are not in 16 bits or that processes share.
        """
        if self.codes == "auto" and not self.writes_codes(plan):
            return
        asked, remedy = f"codes = '{self.codes}'", "leave codes out"
        if self.codes == "auto":
            asked, remedy = "codes_written = True of a plan", "leave codes_written out"
        if self.compute is not Compute.FP8:
            raise UnsupportedError(
                f"{asked} needs compute = 'fp8', and compute is '{self.compute}'", f"{remedy}, or use compute = 'fp8'"
            )
        if layers is None or not chooses_codes(layers):
            raise UnsupportedError(
                f"{asked} needs weights in 16 bits that one process has whole, and these are packed or shared", remedy
            )

    def fuses(self, model: Any) -> bool:
        """Tell whether a model's layers get their fused classes."""
        wanted = self.layers == "fused" or (self.layers == "auto" and next(model.parameters()).is_cuda)
        if check_config(model.config).generic:
            if self.layers == "fused" or self.experimental != Experimental():
                raise UnsupportedError(
                    f"layers of {model.config.model_type} are transformers' own: {why_generic(model.config)}",
                    "leave layers and experimental out",
                )
            return False
        return wanted and self.backend != "masked" and self.experimental.packing_metadata == "once"

    def fuses_lora(self, model: Any) -> bool:
        """Tell whether LoRA linears of a generic family train by one function each."""
        return self.layers == "auto" and next(model.parameters()).is_cuda

    def graphs(self, model: Any) -> bool:
        """Tell whether a model's layers may be launched as CUDA graphs."""
        return self.fuses(model) and self.graph != "off" and next(model.parameters()).is_cuda


def chooses_codes(layers: FusedLayers) -> bool:
    """Tell whether 8-bit codes can be kept or written out: for input gradients alone, of weights in 16 bits that no
    processes share."""
    dtype = layers.backbone.get_input_embeddings().weight.dtype
    bases = [base for product, _ in layers.coded_products(dtype) for base in product]
    alone = not any(is_written_out(base) or hasattr(base.weight, ROW_SCALES) for base in bases)
    return layers.builder.compute is Compute.FP8 and alone
