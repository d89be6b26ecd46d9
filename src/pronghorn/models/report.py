"""What an attached model does and why: decisions as values, and the one place that renders them as text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from pronghorn.attention.backends import Backend, choose, long_from
from pronghorn.families.registry import family_of, why_generic
from pronghorn.kernels.fp8_blocks import has_own_codes
from pronghorn.kernels.packed import PackedTensor
from pronghorn.layers.decoder import FusedLayers, output_is_seen
from pronghorn.layers.lora_linear import lora_linears
from pronghorn.memory.plan import CODES_WRITTEN, Policy
from pronghorn.models.attach_options import chooses_codes
from pronghorn.models.causal_lm import has_own_loss
from pronghorn.models.families import has_experts, head_dims, recomputes_layers
from pronghorn.models.generic import PACKING, GenericPacking
from pronghorn.models.unpadded import is_seen
from pronghorn.parallel.sharded import sharded
from pronghorn.precision.compute import Compute
from pronghorn.precision.float32 import narrowed
from pronghorn.text import counted

if TYPE_CHECKING:
    from pronghorn.models.attach import Handle

LOADED_BY = "_pronghorn_loaded_by"
"""The attribute of a model quantised on load that says why transformers' `from_pretrained` did it; "" where the house's
loader did."""


@dataclass(frozen=True)
class PathTaken:
    """One line of the report, as text: which way a part of the step goes, and why."""

    part: str
    path: str
    why: str


class LayersPath(StrEnum):
    """How decoder layers are computed."""

    FUSED = "fused"
    EXPERTS_APART = "attention and norms fused, experts apart"
    PARTLY = "fused where they can be, the rest by transformers and PEFT"
    STOCK = "transformers and PEFT"


class GraphPath(StrEnum):
    """Whether the layers are launched as CUDA graphs."""

    ON = "on"
    OFF = "off"


class LossPath(StrEnum):
    """What the loss is computed from."""

    SUPERVISED = "supervised tokens only, in chunks"
    SUPERVISED_LAST_LAYER = "supervised tokens only, in chunks; the last layer's MLP, too"
    OWN_FUNCTION = "the model's own loss_function, of all logits"


@dataclass(frozen=True)
class Decisions:
    """What was decided for the parts of a step, and why."""

    layers: LayersPath
    layers_reason: str
    graph: GraphPath
    graph_reason: str
    loss: LossPath


def decide(handle: Handle, autocast: torch.dtype | None) -> Decisions:
    """Say how the steps of an attached model go, under autocast in that dtype (None: without)."""
    layers, layers_reason = _layers(handle, autocast)
    graph, graph_reason = _graph(handle, autocast)
    loss = LossPath.SUPERVISED
    if layers is not LayersPath.STOCK and graph is GraphPath.OFF and not output_is_seen(handle.model.base_model):
        loss = LossPath.SUPERVISED_LAST_LAYER
    if has_own_loss(handle.model):
        loss = LossPath.OWN_FUNCTION
    return Decisions(layers, layers_reason, graph, graph_reason, loss)


def render(handle: Handle, autocast: torch.dtype | None) -> list[PathTaken]:
    """Render the decisions as the lines of `Handle.report`."""
    if family_of(handle.model.config).generic:
        return _render_generic(handle)
    decisions, switches, model = decide(handle, autocast), handle.options.experimental, handle.model
    queries = queries_of(model, autocast)
    in_8_bits = _experts_in_8_bits(handle, autocast)
    of_experts = handle.options.compute if in_8_bits == "" else Compute.DTYPE
    experts = () if handle.experts is None else handle.experts.paths(_dtype(model, autocast), of_experts)
    sinks = family_of(model.config).load_attention == "eager"
    unpacked = "the softmax written out, for the sinks" if sinks else "transformers' SDPA"
    if handle.options.compute.in_8_bits:
        unpacked = f"{unpacked}, products in the model's dtype"
    loss_reason = "the batch knows its supervised positions"
    if decisions.loss is LossPath.OWN_FUNCTION:
        loss_reason = "it is not transformers' cross-entropy"
    metadata = {
        "once": "made once per batch on the host",
        "per_layer": "ablation: derived from position_ids in every layer",
        "per_layer_mask": "ablation: the dense mask is rebuilt in every layer",
    }
    return [
        *(PathTaken(part, *_attention(handle, query)) for part, query in zip(_parts(queries), queries, strict=True)),
        PathTaken("packing metadata", switches.packing_metadata, metadata[switches.packing_metadata]),
        PathTaken("decoder layers", decisions.layers, decisions.layers_reason),
        *(PathTaken(*line) for line in experts),
        *_loading(model),
        *_sharing(model),
        *_products(handle, autocast),
        *_float32_products(model.device),
        PathTaken("CUDA graph of the layers", decisions.graph, decisions.graph_reason),
        PathTaken("loss", decisions.loss, loss_reason),
        *_unpadded(handle.layers, decisions),
        PathTaken("padded batches, generate()", unpacked, "they carry a mask or a cache"),
        PathTaken("activations", *_activations(handle, decisions, autocast)),
    ]


def _unpadded(layers: FusedLayers | None, decisions: Decisions) -> list[PathTaken]:
    """Say that padded batches that want no cache have the fused layers, too."""
    if layers is None or decisions.layers is LayersPath.STOCK:
        return []
    path = "without their padding", "the mask says where it is"
    if is_seen(layers):
        path = "padded, transformers' layers", "somebody's hook or forward is inside the backbone"
    return [PathTaken("padded batches in training", *path)]


def _sharing(model: Any) -> list[PathTaken]:
    """Say how many processes share the layers' frozen weights, if several do."""
    shared = sharded(model)
    if shared is None:
        return []
    part = f"a part in each of {shared.processes} processes"
    return [PathTaken("layers' weights", part, f"launch.strategy: sharded; {shared.gathered_by}")]


