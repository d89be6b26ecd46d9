"""`attach`: the only place that changes a model, one instance at a time, and `Handle.detach`, which undoes it.

Parameters keep their names and values (so `save_pretrained` gives byte for byte what an unattached model gives):

1. The config's attention implementation becomes Pronghorn's (`attention.packed`).
2. A forward pre-hook on the backbone finds the batch's `PackedBatch` and hands it to every layer (`models.metadata`).
3. The causal LM's class becomes a subclass of the same name whose forward computes the loss of a packed batch from the
   supervised tokens' hidden states (`models.causal_lm`).
4. On CUDA layers and norms get classes that compute the same by fewer operations (`layers.decoder`), and the
   backbone one that replays CUDA graphs (`models.graph`). Before the first packed forward, frozen weights that are
   multiplied with together are merged into one storage. Experts get another implementation (`models.experts`).
5. Each layer gets its policy of the plan (`memory.recompute`). `Handle.replan` changes nothing but this.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pronghorn.attention.backends import Backend, choose
from pronghorn.attention.packed import NAME_PREFIX, implementation
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.layers.build import watched
from pronghorn.layers.decoder import FusedLayers
from pronghorn.layers.isolated_delta import delta_nets, isolate_delta_nets
from pronghorn.layers.lora_linear import use_one_function
from pronghorn.layers.short_conv import isolate_convolutions
from pronghorn.layers.subclass import own_class, restore
from pronghorn.memory.offload import OffloadEngine
from pronghorn.memory.plan import Codes, Plan
from pronghorn.memory.recompute import Installed, install, policies_of
from pronghorn.models import experts
from pronghorn.models.attach_options import AttachOptions, Attention, Experimental, Layers
from pronghorn.models.causal_lm import check_forward, packed_class
from pronghorn.models.families import (
    balances_experts,
    base_causal_lm,
    check_config,
    check_described,
    check_subject,
    check_windows,
    decoder_layers,
    has_experts,
    looks_tokens_up,
    recomputes_layers,
    rope_limit,
    set_attention,
)
from pronghorn.models.generic import PACKING, GenericPacking, followable, generic_class
from pronghorn.models.graph import BackboneGraphs, Graph, graphed_class
from pronghorn.models.metadata import CAUSAL_LM, LAYERS, check_attended, share_metadata
from pronghorn.models.probe import Isolation
from pronghorn.models.report import Decisions, PathTaken, decide, longest_tiled, queries_of, render
from pronghorn.models.unpadded import GRAPHS, put_back
from pronghorn.parallel.sharded import sharded
from pronghorn.parallel.state import refuse_sharded
from pronghorn.precision.compute import Compute


@dataclass
class Handle:
    """What `attach` did to one model, and the way back."""

    model: Any
    """The transformers causal LM that was changed (not a PEFT wrapper around it)."""
    options: AttachOptions
    original_class: type[nn.Module]
    layers: FusedLayers | None
    """The fused layers, if there are some; `paths` tells whether these serve the model as it is."""
    graphs: BackboneGraphs | None
    """The backbone's CUDA graphs, where layers are fused on CUDA."""
    experts: experts.ExpertLayers | None
    """The experts of a mixture-of-experts model."""
    previous_attention: str
    """The attention implementation that the model had."""
    _hooks: tuple[RemovableHandle, ...]
    """What hands the batch's metadata to the layers, and padded batches back."""
    plan: Plan | None = None
    installed: Installed | None = None
    """The plan on the layers; None where there is no plan."""

    @property
    def fuses(self) -> bool:
        """Whether layers have their fused classes."""
        return self.layers is not None

    @property
    def isolation(self) -> Isolation | None:
        """What the probe found of a model of a generic family; None for others, and before it ran."""
        packing: GenericPacking | None = self.model.__dict__.get(PACKING)
        return None if packing is None else packing.isolation

    @property
    def report(self) -> list[PathTaken]:
        """Every path taken and why, for the model's present device and dtype."""
        return self.paths(None)

    @property
    def offload_engine(self) -> OffloadEngine | None:
        """What moves layers' inputs to the host, where the plan has it do so."""
        return None if self.installed is None else self.installed.engine

    def paths(self, autocast: torch.dtype | None) -> list[PathTaken]:
        """Return the report for steps under autocast in that dtype, which attention then sees (None: no autocast)."""
        return render(self, autocast)

    def decisions(self, autocast: torch.dtype | None = None) -> Decisions:
        """Return the report's decisions as values."""
        return decide(self, autocast)

    def replan(self, plan: Plan | None) -> Handle:
        """Let the layers follow another plan (None: as gradient checkpointing is set).

        Nothing else is attached again: weights and everything built from them stay.

        Raises:
            ConfigError: the model was wrapped or sharded since, or the plan is for another number of layers.
            UnsupportedError: these layers can't follow it; they keep the plan before.
        """
        self._check_unchanged("choose the plan before sharding the model")
        self.options.check_codes(plan, self.layers)
        layers, whole = decoder_layers(self.model), self.fuses and not has_experts(self.model.config)
        if plan is not None:
            policies_of(plan, check_config(self.model.config), layers, whole)  # refused before anything is changed
        if self.installed is not None:
            self.installed.uninstall()
        self.plan, self.installed = plan, None
        if plan is not None:
            self.installed = install(self.model, layers, plan, whole)
        if self.layers is not None:
            self.layers.use_weights(self.options.writes_codes(plan), self.options.writes_once(plan))
        if self.graphs is not None:
            self.graphs.restart()
        return self

    @contextmanager
    def trying(self, plan: Plan) -> Iterator[None]:
        """Let the layers follow another plan, without CUDA graphs, while the block runs."""
        before, graphs, paused = self.plan, self.graphs, self.graphs is not None and self.graphs.paused
        self.replan(plan)
        if graphs is not None:
            graphs.paused = True
        try:
            yield
        finally:
            if graphs is not None:
                graphs.paused = paused
            self.replan(before)

    def merge_weights(self) -> None:
        """Merge the weights that fused layers multiply with now, instead of in the first packed forward."""
        if self.layers is not None:
            self.layers.merge_weights()

    def adopt_adapters(self) -> Handle:
        """Take over adapters that PEFT has added since `attach`.

        Adapters on experts take part from now on. For adapters on linears, the next packed forward merges weights
        again, with room for them. In generic families, one function computes each linear with its LoRA.
        """
        if PACKING in self.model.__dict__ and self.options.fuses_lora(self.model):
            use_one_function(self.model)
        if self.experts is not None:
            self.experts.adopt()
        if self.layers is not None:
            self.layers.adopt_adapters()
        return self

    def detach(self) -> None:
        """Give the model back as it was, with weights in storages of their own; do nothing if it already is.

        Raises:
            ConfigError: the model was sharded (FSDP2) since; its class can't be taken back then.
            UnsupportedError: processes share its layers' weights, whose places fused layers rely on.
        """
        if attached(self.model) is not self:
            return
        self._check_unchanged("detach before sharding the model")
        refuse_sharded(self.model, "detaching")
        for hook in self._hooks:
            hook.remove()
        if self.experts is not None:
            self.experts.disable()
        if self.model.config._attn_implementation != self.previous_attention:
            set_attention(self.model, self.previous_attention)
        if self.installed is not None:
            self.installed.uninstall()
        if self.graphs is not None:
            self.graphs.clear()
        if self.layers is not None:
            self.layers.separate_weights()
        restore(self.model)

    def _check_unchanged(self, remedy: str) -> None:
        if attached(self.model) is not self:
            raise ConfigError("the handle is of an attachment that was replaced", "use what attach returned last")
        swapped = own_class(self.model) is self.original_class
        if not swapped or any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters()):
            raise ConfigError(f"{type(self.model).__name__} was wrapped or sharded after attach", remedy)


