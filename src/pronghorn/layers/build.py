"""From a decoder layer's modules to the blocks that compute it, by the family's description."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pronghorn.attention.backends import Backend
from pronghorn.attention.packed import NAME_PREFIX
from pronghorn.families.registry import DROPOUTS
from pronghorn.families.spec import (
    ACTIVATIONS,
    Attention,
    Experts,
    ExpertsBeside,
    FamilySpec,
    GatedDelta,
    GatedMLP,
    PerLayerInput,
    ResidualBlock,
)
from pronghorn.kernels.rope import Heads
from pronghorn.layers.attention import AttentionBlock
from pronghorn.layers.block import Block, NoNorm, Norm
from pronghorn.layers.expert_codes import ExpertStorage, LentCodes
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.layers.gated_delta import GatedDeltaBlock, delta_net
from pronghorn.layers.heads import QKV
from pronghorn.layers.linears import base_of, unfused_reason
from pronghorn.layers.mlp import GatedMLPBlock
from pronghorn.layers.per_layer_input import PerLayerInputBlock
from pronghorn.layers.stock import ExpertsBesideBlock, StockBlock, StockPerLayerInput
from pronghorn.layers.watch import HOOKS
from pronghorn.layers.weight_layout import GroupStorage, find_tied
from pronghorn.memory.recompute import has_own_forward
from pronghorn.precision.compute import Compute, Numbers, Rule

STORAGE = "_pronghorn_storage"
"""The attribute of a layer that holds its `GroupStorage`s and `ExpertStorage`s while it is attached."""
_RECORDER = "transformers.utils"
"""Where transformers' hooks for output_hidden_states and output_attentions are from: once asked for they stay, on every
layer and attention; packed attention has nothing for them."""

_WRAPPERS = ("transformers.", "torch.", "pronghorn.")
"""Packages that wrap a forward and leave what it computes as it is."""


@dataclass(frozen=True)
class LayerBuilder:
    """Makes the blocks of one model's layers.

    Args:
        backend: of packed attention.
        compute: in what frozen weights multiply.
        codes_written, written_once: as `FusedLinear` takes them.
    """

    family: FamilySpec
    backend: Backend
    compute: Compute = Compute.DTYPE
    codes_written: bool = False
    written_once: bool = False

    def blocks(self, layer: Any, dtype: torch.dtype) -> list[Block | StockBlock]:
        """Make the blocks of a layer, with products in `dtype`, merging weights that don't lie together yet."""
        return [self._block(layer, block, dtype) for block in self.family.blocks(layer)]

    def reason(self, layer: Any, dtype: torch.dtype) -> str | None:
        """Say why a block of the layer, experts aside, would be called instead of computed; None if none would."""
        blocks = (block for block in self.family.blocks(layer) if not isinstance(block.kind, Experts))
        return next((reason for block in blocks if (reason := self._reason(layer, block, dtype)) is not None), None)

    def storages(self, layer: Any, dtype: torch.dtype) -> list[tuple[GroupStorage, Rule]]:
        """List the storages of the layer's blocks that are computed here, in the order of the forward, with in what
        they multiply while they are frozen."""
        return [
            (self._storage(layer, block, group), self._rule(block, index))
            for block in self.family.blocks(layer)
            if not isinstance(block.kind, Experts) and self._reason(layer, block, dtype) is None
            for index, group in enumerate(block.kind.linears)
        ]

    def find_tied(self, layers: Iterable[Any]) -> None:
        """Find weights that several products have; `reason` and `storages` go by what was found last."""
        blocks = ((layer, block) for layer in filter(self.is_own, layers) for block in self.family.blocks(layer))
        groups = (
            (layer, block, group)
            for layer, block in blocks
            if not isinstance(block.kind, Experts) and self.is_own(layer.get_submodule(block.module))
            for group in block.kind.linears
            if all(isinstance(base_of(layer.get_submodule(block.path(path))), nn.Linear) for path in group)
        )
        find_tied(self._storage(*each) for each in groups)

    def _rule(self, block: ResidualBlock, index: int) -> Rule:
        """Return in what a block's product of that index multiplies."""
        mixes = isinstance(block.kind, Attention | GatedDelta) and index < len(block.kind.linears) - 1
        if self.compute is not Compute.INT8 or not mixes:
            return self.compute.rule
        # errors of scores are what gradients turn with most; a gate has a few outputs a head
        return Rule(Numbers.DTYPE, Numbers.INT8) if index == 0 else Compute.DTYPE.rule

    def experts(self, layer: Any) -> list[ExpertStorage]:
        """List the storages of the layer's experts, the same ones as long as these are the same modules."""
        kept: dict[str, Any] = layer.__dict__.setdefault(STORAGE, {})
        storages = []
        for block in self.family.blocks(layer):
            if isinstance(block.kind, Experts):
                outer, name = layer.get_submodule(block.path(block.kind.experts)), f"experts {block.path('')}"
                if name not in kept or kept[name].outer is not outer:
                    kept[name] = ExpertStorage(outer, block.kind)
                storages.append(kept[name])
        return storages

    def is_own(self, module: Any) -> bool:
        """Tell whether a module computes what the family's source says: it isn't wrapped, nor is its forward."""
        return is_own(module, self.family)

    def _block(self, layer: Any, block: ResidualBlock, dtype: torch.dtype) -> Block | StockBlock:
        # a kind from outside the package makes its own block; a text says why it can't, and `_reason` repeats it
        build = getattr(block.kind, "build", None)
        if build is not None and not isinstance(made := build(self, layer, block, dtype), str):
            return made
        reason = None if isinstance(block.kind, Experts) else self._reason(layer, block, dtype)
        if reason is not None or isinstance(block.kind, Experts):
            return _stock_block(layer, block, reason, self._codes(layer, block, dtype))
        storages = [self._storage(layer, block, group) for group in block.kind.linears]
        exact = self.compute is Compute.FP8_EXACT
        linears = [
            FusedLinear(storage, dtype, self._rule(block, index), exact, self.codes_written, self.written_once)
            for index, storage in enumerate(storages)
        ]
        before = NoNorm() if block.before is None else self.norm(layer.get_submodule(block.before))
        after = None if block.after is None else self.norm(layer.get_submodule(block.after))
        module: Any = layer.get_submodule(block.module)
        if isinstance(block.kind, PerLayerInput):
            assert after is not None
            activation = _activation(module, block.kind)
            return PerLayerInputBlock(linears[0], linears[1], activation, after, block.kind.reads)
        if isinstance(block.kind, GatedMLP):
            activation = _activation(module, block.kind)
            return GatedMLPBlock(linears[0], linears[1], activation, before, after, block.multiplier, block.gives)
        if isinstance(block.kind, GatedDelta):
            assert isinstance(before, Norm)
            inner = module.get_submodule(block.kind.norm)
            norm = Norm(inner.weight, _eps(inner), 0.0)
            return GatedDeltaBlock(linears, delta_net(module, block.kind), norm, before, after)
        assert isinstance(block.kind, Attention)
        kind = block.kind
        return AttentionBlock(
            linears[0],
            linears[1],
            self._heads(module, kind, linears[1]),
            module.scaling,
            kind.window(module),
            self.backend,
            before,
            after,
            None if kind.sinks is None else getattr(module, kind.sinks),
            block.multiplier,
            kind.gives or (),
            kind.reads or (),
        )

    def _heads(self, attention: Any, kind: Attention, out: FusedLinear) -> QKV:
        """Return the layout of heads; values may be keys, or keys and values another layer's."""
        dim: int = attention.head_dim
        query = out.bases[0].in_features // dim
        key_value = 0 if kind.reads is not None else query // attention.num_key_value_groups
        value = 0 if kind.reads is not None or kind.values_from_keys else None
        heads, all_heads, value_norm = Heads(query, key_value, dim, value=value), None, None
        of_keys = kind.query_norm if kind.reads is not None else kind.key_norm  # there are no keys then to be normed
        paths = [path for path in (kind.query_norm, of_keys) if path is not None]
        if len(paths) == 2:
            of_query, of_key = (self.norm(attention.get_submodule(path)) for path in paths)
            if kind.norms_span == "all heads":
                all_heads = of_query, of_key
            else:
                norms = of_query.weight, of_key.weight, of_query.eps, of_query.offset
                heads = Heads(query, key_value, dim, *norms, value=value)
            if kind.value_norm is not None:
                ones = torch.ones_like(of_key.weight, requires_grad=False)
                value_norm = Norm(ones, _eps(attention.get_submodule(kind.value_norm)), 0.0)
        scale = kind.query_scale(attention)
        return QKV(heads, all_heads, kind.rotates(attention), scale, value_norm, kind.gated)

    def norm(self, module: Any) -> Norm:
        """Read an RMSNorm's weight and numbers from its module."""
        return Norm(module.weight, _eps(module), self.family.norm_offset)

    def _reason(self, layer: Any, block: ResidualBlock, dtype: torch.dtype) -> str | None:
        """Say why a block can't be computed here as its modules are now, or None."""
        module: Any = layer.get_submodule(block.module)
        build = getattr(block.kind, "build", None)
        if build is not None:
            made = build(self, layer, block, dtype)
            return made if isinstance(made, str) else None
        if not self.is_own(module) and block.module:
            return f"{type(module).__name__} has another forward than transformers'"
        if any(getattr(module, name, 0) for name in DROPOUTS):  # set since, or left where a configuration's was unset
            return f"dropout in {type(module).__name__}"
        dropout = [] if block.dropout is None else [layer.get_submodule(block.dropout)]
        if any(getattr(each, "p", 1) for each in dropout):
            return f"dropout after {type(module).__name__}"
        if isinstance(block.kind, GatedMLP | PerLayerInput) and _activation(module, block.kind) is None:
            return f"activation {type(module.get_submodule(block.kind.activation)).__name__} has no kernel"
        norms = [layer.get_submodule(path) for path in block.norms]
        if isinstance(block.kind, Attention):
            dim = module.head_dim
            if next(layer.parameters()).is_cuda and (dim < 16 or dim & (dim - 1)):
                return f"head_dim {dim} is not a power of two"
            if block.kind.query_norm is not None and block.kind.norms_span == "head" and not block.kind.rotates(module):
                return "norms of heads without RoPE have no kernel"
        elif isinstance(block.kind, GatedDelta):
            if not self.is_own(module.get_submodule(block.kind.norm)):
                return f"{type(module.get_submodule(block.kind.norm)).__name__} has no kernel"
            if type(module.get_submodule(block.kind.convolution)) is not nn.Conv1d:
                return "the convolution was wrapped"
        elif not isinstance(block.kind, GatedMLP | PerLayerInput):
            return f"{type(block.kind).__name__} has no fused form"
        for norm in norms:
            if not self.is_own(norm):
                return f"{type(norm).__name__} has no kernel"
        for group in block.kind.linears:
            reason = unfused_reason([module.get_submodule(path) for path in group], dtype)
            if reason is not None:
                return reason
            if self._storage(layer, block, group).scattered:
                return "a weight is another linear's, too"
        parts = [module] if block.module else [layer.get_submodule(path) for path in _parts(block)]
        if watched(inner for part in (*parts, *norms, *dropout) for inner in part.modules()):
            return "modules inside the layers carry hooks, or a forward of their own"
        return None

    def _codes(self, layer: Any, block: ResidualBlock, dtype: torch.dtype) -> LentCodes | None:
        """Return the codes of a block's experts, made anew where these changed; None where they are in `dtype`."""
        if not isinstance(block.kind, Experts) or not self.compute.in_8_bits:
            return None
        outer = layer.get_submodule(block.path(block.kind.experts))
        storage = next(each for each in self.experts(layer) if each.outer is outer)
        wanted = computed_here(storage.module) and storage.reason(dtype, self.compute) is None
        return storage.codes(self.compute) if wanted else None

    def _storage(self, layer: Any, block: ResidualBlock, group: tuple[str, ...]) -> GroupStorage:
        """Return the storage of a group of linears, the same one as long as these are the same modules."""
        kept: dict[str, GroupStorage] = layer.__dict__.setdefault(STORAGE, {})
        name = ",".join(map(block.path, group))
        linears = [layer.get_submodule(block.path(path)) for path in group]
        if name not in kept or any(a is not b for a, b in zip(kept[name].linears, linears, strict=True)):
            kept[name] = GroupStorage(linears, kept.get(name))
        return kept[name]


