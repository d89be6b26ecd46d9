"""Describe one decoder layer by its sizes: what its family says of it, filled in from the layer's module.

Sizes are read from modules, never from a configuration, so a layer on the meta device, in 4 bits or with PEFT's
adapters reads the same. Equal layers have equal specs: a model is a few kinds of layers, each with a count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import nn

from pronghorn.families.spec import (
    Attention,
    Experts,
    ExpertsBeside,
    FamilySpec,
    GatedDelta,
    GatedMLP,
    PerLayerInput,
    ResidualBlock,
)


@dataclass(frozen=True)
class Linear:
    """A linear of a layer, by its path below the layer."""

    path: str
    out: int
    inputs: int

    @property
    def weights(self) -> int:
        return self.out * self.inputs


@dataclass(frozen=True)
class BlockSpec:
    """A residual block: its linears in groups that read the same input."""

    groups: tuple[tuple[Linear, ...], ...]


@dataclass(frozen=True)
class AttentionSpec(BlockSpec):
    """Softmax attention with grouped heads."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    head_norms: Literal["head", "all heads"] | None
    """What one RMS of the query's and key's norm is taken over; None without such norms."""
    sinks: bool
    gives_kv: bool = False
    """Later layers read its keys and values."""
    reads_kv: bool = False
    """Its keys and values are an earlier layer's."""
    gated: bool = False
    """Each head's output is multiplied by a gate as wide as it."""

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.kv_heads * self.head_dim

    @property
    def projected(self) -> int:
        """Width of what the linears of queries, keys and values give."""
        return sum(linear.out for linear in self.groups[0])


@dataclass(frozen=True)
class GatedDeltaSpec(BlockSpec):
    """A gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Of one head, as `value_dim`."""
    value_dim: int

    @property
    def convolved(self) -> int:
        """Width of q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class GatedMLPSpec(BlockSpec):
    """down(activation(gate(x)) ∘ up(x))."""

    width: int


@dataclass(frozen=True)
class ExpertsSpec(BlockSpec):
    """A router and its experts, each a gated MLP."""

    count: int
    chosen: int
    """Experts of a token."""
    width: int
    """Of one expert."""
    shared: int = 0
    """Of the expert that every token goes through."""
    gated_shared: bool = False
    """A gate multiplies what it gives."""
    beside: bool = False
    """A dense MLP is beside them."""
    float32_router: bool = False
    """The router computes in float32."""


@dataclass(frozen=True)
class PerLayerInputSpec(BlockSpec):
    """projection(activation(gate(x)) ∘ p)."""

    width: int


@dataclass(frozen=True)
class LayerSpec:
    """The kind of a decoder layer."""

    hidden: int
    norms: int
    """RMSNorms over the hidden size: 2, or 4 in Gemma."""
    norms_before: int
    """Those before blocks: 2, or none in Olmo."""
    blocks: tuple[BlockSpec, ...]
    parameters: int
    """All of the layer's, adapters and trained copies aside."""

    @property
    def norms_after(self) -> int:
        """RMSNorms over the hidden size after blocks."""
        return self.norms - self.norms_before

    @cached_property
    def groups(self) -> tuple[tuple[Linear, ...], ...]:
        """Groups of linears with the same input, in the order of the forward."""
        return tuple(group for block in self.blocks for group in block.groups)

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """All linears, in the order of the forward."""
        return tuple(linear for group in self.groups for linear in group)

    @cached_property
    def linear_weights(self) -> int:
        """Elements of the linears' weights."""
        return sum(linear.weights for linear in self.linears)

    @property
    def expert_weights(self) -> int:
        """Elements of the experts' weights, biases aside."""
        return 3 * self.hidden * self.experts.width * self.experts.count if self.experts else 0

    @property
    def attention(self) -> AttentionSpec | None:
        return next((block for block in self.blocks if isinstance(block, AttentionSpec)), None)

    @property
    def delta(self) -> GatedDeltaSpec | None:
        return next((block for block in self.blocks if isinstance(block, GatedDeltaSpec)), None)

    @property
    def feed_forward(self) -> GatedMLPSpec | ExpertsSpec:
        """The MLP, or the experts where there are some."""
        return self.experts or next(block for block in self.blocks if isinstance(block, GatedMLPSpec))

    @property
    def per_layer_input(self) -> PerLayerInputSpec | None:
        return next((block for block in self.blocks if isinstance(block, PerLayerInputSpec)), None)

    @property
    def mlp_width(self) -> int:
        """Width of the dense MLP, 0 without one."""
        return sum(block.width for block in self.blocks if isinstance(block, GatedMLPSpec))

    @property
    def experts(self) -> ExpertsSpec | None:
        return next((block for block in self.blocks if isinstance(block, ExpertsSpec)), None)