def _loading(model: Any) -> list[PathTaken]:
    """Say which loader quantised the model, if one did."""
    if LOADED_BY not in model.__dict__:
        return []
    if reason := model.__dict__[LOADED_BY]:
        return [PathTaken("quantising on load", "transformers", reason)]
    return [PathTaken("quantising on load", "Pronghorn's loader", "one tensor at a time, to bitsandbytes' bits")]


def _render_generic(handle: Handle) -> list[PathTaken]:
    """Render what is known of a model of a generic family."""
    packing: GenericPacking = handle.model.__dict__[PACKING]
    isolation = packing.isolation
    apart = "not probed: no packed batch came" if isolation is None else str(isolation)
    way = "one document a row" if packing.way is None else str(packing.way)
    installed, n = handle.installed, len(lora_linears(handle.model))
    on = recomputes_layers(handle.model)
    activations = ("recompute the layer" if on else Policy.KEEP.value, "gradient checkpointing")
    return [
        PathTaken("packed documents", way, apart),
        PathTaken("decoder layers", LayersPath.STOCK, why_generic(handle.model.config)),
        *([PathTaken("LoRA", "one function a linear in training", counted(n, "linear"))] if n else []),
        PathTaken("loss", LossPath.SUPERVISED, "where the model's forward keeps only their logits"),
        PathTaken("padded batches, generate()", "transformers' own", "they carry a mask or a cache"),
        PathTaken("activations", *(activations if installed is None else installed.path())),
    ]


def _float32_products(device: torch.device) -> list[PathTaken]:
    """Tell where this process rounds what float32 products read."""
    precision = narrowed(device)
    return [] if precision is None else [PathTaken("products in float32", precision, "torch is set so in this process")]


def _products(handle: Handle, autocast: torch.dtype | None) -> list[PathTaken]:
    """Tell in what frozen weights multiply, where 8 bits were asked for or a checkpoint's linears are packed."""
    compute, layers = handle.options.compute, handle.layers
    packed = [p for p in handle.model.base_model.parameters() if isinstance(p, PackedTensor) and p.ndim == 2]
    kinds = ", ".join(sorted({type(weight).__name__.removesuffix("Tensor") for weight in packed}))
    if not compute.in_8_bits or layers is None:
        if layers is not None and layers.builder.written_once:
            asked = handle.options.experimental.written_out == "once"
            why = "asked for" if asked else "the plan has memory for them"
            return [PathTaken("products of frozen weights", "the model's dtype, written out once", why)]
        written = f"the model's dtype, written out of {kinds} for each product"
        return [PathTaken("products of frozen weights", written, "the checkpoint is packed")] if packed else []
    in_8_bits, products = layers.in_8_bits()
    path = f"FP8 by rows, {'exact' if compute is Compute.FP8_EXACT else 'fast'} accumulation"
    once = ", of weights written out once" if layers.builder.written_once else ""
    if compute is Compute.INT8:
        path = f"8-bit integers of rotated rows; the forward of queries, keys and values in the model's dtype{once}"
    elif not compute.forward_in_fp8:
        path = f"{path}, for input gradients; the forward in the model's dtype{once}"
    if chooses_codes(layers):
        path = f"{path}; {CODES_WRITTEN if layers.builder.codes_written else '8-bit codes kept beside the weights'}"
    multiplied = [base for bases, _ in layers.coded_products(_dtype(handle.model, autocast)) for base in bases]
    of_products = [base.weight for base in multiplied if isinstance(base.weight, PackedTensor)]
    again = len(of_products) - (0 if compute is Compute.INT8 else sum(map(has_own_codes, of_products)))
    if of_products:
        path = f"{path}; " + (
            f"{counted(again, 'weight')} of {kinds} quantised once more, by rows" if again else "the stored codes"
        )
    if in_8_bits < products:
        trained = {linear.full for linear in layers.linears() if not linear.in_8_bits}
        whose = " or ".join(["trained"] * (True in trained) + ["gates'"] * (False in trained))
        path = f"{path}; {products - in_8_bits} of {products} in the model's dtype, whose weights are {whose}"
    if handle.experts is not None:
        apart = _experts_in_8_bits(handle, autocast)
        too = "; experts both ways" if compute is Compute.INT8 else ", experts too"
        path = f"{path} (experts apart: {apart})" if apart else f"{path}{too}"
    unfused = layers.reason(autocast)
    if unfused is not None:
        path = f"the model's dtype in blocks that aren't fused; in others {path}"
    return [PathTaken("products of frozen weights", path, unfused or "asked for")]


