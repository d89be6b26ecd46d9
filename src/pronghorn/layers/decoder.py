"""The fused layers of one attached model: built from its family's description, checked once a model forward, run.

`FusedLayers.install` gives decoder layers and norms classes that compute the same by fewer, larger kernels. Parameters
are not moved out of the model or renamed. Before each forward of the backbone `begin` looks whether anything changed
since the blocks were built (`layers.watch`), brings the adapters' copies up to date, and returns the `Step` that layers
receive as a keyword. A layer without one, as with a cache, runs transformers' own forward.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.attention.backends import Backend
from pronghorn.data.batch import PackedBatch
from pronghorn.errors import UnsupportedError
from pronghorn.families.spec import FamilySpec
from pronghorn.kernels.cast_copies import CastCopies
from pronghorn.kernels.rms_norm import rms_norm
from pronghorn.layers.attention import AttentionBlock
from pronghorn.layers.block import Block, Call
from pronghorn.layers.build import STORAGE, LayerBuilder, computed_here, is_foreign
from pronghorn.layers.expert_codes import ExpertStorage, LentCodes
from pronghorn.layers.fused_linear import FusedLinear, check_8_bits, fits_8_bits
from pronghorn.layers.linears import base_of, products_dtype
from pronghorn.layers.step import LayerRun, Step
from pronghorn.layers.stock import StockBlock
from pronghorn.layers.subclass import moving, subclass
from pronghorn.layers.watch import Watch, hooks_in
from pronghorn.layers.weight_layout import GroupStorage, merge_weights, separate_state_dict
from pronghorn.memory.plan import MLP_ROWS, POLICY, Policy
from pronghorn.memory.recompute import OUTPUT_NOT_WANTED, WHOLE_LAYER, has_own_forward
from pronghorn.parallel.sharded import narrow_reader
from pronghorn.precision.compute import Compute, Numbers, Rule, check_device
from pronghorn.precision.fp8 import check_float16

RUN = "_pronghorn_run"
"""The attribute of a layer that holds its `LayerRun`."""
OWNER = "_pronghorn_owner"
"""The attribute of a layer that refers to its `FusedLayers`, weakly: a copied layer builds nothing."""
BUILDS = 3
"""Builds that are kept: with adapters on, off, and one more."""
STEP = "pronghorn_step"
"""The keyword by which a layer receives the `Step`."""


@dataclass(frozen=True)
class _Build:
    """The blocks of all layers as the model was at one time."""

    dtype: torch.dtype
    runs: dict[Any, LayerRun]
    """The blocks of each layer."""
    copies: CastCopies
    """Of adapters in the products' dtype."""
    layers: list[nn.Module]
    watch: Watch
    number: int
    gather_narrow: Callable[[], None] | None
    """Asks for 16 bits of the trained weights that processes share, where blocks read these; None without."""

    def fits(self, dtype: torch.dtype, layers: nn.ModuleList) -> bool:
        """Tell whether these are the layers it was made of, unchanged since."""
        return self.dtype is dtype and self.layers == list(layers) and self.watch.same()


