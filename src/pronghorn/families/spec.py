"""The contract of a family's file: what a reader of its modelling file would look up, as frozen values.

A decoder layer is a tuple of residual blocks, x → x + m · after(f(before(x))). For each the spec says where its modules
lie below the layer (dotted paths) and what f is: `Attention`, `GatedMLP`, `Experts`, or another kind that a family's
file defines for itself (`BlockKind`). Paths name modules; numbers (sizes, epsilons, windows) are read from them at
attach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pronghorn.families.gguf_spec import Gguf
from pronghorn.kernels.glu import Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
"""The activations that kernels gate with, by the names of transformers' and torch's classes."""
HEAD = "lm_head"
"""The usual name of the language-model head."""


class BlockKind(Protocol):
    """What f of a residual block is.

    A kind that a family's file defines for itself may have a method `build(builder, layer, block, dtype)`, which makes
    the block (`layers.block.Block`) or says as text why it can't be computed here.
    """

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        """Groups of linears with the same input, as paths below the block's module, in the order of the forward."""


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
    window: Callable[[Any], int | None] = lambda attention: None
    """Reads the window (tokens) from the attention module."""
    sinks: str | None = None
    """The parameter [H] of scores that have no value (gpt-oss)."""
    rotates: Callable[[Any], bool] = lambda attention: True
    """Tells whether an attention module turns queries and keys by RoPE."""
    query_scale: Callable[[Any], tuple[float, int] | None] = lambda attention: None
    """Reads (β, tokens) of 1 + β log(1 + ⌊position / tokens⌋), by which queries are multiplied after RoPE (Llama 4)."""
    value_norm: str | None = None
    """RMSNorm without a weight, of each value head."""
    values_from_keys: bool = False
    """Values are what the linear of keys gives, under their own norm; `qkv` names q and k alone."""
    gives: tuple[str, str] | None = None
    """Names that k and v are given by, to later layers."""
    reads: tuple[str, str] | None = None
    """Names of the k and v that an earlier layer gave; `qkv` names q alone."""
    gated: bool = False
    """The first linear makes a query and a gate for each head, [H, 2, D]; σ(gate) multiplies attention's output."""

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        return self.qkv, (self.out,)


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464), which mixes tokens by a state of each head: a causal
    convolution of q, k and v, the gated delta rule, and a norm gated by z."""

    inputs: tuple[tuple[str, ...], ...] = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
    """The linears of q·k·v and z; and those of b and a, of which σ(b) is the rule's step and a its decay."""
    interleaved: bool = False
    """Both groups are one linear, whose rows lie by key heads: q, k, v, z of each; b, a of each (Qwen3-Next)."""
    out: str = "out_proj"
    convolution: str = "conv1d"
    norm: str = "norm"
    """The RMSNorm of a head that z gates."""

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        return *self.inputs, (self.out,)


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
    shared: GatedMLP | None = None
    """The experts that every token goes through, which the block's module calls; paths below that."""
    gated_shared: bool = False
    """A gate, σ of a linear of x, multiplies what the shared expert gives."""
    float32_router: bool = False
    """The router computes in float32, of copies of its input and its weight."""
    served: Literal["each", "together"] | None = None
    """How vLLM reads adapters of these experts: of each by itself, or of all together as PEFT saves them. None: not
    known."""

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        return () if self.shared is None else self.shared.linears


@dataclass(frozen=True)
class ExpertsBeside(Experts):
    """Experts beside a block that gave its result by name: x → x + after(that + inner(experts(before(x), router(x)))).

    The router is given x as it is, and returns (…, weights [T, K], experts [T, K]).
    """

    router: str = "router"
    inner: str = ""
    """The RMSNorm of what experts give."""
    beside: str = ""
    """Name of the other block's result."""
    chosen: Callable[[Any], int] = lambda router: router.top_k
    """Reads the number of a token's experts from the router."""


@dataclass(frozen=True)
class PerLayerInput:
    """projection(activation(gate(x)) ∘ p), p being what each token has for this layer."""

    gate: str
    projection: str
    activation: str = "act_fn"
    reads: str = "per-layer input"
    """Name of p [T, P]."""

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        return (self.gate,), (self.projection,)