def layer_spec(family: FamilySpec, layer: Any) -> LayerSpec:
    """Read the kind of a decoder layer from its modules."""
    blocks = family.blocks(layer)
    hidden = layer.get_submodule(blocks[0].before or blocks[0].after).weight.shape[0]
    specs = tuple(_block(layer, block, hidden) for block in blocks)
    weights = {f"{path}{base}.weight" for block in blocks for path in block.linears for base in ("", ".base_layer")}
    others = (p.numel() for name, p in layer.named_parameters() if name not in weights and not _added(name))
    by_size = sum(linear.weights for spec in specs for group in spec.groups for linear in group)
    before = sum(block.before is not None for block in blocks)
    after = sum(block.after is not None for block in blocks)
    return LayerSpec(hidden, before + after, before, specs, by_size + sum(others))


def linear_modules(family: FamilySpec, layer: nn.Module) -> Mapping[str, Any]:
    """Return a layer's linears, under PEFT's wrappers or not, by their paths below the layer."""
    return {path: layer.get_submodule(path) for block in family.blocks(layer) for path in block.linears}


def _added(parameter: str) -> bool:
    """Tell whether PEFT added the parameter of this name: an adapter, or a copy that is trained whole."""
    return "lora_" in parameter or "modules_to_save." in parameter


def _block(layer: Any, block: ResidualBlock, hidden: int) -> BlockSpec:
    module, kind = layer.get_submodule(block.module), block.kind
    groups = tuple(
        tuple(
            Linear(path, *(getattr(layer.get_submodule(path), size) for size in ("out_features", "in_features")))
            for path in map(block.path, group)
        )
        for group in kind.linears
    )
    if isinstance(kind, Attention):
        heads = groups[-1][0].inputs // module.head_dim
        norms = None if kind.query_norm is None else kind.norms_span
        sinks, window = kind.sinks is not None, kind.window(module)
        passed = kind.gives is not None, kind.reads is not None
        kv_heads = heads // module.num_key_value_groups
        return AttentionSpec(groups, heads, kv_heads, module.head_dim, window, norms, sinks, *passed, kind.gated)
    if isinstance(kind, GatedDelta):
        sizes = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
        return GatedDeltaSpec(groups, *sizes)
    if isinstance(kind, GatedMLP):
        return GatedMLPSpec(groups, groups[-1][0].inputs)
    if isinstance(kind, Experts):
        inner = module.get_submodule(kind.experts)
        while not hasattr(inner, "num_experts") or hasattr(inner, "base_layer"):  # PEFT wraps a module once a parameter
            inner = inner.base_layer
        down = getattr(inner, kind.down)
        beside = isinstance(kind, ExpertsBeside)
        if isinstance(kind, ExpertsBeside):
            chosen = kind.chosen(module.get_submodule(kind.router))
        else:
            chosen = next(part.top_k for part in module.modules() if hasattr(part, "top_k"))
        shared = groups[-1][0].inputs if groups else 0
        width = down.numel() // len(down) // hidden
        named = kind.gated_shared, beside, kind.float32_router
        return ExpertsSpec(groups, len(down), chosen, width, shared, *named)
    if isinstance(kind, PerLayerInput):
        return PerLayerInputSpec(groups, groups[-1][0].inputs)
    return BlockSpec(groups)