class FusedLayers:
    """The layers of one model, from `attach` to `detach`.

    Args:
        backbone: what holds embeddings, layers and the last norm.
        backend: of packed attention.
        compute: in what frozen weights multiply.
    """

    def __init__(self, backbone: Any, family: FamilySpec, backend: Backend, compute: Compute = Compute.DTYPE) -> None:
        self.backbone, self.builder = backbone, LayerBuilder(family, backend, compute)
        self._builds: list[_Build] = []
        """The last one used comes first; adapters that are switched off and on find the one before again."""
        self._count, self._merged = 0, False
        # the numbers of the builds whose windows were looked at, and whose attentions keep documents apart
        self.checked = self.attention_checked = 0  # the watch sees what changes them

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedLayers:
        """Return fused layers for the copied model, which builds its own blocks."""
        copied = FusedLayers(copy.deepcopy(self.backbone, memo), self.builder.family, self.builder.backend)
        copied.builder = self.builder
        return copied

    @property
    def generation(self) -> int:
        """The number of the build in use: what was captured of another one reads other tensors."""
        return self._builds[0].number if self._builds else 0

    def install(self) -> None:
        """Give layers and norms their fused classes."""
        for layer in self.backbone.layers:
            layer.__dict__[OWNER] = weakref.ref(self)
        family, norms = self.builder.family, [self.backbone.norm]
        for layer in filter(self.builder.is_own, self.backbone.layers):
            own: Any = type(layer)
            layer.__class__ = _layer_class(own)
        for layer in self.backbone.layers:
            norms += [layer.get_submodule(path) for block in family.blocks(layer) for path in block.norms]
        for norm in filter(self.builder.is_own, norms):
            own = type(norm)
            norm.__class__ = _norm_class(own, family.norm_offset)

    def merge_weights(self) -> None:
        """Merge what layers multiply with (`weight_layout.merge_weights`). The first packed forward does so, before it
        has activations; and not `attach`, after which PEFT may add adapters that weights make room for. Trained weights
        stay where they are: under autocast every forward copies them, and saving would copy each slice."""
        weight = self.backbone.get_input_embeddings().weight
        if weight.is_meta:
            return
        dtype = products_dtype(weight)
        self.builder.find_tied(self.backbone.layers)
        for layer in (each for each in self.backbone.layers if hasattr(type(each), OUTPUT_NOT_WANTED)):
            storages = self.builder.storages(layer, dtype)
            # codes are made where layers are built, of weights as they lie
            wide = [storage for storage, rule in storages if rule.forward is Numbers.DTYPE]
            frozen = [each for each in wide if not base_of(each.linears[0]).weight.requires_grad]
            with torch.inference_mode(False):
                merge_weights(frozen, dtype)
        self._merged = True

    def use_weights(self, codes_written: bool, written_once: bool) -> None:
        """Let products have weights and codes in these ways from now on (`LayerBuilder`)."""
        if (builder := replace(self.builder, codes_written=codes_written, written_once=written_once)) != self.builder:
            self.builder, self._builds = builder, []
            for layer in self.backbone.layers:
                layer.__dict__.pop(RUN, None)

    def adopt_adapters(self) -> None:
        """Merge weights again before the next forward: adapters were added."""
        self._merged = False

    def check_compute(self) -> None:
        """Refuse 8-bit products that these layers can't have; does nothing where none are asked for.

        Raises:
            UnsupportedError: the device has none, or none in the model's dtype, or a weight's sizes don't fit.
        """
        compute = self.builder.compute
        if not compute.in_8_bits:
            return
        dtype = self.backbone.get_input_embeddings().weight.dtype
        check_device(compute, self.backbone.device)
        if dtype is torch.float32:
            raise UnsupportedError(f"compute = '{compute}' for a model in float32", "load it in bfloat16 (dtype)")
        if dtype is torch.float16 and compute is not Compute.INT8:
            check_float16(self.backbone.device)
        check_8_bits([each for layer in self.backbone.layers for each in self.builder.storages(layer, dtype)], compute)

    def linears(self) -> list[FusedLinear]:
        """List the products of weights in the layers as they were built for the last forward."""
        runs = self._builds[0].runs.values() if self._builds else ()
        return [linear for run in runs for block in run.blocks if isinstance(block, Block) for linear in block.linears]

    def lent_codes(self) -> list[LentCodes]:
        """List the codes of experts in the layers as they were built for the last forward."""
        runs = self._builds[0].runs.values() if self._builds else ()
        blocks = [block for run in runs for block in run.blocks]
        return [block.codes for block in blocks if isinstance(block, StockBlock) and block.codes is not None]

    def hooks(self) -> list[Any]:
        """List the hooks of all modules in the layers."""
        return hooks_in(self.backbone.layers, self._builds[0].watch if self._builds else None)

    def in_8_bits(self) -> tuple[int, int]:
        """Count the layers' products of frozen weights that are in 8 bits, and all products of weights."""
        linears = self.linears()
        return sum(linear.in_8_bits for linear in linears), len(linears)

    def experts_reason(self, dtype: torch.dtype) -> str | None:
        """Say why some experts don't multiply in 8 bits in a packed forward in `dtype`; None if all do, or are none."""
        for layer in self.backbone.layers:
            for storage in self.builder.experts(layer):
                if not self.builder.is_own(layer):
                    return f"{type(layer).__name__} has another forward than transformers'"
                if not computed_here(storage.module):
                    return "they go transformers' way"
                if (reason := storage.reason(dtype, self.builder.compute)) is not None:
                    return reason
        return None

    def coded_experts(self, dtype: torch.dtype) -> list[nn.Module]:
        """List the experts that a packed forward in `dtype` multiplies in 8 bits, if asked for, built or not."""
        compute = self.builder.compute
        storages = [each for layer in self.backbone.layers for each in self.builder.experts(layer) if compute.in_8_bits]
        return [each.module for each in storages if each.reason(dtype, compute) is None]

    def coded_products(self, dtype: torch.dtype) -> list[tuple[list[nn.Module], Rule]]:
        """List the base linears of each product that a packed forward in `dtype` computes in 8 bits, built or not, with
        the product's rule."""
        asked = self.backbone.layers if self.builder.compute.in_8_bits else ()
        return [
            ([base_of(linear) for linear in storage.linears], rule)
            for layer in asked
            for storage, rule in self.builder.storages(layer, dtype)
            if fits_8_bits(storage, dtype, rule) and not base_of(storage.linears[0]).weight.requires_grad
        ]

    def reason(self, autocast: torch.dtype | None) -> str | None:
        """Say why some block, experts aside, would not be computed here now (under autocast in that dtype), or None."""
        dtype = autocast or self.backbone.get_input_embeddings().weight.dtype
        self.builder.find_tied(self.backbone.layers)
        for layer in self.backbone.layers:
            if not self.builder.is_own(layer):
                return f"{type(layer).__name__} has another forward than transformers'"
            if (reason := self.builder.reason(layer, dtype)) is not None:
                return reason
        return None

    @torch.inference_mode(False)
    def begin(self, packed: PackedBatch, stream: torch.dtype, narrow: bool) -> Step:
        """Return the step of one forward of the backbone, whose hidden states have dtype `stream`.

        Tensors that are kept for other forwards are ordinary ones, also where this one is in inference mode.
        """
        kind = packed.cu_seqlens.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else stream
        if not (self._builds and self._builds[0].fits(dtype, self.backbone.layers)):
            self._choose(dtype)
        if self._builds[0].gather_narrow is not None:
            self._builds[0].gather_narrow()
        return self._step(self._builds[0], packed, stream, narrow, autocast)

    @contextmanager
    @torch.inference_mode(False)
    def apart(self, dtype: torch.dtype) -> Iterator[Callable[[PackedBatch], Step]]:
        """Build the layers apart from all other builds while the block runs: for a capture, of parameters' aliases.

        Yields:
            What makes the step of a forward in `dtype`, without looking whether anything changed.
        """
        before = [(layer, layer.__dict__.get(RUN)) for layer in self.backbone.layers]
        build = self._build(dtype, for_capture=True)
        for layer, run in build.runs.items():
            layer.__dict__[RUN] = run
        try:
            yield lambda packed: self._step(build, packed, dtype, narrow=False, autocast=False)
        finally:
            for layer, earlier in before:
                if earlier is not None:
                    layer.__dict__[RUN] = earlier

    def _step(self, build: _Build, packed: PackedBatch, stream: torch.dtype, narrow: bool, autocast: bool) -> Step:
        halved = self.builder.family.halved_rotary
        return Step(packed, stream, build.dtype, build.runs, halved, narrow, autocast, build.copies)

    def forget(self) -> None:
        """Drop what was built: it holds weights where they lay."""
        self._builds, self._merged = [], False
        for layer in self.backbone.layers:
            layer.__dict__.pop(RUN, None)
            layer.__dict__.pop(STORAGE, None)

    def separate_weights(self) -> None:
        """Give every merged weight a storage of its own again, one product's weights at a time, and drop the builds."""
        self._builds = []
        for layer in self.backbone.layers:
            layer.__dict__.pop(RUN, None)
        for layer in self.backbone.layers:
            storages: dict[str, GroupStorage | ExpertStorage] = layer.__dict__.pop(STORAGE, {})
            while storages:
                storages.popitem()[1].separate()

    def _choose(self, dtype: torch.dtype) -> None:
        """Put a build of the model as it is now first: an earlier one, or a new one."""
        build = next((earlier for earlier in self._builds[1:] if earlier.fits(dtype, self.backbone.layers)), None)
        for layer in self.backbone.layers:
            layer.__dict__.pop(RUN, None)
        if build is None:
            if not self._merged:
                self.merge_weights()
            # others hold weights, or codes, that are no longer the model's: freed before new ones are made
            self._builds = [earlier for earlier in self._builds if earlier.watch.same_weights()]
            build = self._build(dtype)
        self._builds = [build, *(earlier for earlier in self._builds if earlier is not build)][:BUILDS]
        for layer, run in build.runs.items():
            layer.__dict__[RUN] = run

    def _build(self, dtype: torch.dtype, for_capture: bool = False) -> _Build:
        self._count += 1
        layers, targets, sources = list(self.backbone.layers), [], []
        runs, narrow = dict[Any, LayerRun](), list[Tensor]()
        self.builder.find_tied(layers)
        for index, layer in enumerate(layers):
            if not hasattr(type(layer), OUTPUT_NOT_WANTED):
                continue
            blocks = self.builder.blocks(layer, dtype)
            last = index == len(layers) - 1 and layers.count(layer) == 1  # else it runs before others, too
            runs[layer] = run = LayerRun(self.builder.family, blocks, last)
            linears = [linear for block in run.blocks if isinstance(block, Block) for linear in block.linears]
            narrow += [weight for linear in linears for weight in linear.read_narrow]
            targets += [target for linear in linears for target, _ in linear.copies]
            sources += [source for linear in linears for _, source in linear.copies]
        copies = CastCopies(targets, sources, by_table=not for_capture)
        watch = Watch(layers, self.builder.compute.in_8_bits)
        return _Build(dtype, runs, copies, layers, watch, self._count, narrow_reader(narrow))


