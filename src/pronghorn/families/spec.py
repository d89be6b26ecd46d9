"""The contract of a family's file: what a reader of its modelling file would look up, as frozen values.

A decoder layer is a tuple of residual blocks, x → x + after(f(before(x))). For each the spec says where its modules lie
below the layer (dotted paths) and what f is: `Attention`, `GatedMLP`, `Experts`, or another kind that a family's file
defines for itself (`BlockKind`). Paths name modules; numbers (sizes, epsilons, windows) are read from them at attach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pronghorn.kernels.glu import Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
"""The activations that kernels gate with, by the names of transformers' and torch's classes."""


class BlockKind(Protocol):
    """What f of a residual block is.

    A kind that a family's file defines for itself may have a method `build(builder, layer, block, dtype)`, which makes
    the block (`layers.block.Block`) or says as text why it can't be computed here.
    """

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        """Groups of linears with the same input, as paths below the block's module, in the order of the forward."""


def _no_window(attention: Any) -> int | None:
    return None


def window_of_module(attention: Any) -> int | None:
    """Return the window that an attention module holds itself, or None."""
    return getattr(attention, "sliding_window", None)


def window_of_config(attention: Any) -> int | None:
    """Return the window that an attention module looks up in its configuration, or None."""
    return getattr(attention.config, "sliding_window", None)


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped heads and RoPE: where its parts lie below its module."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The linears of queries, keys and values, or the one that makes all three in this order."""
    out: str = "o_proj"
    query_norm: str | None = None
    key_norm: str | None = None
    norms_span: Literal["head", "all heads"] = "head"
    """What one RMS of the query's and key's norm is taken over."""
    window: Callable[[Any], int | None] = _no_window
    """Reads the window (tokens) from the attention module."""
    sinks: str | None = None
    """The parameter [H] of scores that have no value (gpt-oss)."""

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        return self.qkv, (self.out,)


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) ∘ up(x))."""

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The linears of gate and up, or the one that makes both in this order."""
    down: str = "down_proj"
    activation: str = "act_fn"
    """The module that gate goes through."""

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        return self.gate_up, (self.down,)


@dataclass(frozen=True)
class Experts:
    """A router and its experts, which transformers calls through its experts' interface."""

    experts: str = "experts"
    """The module that holds all experts' weights as 3-dimensional parameters."""
    gate_up: str = "gate_up_proj"
    """The parameter of all experts' gates and ups, [E, 2 I, H] or transposed."""
    down: str = "down_proj"
    """The parameter of all experts' down-projections, [E, H, I] or transposed."""
    activation: str = "act_fn"
    """The module that gates go through."""
    clamped_gate: str | None = None
    """The qualified name of the gating function where it is gpt-oss's: gate and up in turns, both clamped."""

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        return ()


@dataclass(frozen=True)
class ResidualBlock:
    """x → x + after(f(before(x))), f being a module of the layer."""

    module: str
    """Path of f below the layer."""
    kind: BlockKind
    before: str
    """Path of the RMSNorm of what f is given."""
    after: str | None = None
    """Path of the RMSNorm of what f adds, where the family has one."""

    @property
    def norms(self) -> tuple[str, ...]:
        """List the paths of all RMSNorms below the layer, those of queries and keys too."""
        kind = self.kind
        inner = (kind.query_norm, kind.key_norm) if isinstance(kind, Attention) else ()
        paths = (self.before, *(f"{self.module}.{path}" for path in inner if path is not None), self.after)
        return tuple(path for path in paths if path is not None)


@dataclass(frozen=True)
class FamilySpec:
    """What Pronghorn knows of a family of decoder models."""

    model_type: str
    """`config.model_type` of transformers."""
    members: str
    """Models of the family, for people."""
    blocks: Callable[[Any], tuple[ResidualBlock, ...]]
    """Describes one decoder layer, given its module: layers of a model may differ."""
    source: str
    """Module that defines the family's classes, e.g. `transformers.models.llama`. A module whose forward is from
    elsewhere was changed by somebody, and is called instead of computed."""
    experts: Experts = Experts()
    """What the layers' experts are, in families that have some."""
    embeddings: str = "embed_tokens"
    """The token embeddings' last name."""
    head: str = "lm_head"
    """The language-model head's last name."""
    norm_offset: float = 0.0
    """What an RMSNorm adds to its weight (1 in Gemma)."""
    load_attention: str | None = "sdpa"
    """transformers' attention to load with; SDPA has no attention sinks. None lets transformers choose."""
    halved_rotary: bool = False
    """RoPE's tables have one of their two equal halves (gpt-oss)."""
    bind: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]] | None = None
    """Reads the tensors that blocks take by name from what transformers calls a layer with: (arguments after the hidden
    states, keywords). None where blocks read nothing but the hidden states, and layers are called by keywords."""
    emit: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
    """Hands what blocks gave by name on to later layers: (named tensors, keywords)."""
    lora_targets: tuple[str, ...] | None = None
    """Linears that LoRA adapts unless told otherwise; None for every linear that the blocks name."""
    refused_options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields of the configuration and the values that are served, where others are not."""
    generic: bool = False
    """Nothing is known of the family but its configuration: layers run as transformers' own, and a probe of the loaded
    model proves that documents don't mix (`families.generic`)."""

    def linear_names(self, layer: Any) -> tuple[str, ...]:
        """List the linears of one layer by their last names, in the order of the forward."""
        groups = (group for block in self.blocks(layer) for group in block.kind.linears)
        return tuple(path.rpartition(".")[2] for group in groups for path in group)

    def feed_forward(self, layer: Any) -> str | None:
        """Return the path of a layer's MLP or experts, or None where the layer has neither."""
        kinds = GatedMLP, Experts
        return next((block.module for block in self.blocks(layer) if isinstance(block.kind, kinds)), None)


def same_blocks(*blocks: ResidualBlock) -> Callable[[Any], tuple[ResidualBlock, ...]]:
    """Describe every layer of a family by the same blocks."""
    return lambda layer: blocks


LLAMA_BLOCKS = (
    ResidualBlock("self_attn", Attention(), before="input_layernorm"),
    ResidualBlock("mlp", GatedMLP(), before="post_attention_layernorm"),
)
"""The layout that Llama introduced and many families share."""