def is_own(module: Any, family: FamilySpec) -> bool:
    """Tell whether a module's class has the forward of the family's source, which nobody wraps but transformers, torch
    and Pronghorn. A wrapper's `__module__` is often that of what it wraps (`functools.wraps`)."""
    forward, wrappers = type(module).forward, list[Any]()
    while hasattr(forward, "__wrapped__"):
        wrappers.append(forward)
        forward = forward.__wrapped__
    own = f"{forward.__module__}.".startswith(f"{family.source}.")
    return own and all(f"{written_in(each)}.".startswith((f"{family.source}.", *_WRAPPERS)) for each in wrappers)


def written_in(function: Any) -> str:
    """Return the module whose code a function is."""
    return str(getattr(function, "__globals__", {}).get("__name__", function.__module__))


def watched(modules: Iterable[Any]) -> bool:
    """Tell whether somebody hooked one of the modules or gave it a forward of its own, so that it has to be called."""
    return any(
        has_own_forward(module) or any(is_foreign(hook) for name in HOOKS for hook in getattr(module, name).values())
        for module in modules
    )


def is_foreign(hook: Any) -> bool:
    """Tell whether a hook is somebody's, and not transformers' recorder."""
    return not str(getattr(hook, "__module__", None)).startswith(_RECORDER)


