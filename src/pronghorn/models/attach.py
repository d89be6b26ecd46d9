"""`attach`: the only place that changes a model, one instance at a time, and `Handle.detach`, which undoes it.

Parameters keep their names and values (so `save_pretrained` gives byte for byte what an unattached model gives):

1. The config's attention implementation becomes Pronghorn's (`attention.packed`).
2. A forward pre-hook on the backbone finds the batch's `PackedBatch` and hands it to every layer (`models.metadata`).
3. The causal LM's class becomes a subclass of the same name whose forward computes the loss of a packed batch from the
   labelled tokens' hidden states (`models.causal_lm`).
4. On CUDA layers and norms get classes that compute the same by fewer operations (`layers.decoder`), and the
   backbone one that replays CUDA graphs (`models.graph`). Frozen weights that are multiplied with together come to lie
   in one storage, and stay so. Experts get another implementation (`models.experts`).
5. Each layer gets its policy of the plan (`memory.recompute`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pronghorn.attention.backends import Backend, choose
from pronghorn.attention.packed import NAME_PREFIX, Metadata, implementation
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.layers.build import watched
from pronghorn.layers.decoder import FusedLayers
from pronghorn.layers.subclass import own_class, restore
from pronghorn.memory.offload import OffloadEngine
from pronghorn.memory.plan import Plan
from pronghorn.memory.recompute import Installed, install, policies_of
from pronghorn.models import experts
from pronghorn.models.causal_lm import packed_class
from pronghorn.models.families import (
    base_causal_lm,
    check_config,
    has_experts,
    recomputes_layers,
    rope_limit,
)
from pronghorn.models.graph import Graph, TrunkGraphs, graphed_class
from pronghorn.models.metadata import LAYERS, share_metadata
from pronghorn.models.report import Decisions, PathTaken, decide, longest_tiled, query_of, render
from pronghorn.models.subject import check_subject
from pronghorn.precision.compute import Compute

Layers = Literal["auto", "fused", "stock"]


@dataclass(frozen=True)
class AttachOptions:
    """How a model is attached; see `attach`."""

    attention: Backend = "auto"
    packing_metadata: Metadata = "once"
    layers: Layers = "auto"
    graph: Graph = "auto"
    moe_routing: experts.Routing = "once"
    compute: Compute = Compute.DTYPE

    def check(self, config: Any) -> None:
        """Raise ConfigError for a value that is unknown, or that the model has no use for."""
        names = {"layers": (self.layers, Layers), "graph": (self.graph, Graph)}
        for name, (value, known) in {**names, "moe_routing": (self.moe_routing, experts.Routing)}.items():
            if value not in get_args(known):
                raise ConfigError(f"{name} {value!r} is unknown", f"use one of {', '.join(get_args(known))}")
        if self.moe_routing == "loop" and not has_experts(config):
            raise ConfigError("moe_routing 'loop' for a model without experts", "leave moe_routing out")

    def fuses(self, model: Any) -> bool:
        """Tell whether a model's layers get their fused classes."""
        wanted = self.layers == "fused" or (self.layers == "auto" and next(model.parameters()).is_cuda)
        return wanted and self.attention != "masked" and self.packing_metadata == "once"