def attach(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    attention: Attention = "auto",
    layers: Layers = "auto",
    graph: Graph = "auto",
    compute: str = "dtype",
    codes: Codes = "auto",
    experimental: Experimental | Mapping[str, Any] | None = None,
) -> Handle:
    """Give a model Pronghorn's packed path.

    A second call with the same options returns the first handle, with adapters that PEFT has added since. Another plan
    replaces the one before (`Handle.replan`).

    Args:
        model: a causal LM of transformers, or a PEFT model around one. If no family's file knows it, it runs
            transformers' own layers, and `layers="fused"`, `experimental` and 8-bit `compute` are refused.
        plan: what each layer keeps; None leaves the model's gradient checkpointing as it is.
        attention: `auto` chooses by device, dtype and head size; a name demands that backend.
        layers: `fused` computes norms, attention and MLP in Pronghorn's `layers`, `stock` leaves them to transformers
            and PEFT; `auto` is fused on CUDA.
        graph: launch fused layers as CUDA graphs (`models.graph`): `on`, `off`, or `auto`: if the first steps show
            that it pays (`models.graph_benefit`). Never if the plan's budget has no memory for them (`Plan.graph`).
        compute: numbers that frozen weights multiply in: `dtype`, the model's; `fp8`, input gradients in 8 bits by
            rows; `int8`, the forward, too, but for that of queries, keys and values, in 8-bit integers; `fp8_both`, all
            of both by rows; `fp8_exact`, the same with exact sums.
        codes: how `fp8` gets the codes of 16-bit weights: `kept`, a byte a weight more, or `written` out for each
            product, with the same gradients; `auto` follows the plan (`Plan.codes_written`), or keeps them.
        experimental: switches for measurements, an `Experimental` or its fields by name.
    Returns:
        The handle: `.report` lists every decision, `.detach()` restores the model.
    Raises:
        UnsupportedError: no causal LM, or a configuration or a plan that packed attention or these layers can't serve.
        ConfigError: unknown options, a plan for another number of layers, or a model whose forward an earlier trainer
            wrapped.
    """
    check_subject(model)
    base = base_causal_lm(model)
    family = check_config(base.config)
    options = AttachOptions(attention, layers, graph, Compute.of(compute), codes, Experimental.of(experimental))
    options.check(base.config)
    current, fused, graphed = attached(base), options.fuses(base), options.graphs(base)
    if current is None:
        check_described(base, family)
        check_forward(base)
    else:
        same_device = current.fuses == fused and (current.graphs is not None) == graphed
        if current.options == options and same_device:
            current.adopt_adapters()
            return current if plan in (None, current.plan) else current.replan(plan)
        if plan is None and current.plan is not None:
            alike = current.options.compute is options.compute  # codes are of one compute
            plan = current.plan if alike else replace(current.plan, codes_written=False, written_once=False)
    if plan is not None and not family.generic:
        policies_of(plan, family, decoder_layers(base), fused and not has_experts(base.config))  # changes nothing yet
    # refused before an earlier attachment is taken off
    checked = None
    if options.compute.in_8_bits:
        if not fused:
            remedy = "leave compute (in a recipe precision.compute) out: it is for layers that are fused, on CUDA"
            raise UnsupportedError(f"compute = '{options.compute}' needs fused layers", remedy)
        checked = FusedLayers(base.base_model, family, options.backend, options.compute)
        checked.check_compute()
    options.check_codes(plan, checked)
    if not family.generic:
        delta_nets(base.base_model, family)
        check_windows(base.base_model)
    if current is not None:
        current.detach()
    if family.generic:
        handle = _attach_generic(base, options)
        return handle if plan is None else handle.replan(followable(plan, decoder_layers(base)))
    previous_attention, backbone = base.config._attn_implementation, base.base_model
    previous_class: Any = type(base)
    expert_layers = experts.enable(base, options.experimental.moe_routing)
    set_attention(base, implementation(options.backend, options.experimental.packing_metadata))
    isolate_delta_nets(backbone, family)
    hooks = (
        backbone.register_forward_pre_hook(share_metadata, with_kwargs=True),
        backbone.register_forward_hook(put_back, with_kwargs=True, prepend=True),  # before anybody sees them
        backbone.register_forward_hook(check_attended, with_kwargs=True),
    )
    base.__class__ = packed_class(previous_class)
    backbone.__dict__[CAUSAL_LM] = base
    fused_layers = FusedLayers(backbone, family, options.backend, options.compute) if fused else None
    if fused_layers is not None:
        fused_layers.use_weights(options.writes_codes(plan), options.writes_once(plan))
        fused_layers.install()
        backbone.__dict__[LAYERS] = fused_layers
    graphs = _add_graphs(base, options) if graphed else None
    handle = Handle(base, options, previous_class, fused_layers, graphs, expert_layers, previous_attention, hooks)
    base._pronghorn_handle = handle
    return handle if plan is None else handle.replan(plan)