@dataclass(frozen=True)
class ResidualBlock:
    """x → x + m · after(f(before(x))), f being a module of the layer."""

    module: str
    """Path of f below the layer; "" for the layer itself."""
    kind: BlockKind
    before: str | None = None
    """Path of the RMSNorm of what f is given, where the family has one."""
    after: str | None = None
    """Path of the RMSNorm of what f adds, where the family has one."""
    dropout: str | None = None
    """Path of the dropout of what f adds, where the layer has one and no norm after."""
    multiplier: float = 1.0
    """m, which the layer's module holds in some families (Granite)."""
    gives: str | None = None
    """Name that after(f(before(x))) is given by to a later block, instead of being added to x (of a `GatedMLP`)."""

    @property
    def norms(self) -> tuple[str, ...]:
        """List the paths of all RMSNorms with weights below the layer, those of queries and keys too."""
        kind = self.kind
        inner: tuple[str | None, ...] = ()
        if isinstance(kind, Attention):
            inner = kind.query_norm, kind.key_norm
        elif isinstance(kind, ExpertsBeside):
            inner = (kind.inner,)
        paths = (self.before, *(self.path(path) for path in inner if path is not None), self.after)
        return tuple(path for path in paths if path is not None)

    @property
    def linears(self) -> tuple[str, ...]:
        """List the paths of all linears below the layer, in the order of the forward."""
        return tuple(self.path(path) for group in self.kind.linears for path in group)

    def path(self, part: str) -> str:
        """Return the path below the layer of a part of the block's module."""
        return f"{self.module}.{part}" if self.module else part


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
    serves: Callable[[Any], bool] = lambda config: True
    """Tells whether a configuration has no layers but those that `blocks` describes; where it has, the model is
    generic."""
    experts: Experts = Experts()
    """What the layers' experts are, in families that have some."""
    embeddings: str = "embed_tokens"
    """The token embeddings' last name."""
    head: str = HEAD
    """The language-model head's last name."""
    norm_offset: float = 0.0
    """What an RMSNorm adds to its weight (1 in Gemma)."""
    float16: bool = True
    """Whether hidden states stay below float16's largest number, 65,504."""
    load_attention: str | None = "sdpa"
    """transformers' attention to load with; SDPA has no attention sinks. None lets transformers choose."""
    logit_scale: Callable[[Any], float] = lambda config: 1.0
    """Reads from the configuration what the head's logits are multiplied by."""
    halved_rotary: bool = False
    """RoPE's tables have one of their two equal halves (gpt-oss)."""
    partial_rotary: bool = False
    """The family's code can turn a part of each head by RoPE (`partial_rotary_factor`)."""
    bind: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]] | None = None
    """Reads the tensors that blocks take by name from what transformers calls a layer with: (arguments after the hidden
    states, keywords). None where blocks read nothing but the hidden states, and layers are called by keywords."""
    emit: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
    """Hands what blocks gave by name on to later layers: (named tensors, keywords)."""
    output_scale: str | None = None
    """The buffer [1] of a layer that what it gives is multiplied by."""
    beside_embeds: Callable[[Any, Any], dict[str, Any]] | None = None
    """Makes the keywords that a backbone needs beside `inputs_embeds`, of (backbone, input_ids), for those that look
    tokens up in other tables, too."""
    lora_targets: tuple[str, ...] | None = None
    """Linears that LoRA adapts unless told otherwise; None for every linear that the blocks name."""
    as_text_of: tuple[str, ...] = ()
    """Types of text_configs, in models with towers, that compute text as this family does: where there is nothing but
    text, their positions in three dimensions are its positions."""
    refused_options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields of the configuration and the values that are served, where others are not."""
    gguf: Gguf | None = None
    """How this family's models are written as GGUF files; None: they aren't."""
    generic: bool = False
    """Nothing is known of the family but its configuration: layers run as transformers' own, and a probe of the loaded
    model proves that documents don't mix (`families.generic`)."""

    def linear_names(self, layer: Any) -> tuple[str, ...]:
        """List the linears of one layer by their last names, in the order of the forward."""
        return tuple(path.rpartition(".")[2] for block in self.blocks(layer) for path in block.linears)

    def feed_forward(self, layer: Any) -> str | None:
        """Return the path of a layer's MLP or experts, or None where the layer has neither."""
        kinds = GatedMLP, Experts
        return next((block.module for block in self.blocks(layer) if isinstance(block.kind, kinds)), None)


def same_blocks(*blocks: ResidualBlock) -> Callable[[Any], tuple[ResidualBlock, ...]]:
    """Describe every layer of a family by the same blocks."""
    return lambda layer: blocks


_MLP = GatedMLP()


def llama_blocks(attention: BlockKind, feed_forward: BlockKind = _MLP) -> tuple[ResidualBlock, ResidualBlock]:
    """Describe a layer in the layout that Llama introduced and many families share: a norm before each part."""
    return (
        ResidualBlock("self_attn", attention, before="input_layernorm"),
        ResidualBlock("mlp", feed_forward, before="post_attention_layernorm"),
    )