@dataclass
class Handle:
    """What `attach` did to one model, and the way back."""

    model: Any
    """The transformers causal LM that was changed (not a PEFT wrapper around it)."""
    plan: Plan | None
    options: AttachOptions
    _previous_attention: str
    original_class: type[nn.Module]
    installed: Installed | None
    """The plan on the layers; None where there was no plan."""
    _hook: RemovableHandle
    layers: FusedLayers | None
    """The fused layers, if there are some; `paths` tells whether these serve the model as it is."""
    graphs: TrunkGraphs | None
    """The trunk's CUDA graphs, where layers are fused on CUDA."""
    experts: experts.ExpertLayers | None
    """The experts of a mixture-of-experts model."""

    @property
    def fuses(self) -> bool:
        """Whether layers have their fused classes."""
        return self.layers is not None

    @property
    def report(self) -> list[PathTaken]:
        """Every path taken and why, for the model's present device and dtype."""
        return self.paths(None)

    @property
    def offload_engine(self) -> OffloadEngine | None:
        """What moves layers' inputs to the host, where the plan has it do so."""
        return None if self.installed is None else self.installed.engine

    def paths(self, autocast: torch.dtype | None) -> list[PathTaken]:
        """The report for steps that run under autocast in that dtype (None: without), which attention then sees."""
        return render(self, autocast)

    def decisions(self, autocast: torch.dtype | None = None) -> Decisions:
        """What the report says, as values."""
        return decide(self, autocast)

    def replan(self, plan: Plan | None, graph: Graph | None = None) -> Handle:
        """Attach the model again, with another plan (None: without one) and the same options, but for `graph` where it
        is given; this stays the model's handle. Raises as `attach` and `detach` do."""
        options = self.options if graph is None else replace(self.options, graph=graph)
        current = attached(self.model)
        if plan is None and current is not None:
            current.detach()
        made = attach(self.model, plan, **vars(options))
        self.__dict__.update(made.__dict__)  # whoever holds it may go on asking it, and detach
        self.model._pronghorn_handle = self
        return self

    def adopt_adapters(self) -> Handle:
        """Compute adapters that PEFT has put on experts since `attach` beside the experts, too, and put together what
        layers multiply with now, as `attach` does."""
        if self.experts is not None:
            self.experts.adopt()
        if self.layers is not None:
            self.layers.merge_weights()
        return self

    def detach(self) -> None:
        """Give the model back as it was; does nothing if it already is.

        Raises:
            ConfigError: the model was sharded (FSDP2) since; its class can't be taken back then.
        """
        if getattr(self.model, "_pronghorn_handle", None) is not self:
            return
        swapped = own_class(self.model) is self.original_class
        if not swapped or any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters()):
            raise ConfigError(
                f"{type(self.model).__name__} was wrapped or sharded after attach", "detach before sharding the model"
            )
        self._hook.remove()
        if self.experts is not None:
            self.experts.disable()
        _set_attention(self.model, self._previous_attention)
        if self.installed is not None:
            self.installed.uninstall()
        if self.graphs is not None:
            self.graphs.clear()
        if self.layers is not None:
            self.layers.forget()
        restore(self.model)


def attach(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    attention: Backend = "auto",
    packing_metadata: Metadata = "once",
    layers: Layers = "auto",
    graph: Graph = "auto",
    moe_routing: experts.Routing = "once",
    compute: str = "dtype",
) -> Handle:
    """Give a model Pronghorn's packed path. Idempotent: a second call with the same options returns the first handle,
    with what PEFT has put on the experts since.

    Args:
        model: a transformers causal LM of a family in `models.families`, or a PEFT model around one.
        plan: what each layer keeps; None leaves the model's gradient checkpointing as it is.
        attention: `auto` lets device, dtype and head size decide; a name asks for that backend or an error.
        packing_metadata: `once`, or for ablations `per_layer` and `per_layer_mask`.
        layers: `fused` computes norms, attention and MLP by `layers`, `stock` leaves them to transformers and
            PEFT; `auto` is fused on CUDA.
        graph: launch fused layers as CUDA graphs (`models.graph`): `on`, `off`, or `auto`, where the first steps show
            that launching takes the host as long as computing takes the device. Never where the plan's budget has no
            memory for them (`Plan.graph`).
        moe_routing: group the tokens of an experts' layer `once` (`models.experts`), or for ablations `loop`.
    Returns:
        The handle: `.report` tells every path taken, `.detach()` restores the model.
    Raises:
        UnsupportedError: no causal LM, a family that is not supported, or a plan that these layers can't follow.
        ConfigError: unknown options, or a plan for another number of layers.
    """
    check_subject(model)
    base = base_causal_lm(model)
    family = check_config(base.config)
    options = AttachOptions(attention, packing_metadata, layers, graph, moe_routing, Compute.of(compute))
    options.check(base.config)
    name = implementation(attention, packing_metadata)
    current: Handle | None = getattr(base, "_pronghorn_handle", None)
    fused = options.fuses(base)
    graphed = fused and graph != "off" and next(base.parameters()).is_cuda
    if current is not None:
        moved = current.fuses != fused or (current.graphs is not None) != graphed  # to CUDA or from there since
        if current.options == options and plan in (None, current.plan) and not moved:
            return current.adopt_adapters()
        plan = plan or current.plan
    whole = fused and not has_experts(base.config)
    if plan is not None:
        policies_of(plan, base.base_model.layers, whole)  # refused before anything is changed
    if options.compute.is_fp8:
        if not fused:
            raise UnsupportedError(f"compute = '{options.compute}' needs fused layers", "use layers='fused', on CUDA")
        FusedLayers(base.base_model, family, attention, options.compute).check_compute()
    if current is not None:
        current.detach()
    previous = base.config._attn_implementation
    expert_layers = experts.enable(base, moe_routing)
    _set_attention(base, name)
    hook = base.base_model.register_forward_pre_hook(share_metadata, with_kwargs=True)
    previous_class: Any = type(base)
    base.__class__ = packed_class(previous_class)
    fused_layers = FusedLayers(base.base_model, family, attention, options.compute) if fused else None
    if fused_layers is not None:
        fused_layers.install()
        base.base_model.__dict__[LAYERS] = fused_layers
    graphs = None
    if graphed:
        backbone: Any = base.base_model
        plain: Any = type(backbone)
        graphs = TrunkGraphs(
            backbone,
            plain.forward,
            graph == "on",
            functools.partial(_graph_refusal, base, attention, plan),
            functools.partial(longest_tiled, base, attention),
            functools.partial(_merge_weights, backbone),
        )
        backbone.__class__ = graphed_class(plain)
        backbone.__dict__["_pronghorn_graphs"] = graphs
    installed = None if plan is None else install(base, base.base_model.layers, plan, whole)
    handle = Handle(base, plan, options, previous, previous_class, installed, hook, fused_layers, graphs, expert_layers)
    base._pronghorn_handle = handle
    if fused_layers is not None:
        fused_layers.merge_weights()  # last: where memory runs out the model can be detached
    return handle