def _attach_generic(base: Any, options: AttachOptions) -> Handle:
    """Attach a model of which nothing is known.

    `models.generic` proves that documents stay apart when a first packed batch comes, and trainers before that.
    """
    previous: Any = type(base)
    packing = GenericPacking(base, implementation(options.backend, "once"), base.config._attn_implementation)
    base.__class__ = generic_class(previous)
    isolate_convolutions(base)
    setattr(base, PACKING, packing)
    backbones = () if base.base_model is base else (base.base_model,)
    hooks = tuple(each.register_forward_pre_hook(packing.tell, with_kwargs=True) for each in backbones)
    handle = Handle(base, options, previous, None, None, None, base.config._attn_implementation, hooks)
    base._pronghorn_handle = handle
    return handle.adopt_adapters()


def _add_graphs(model: Any, options: AttachOptions) -> BackboneGraphs:
    backbone = model.base_model
    plain: Any = type(backbone)
    graphs = BackboneGraphs(
        backbone,
        plain.forward,
        options.graph == "on",
        functools.partial(_graph_refusal, model, options.backend),
        functools.partial(longest_tiled, model, options.backend),
        backbone.__dict__[LAYERS].merge_weights,
    )
    backbone.__class__ = graphed_class(plain)
    backbone.__dict__[GRAPHS] = graphs
    return graphs