def computed_here(experts: Any) -> bool:
    """Tell whether an experts module's products are Pronghorn's, and not transformers'."""
    return str(experts.config._experts_implementation).startswith(NAME_PREFIX)


def _stock_block(layer: Any, block: ResidualBlock, reason: str | None, codes: LentCodes | None) -> StockBlock:
    """Make the block that calls the layer's own modules."""
    kind = block.kind
    before, after = (
        None if path is None else layer.get_submodule(path) for path in (block.before, block.after or block.dropout)
    )
    if isinstance(kind, PerLayerInput):
        gate, projection, activation = (layer.get_submodule(block.path(path)) for path in _parts(block))
        return StockPerLayerInput(
            gate, before, after, False, reason, projection=projection, activation=activation, reads=kind.reads
        )
    if isinstance(kind, ExpertsBeside):
        experts, router, inner = (
            layer.get_submodule(block.path(path)) for path in (kind.experts, kind.router, kind.inner)
        )
        return ExpertsBesideBlock(
            experts, before, after, False, reason, codes=codes, router=router, inner=inner, beside=kind.beside
        )
    mixes = not isinstance(kind, GatedMLP | Experts)
    module = layer.get_submodule(block.module)
    return StockBlock(module, before, after, mixes, reason, block.multiplier, block.gives, codes)


def _parts(block: ResidualBlock) -> list[str]:
    """List the modules of a block that is spread over its layer: its linears and the activation."""
    activation = getattr(block.kind, "activation", None)
    return [path for group in block.kind.linears for path in group] + ([activation] if activation else [])


def _activation(mlp: nn.Module, kind: GatedMLP | PerLayerInput) -> Any:
    return ACTIVATIONS.get(type(mlp.get_submodule(kind.activation)).__name__)


def _eps(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