def _experts_in_8_bits(handle: Handle, autocast: torch.dtype | None) -> str | None:
    """Say why experts don't multiply in 8 bits: "" if they do, None where 8 bits weren't asked for."""
    if not handle.options.compute.in_8_bits or handle.layers is None:
        return None
    return handle.layers.experts_reason(_dtype(handle.model, autocast)) or ""


def queries_of(model: Any, autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return [0, D] for each size of heads, like layers' queries; none of a model that has delta nets alone."""
    dtype = _dtype(model, autocast)
    return [torch.empty(0, dim, dtype=dtype, device=model.device) for dim in head_dims(model)]


def _dtype(model: Any, autocast: torch.dtype | None) -> torch.dtype:
    """Return what layers compute in: autocast's dtype or the weights'; with 4-bit weights it is bfloat16."""
    of_weights = next(model.parameters()).dtype
    return autocast or (of_weights if of_weights.is_floating_point else torch.bfloat16)


def _parts(queries: list[torch.Tensor]) -> list[str]:
    part = "packed attention"
    return [part] if len(queries) == 1 else [f"{part}, heads of {query.shape[1]}" for query in queries]


def longest_tiled(model: Any, attention: Backend, autocast: torch.dtype | None = None) -> int | None:
    """Return the tokens from which on documents go through cuDNN, which has no sinks; None where none do."""
    sinks = family_of(model.config).load_attention == "eager"
    long = (long_from(attention, query) for query in queries_of(model, autocast))
    return None if sinks else min((tokens for tokens in long if tokens is not None), default=None)


def _attention(handle: Handle, query: torch.Tensor) -> tuple[str, str]:
    if handle.options.experimental.packing_metadata == "per_layer_mask":
        return "masked", "ablation"
    path, why = choose(handle.options.backend, query)
    long = longest_tiled(handle.model, handle.options.backend, query.dtype)
    if path == "tiled" and long is not None:
        window = "" if getattr(handle.model.config, "sliding_window", None) is None else " where no window cuts them"
        path = f"tiled; documents of {long:,} tokens and more by cuDNN{window}"
    return path, why


def _layers(handle: Handle, autocast: torch.dtype | None) -> tuple[LayersPath, str]:
    options = handle.options
    if handle.layers is None:
        if options.backend == "masked" or options.experimental.packing_metadata != "once":
            return LayersPath.STOCK, "the fused ones have no dense mask, and metadata made once only"
        device = next(handle.model.parameters()).device.type
        asked = options.layers == "stock"
        return LayersPath.STOCK, "asked for" if asked else f"the fused ones are for CUDA, this is {device}"
    reason = handle.layers.reason(autocast)
    if reason is not None:
        return LayersPath.PARTLY, reason
    if has_experts(handle.model.config):
        return LayersPath.EXPERTS_APART, "merged products, kernels"
    return LayersPath.FUSED, "merged products, kernels, one autograd function a block"


def _graph(handle: Handle, autocast: torch.dtype | None) -> tuple[GraphPath, str]:
    if handle.options.graph == "off" or handle.graphs is None:
        return GraphPath.OFF, "asked for" if handle.options.graph == "off" else "it is for fused layers on CUDA"
    if autocast is not None:
        return GraphPath.OFF, "autocast is on"
    on, why = handle.graphs.state
    return GraphPath(on), why


def _activations(handle: Handle, decisions: Decisions, autocast: torch.dtype | None) -> tuple[str, str]:
    installed = handle.installed
    if installed is None:
        on = recomputes_layers(handle.model)
        what, keeps = "recompute the layer" if on else Policy.KEEP.value, not on
        why = f"gradient checkpointing is {'on' if on else 'off'}"
    else:
        unfused = None if handle.layers is None else handle.layers.reason(autocast)
        what, why = installed.path(unfused)
        keeps = Policy.KEEP in installed.counts(unfused)
    if keeps and decisions.layers is LayersPath.FUSED and decisions.graph is GraphPath.ON:
        what = f"{what}; in the graph norms' results are made again"
    return what, why