def _set_attention(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    for module in model.modules():
        if "config" in module.__dict__:  # of a layer that PEFT copied, a copy
            module.config._attn_implementation = name


def _merge_weights(backbone: Any) -> None:
    backbone.__dict__[LAYERS].merge_weights()


def _graph_refusal(model: Any, attention: Backend, plan: Plan | None) -> str | None:
    """Why a model's layers can't be captured as they are now, or None. Only attention by tiles takes nothing about
    documents from the host, which a graph would keep for ever."""
    outside = model.base_model, model.get_input_embeddings()  # which are called
    if watched(module for module in model.base_model.modules() if module not in outside):
        return "modules inside carry hooks, which a graph doesn't call"
    trained = {name: p.dtype for name, p in model.base_model.named_parameters() if p.requires_grad}
    if any(".lora_" not in name or ".lora_embedding_" in name for name in trained):
        return "weights besides adapters are trained"
    if not trained:
        return "nothing in the layers is trained"
    linears = [module for module in model.base_model.modules() if "lora_A" in module._modules]
    if any(linear.merged for linear in linears):
        return "adapters are merged, so that nothing is trained"
    if any(p.requires_grad for linear in linears for p in _off(linear)):
        return "adapters that are off are not frozen"  # and get no gradient, as a graph's backward gives
    if len(set(trained.values())) > 1:
        return "adapters differ in dtype"  # and a graph's backward gives all gradients in one tensor
    if recomputes_layers(model):
        return "layers are recomputed"
    if plan is not None and not plan.graph:
        return "the plan's budget has no memory for one"
    if any(not p.dtype.is_floating_point for p in model.base_model.parameters()):
        return "the weights are quantised"
    if has_experts(model.config) and not str(model.config._experts_implementation).startswith(NAME_PREFIX):
        return f"experts go transformers' way, {model.config._experts_implementation}, which may wait for the device"
    if rope_limit(model.config) is not None:
        return "RoPE's frequencies depend on the longest position"
    if getattr(model.config, "output_router_logits", False):
        return "the loss needs the routers' logits"
    way, why = choose(attention, query_of(model))
    layers = FusedLayers(model.base_model, check_config(model.config), attention)
    return layers.reason(None) or (None if way == "tiled" else f"attention goes {way}: {why}")


def _off(linear: Any) -> Iterator[nn.Parameter]:
    """The parameters of one linear's adapters that aren't active."""
    for adapters in (linear.lora_A, linear.lora_B):
        for name in adapters.keys() - (set() if linear.disable_adapters else set(linear.active_adapters)):
            yield from adapters[name].parameters()


def attached(model: nn.Module) -> Handle | None:
    """The handle of an attached model, or None."""
    return getattr(base_causal_lm(model), "_pronghorn_handle", None)