def _graph_refusal(model: Any, attention: Backend) -> str | None:
    """Say why a model's layers can't be captured as they are now, or None.

    Only attention by tiles takes nothing about documents from the host, which a graph would keep for ever.
    """
    if sharded(model) is not None:
        return "weights are gathered from other processes, layer by layer"
    outside = model.base_model, model.get_input_embeddings()  # which are called
    if watched(module for module in model.base_model.modules() if module not in outside):
        return "modules inside carry hooks, which a graph doesn't call"
    trained = {name: p.dtype for name, p in model.base_model.named_parameters() if p.requires_grad}
    if any(".lora_" not in name or ".lora_embedding_" in name for name in trained):
        return "weights besides adapters are trained"
    if not trained:
        return "nothing in the layers is trained"
    handle = attached(model)
    linears = [module for module in model.base_model.modules() if "lora_A" in module._modules]
    if any(linear.merged for linear in linears):
        return "adapters are merged, so that nothing is trained"
    if any(p.requires_grad for linear in linears for p in _off(linear)):
        return "adapters that are off are not frozen"  # and get no gradient, as a graph's backward gives
    if len(set(trained.values())) > 1:
        return "adapters differ in dtype"  # and a graph's backward gives all gradients in one tensor
    if recomputes_layers(model):
        return "layers are recomputed"
    if handle is not None and handle.plan is not None and handle.plan.mlp_rows:
        return "MLPs are computed in tiles of rows"
    if handle is not None and handle.plan is not None and not handle.plan.graph:
        return "the plan's budget has no memory for one"
    if has_experts(model.config) and not str(model.config._experts_implementation).startswith(NAME_PREFIX):
        return f"experts go transformers' way, {model.config._experts_implementation}, which may wait for the device"
    if rope_limit(model.config) is not None:
        return "RoPE's frequencies depend on the longest position"
    if balances_experts(model.config):
        return "the loss needs the routers' logits"
    if looks_tokens_up(model.base_model):
        return "layers read other embeddings of the tokens, which a graph isn't given"
    ways = [choose(attention, query) for query in queries_of(model)]
    layers = FusedLayers(model.base_model, check_config(model.config), attention)
    other = (f"attention goes {way}: {why}" for way, why in ways if way != "tiled")
    return layers.reason(None) or next(other, None)


def _off(linear: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of one linear's adapters that aren't active."""
    for adapters in (linear.lora_A, linear.lora_B):
        for name in adapters.keys() - (set() if linear.disable_adapters else set(linear.active_adapters)):
            yield from adapters[name].parameters()


def plain_class(base: Any) -> type[Any]:
    """Return the class that a causal LM has when it isn't attached."""
    handle = attached(base)
    return type(base) if handle is None else handle.original_class


def attached(model: nn.Module) -> Handle | None:
    """Return the handle of an attached model, or None."""
    return getattr(base_causal_lm(model), "_pronghorn_handle", None)