def is_fused(layer: nn.Module) -> bool:
    """Tell whether a decoder layer computes packed batches without calling its modules, experts aside."""
    run = layer.__dict__.get(RUN)
    return run is not None and run.fused


def output_is_seen(backbone: Any) -> bool:
    """Tell whether somebody may look at what the last layer or the last norm gives, so that all its rows are wanted."""
    modules = backbone, backbone.layers[-1], backbone.norm
    names = "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"
    hooks = [hook for module in modules for name in names for hook in getattr(module, name).values()]
    hooks += backbone.norm._forward_pre_hooks.values()
    return any(map(has_own_forward, modules)) or any(is_foreign(hook) and not _is_ours(hook) for hook in hooks)


@functools.cache
def _norm_class(original: Any, offset: float) -> type[nn.Module]:
    @functools.wraps(original.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return rms_norm(x.contiguous(), self.weight, eps, offset)

    return subclass(original, forward=forward)


@functools.cache
def _layer_class(original: Any) -> type[nn.Module]:
    plain: Any = original.forward

    @functools.wraps(plain)
    def forward(self: Any, hidden_states: Tensor, *args: Any, output_wanted: bool = True, **kwargs: Any) -> Any:
        step: Step | None = kwargs.pop(STEP, None)
        # the step's own, not the layer's latest: a recomputation may come after a forward without adapters
        run: LayerRun | None = None if step is None else step.runs.get(self)
        tables = kwargs.get("position_embeddings")
        known = run is not None and (run.family.bind is not None or not args)
        if step is None or run is None or not known or tables is None or hidden_states.dtype is not step.stream:
            return plain(self, hidden_states, *args, **kwargs)
        policy = self.__dict__.get(POLICY, Policy.KEEP)
        if policy in WHOLE_LAYER and not self.gradient_checkpointing:  # which is switched off
            policy = Policy.KEEP
        if step.copies is not None:
            step.update_copies()
        first, shape = run.blocks[0], hidden_states.shape
        cos, sin = step.rotary(tables, shape[0] * shape[1])
        narrow = step.narrow and run.last and isinstance(first, Block)
        rows = step.packed.loss_rows if narrow else None
        # a forward of its own calls this one, and may compute with what it gives
        wanted = output_wanted or has_own_forward(self) or not all(map(_is_ours, self._forward_hooks.values()))
        mixer = next((block for block in run.blocks if isinstance(block, AttentionBlock)), None)
        attention = None if mixer is None else step.attention(mixer, hidden_states.device)
        mlp_rows = self.__dict__.get(MLP_ROWS, 0)
        call = Call(step.packed, cos, sin, policy, rows, wanted, mlp_rows, attention, kwargs.get("position_ids"))
        x = hidden_states.flatten(0, 1).contiguous()
        named = {} if run.family.bind is None else run.family.bind(args, kwargs)
        shape = shape if rows is None else torch.Size((1, len(rows), shape[2]))
        for block in run.blocks:
            if rows is not None and block is not first:  # what later blocks read of each token, of the same rows
                named |= {name: named[name][rows] for name in block.inputs if len(named[name]) != len(rows)}
            if isinstance(block, StockBlock):
                with block.lending():
                    x = block(x, shape, kwargs, named)
                continue
            # fused functions choose every dtype themselves
            with torch.autocast(x.device.type, enabled=False) if step.autocast else nullcontext():
                x = block(x, named, call)
        if run.family.emit is not None and output_wanted:  # a recomputation gives nothing to later layers again
            run.family.emit(named, kwargs)
        if run.family.output_scale is not None:
            x = (x * getattr(self, run.family.output_scale)).to(x.dtype)
        return x.view(shape)

    kept = {"_apply": moving(original, _drop), "state_dict": separate_state_dict(original), OUTPUT_NOT_WANTED: True}
    return subclass(original, forward=forward, **kept)


def _drop(layer: Any) -> None:
    """Drop what holds weights where they lay: a layer was moved."""
    layer.__dict__.pop(RUN, None)
    layer.__dict__.pop(STORAGE, None)
    if (owner := layer.__dict__[OWNER]()) is not None:
        owner.forget()


def _is_ours(hook: Any) -> bool:
    """Tell whether a hook is profile's: it takes the time and doesn't look at what a module gives."""
    return str(getattr(hook, "__module__", None)).startswith("pronghorn.")
