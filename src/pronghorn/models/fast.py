"""The fast path: transformers' own decoder layers, attention and norm modules, given a class that computes the same
with fewer and larger operations (models.fused, kernels). Parameters stay where they are.

A module takes its own class's way wherever the fast one can't serve a call: no packed batch, an adapter that is not
plain LoRA. What somebody hooked, or gave a forward of its own, is called: modules around it take their own way, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.attention.backends import Backend
from pronghorn.data.batch import PackedBatch
from pronghorn.kernels.glu import Activation
from pronghorn.kernels.rms_norm import rms_norm
from pronghorn.kernels.rope import Heads
from pronghorn.memory.checkpoint import OUTPUT_NOT_WANTED, WHOLE_LAYER, has_own_forward
from pronghorn.memory.plan import POLICY, Policy
from pronghorn.models import fused, merged
from pronghorn.models.families import ACTIVATIONS
from pronghorn.models.fused import AttentionParts, LayerParts, MLPParts, Norm
from pronghorn.models.linears import base_of, state
from pronghorn.models.linears import refusal as linears_refusal
from pronghorn.models.merged import LinearGroup
from pronghorn.models.subclass import moving, subclass

NORM_OFFSETS = {"LlamaRMSNorm": 0.0, "MistralRMSNorm": 0.0, "Qwen2RMSNorm": 0.0, "Qwen3RMSNorm": 0.0}
NORM_OFFSETS |= {"Qwen3MoeRMSNorm": 0.0, "MixtralRMSNorm": 0.0, "OlmoeRMSNorm": 0.0, "GptOssRMSNorm": 0.0}
NORM_OFFSETS |= {"Gemma3RMSNorm": 1.0}
"""The norm classes that the kernel computes, and what each adds to its weight."""
LAYERS = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")}
"""The layers that are computed as one function."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODELS = "transformers.models."
_RECORDER = "transformers.utils"
"""Where transformers' hooks for output_hidden_states and output_attentions are from: once asked for they stay, on every
layer and attention; packed attention has nothing for them."""

_OF_CONFIG = ("MistralAttention", "MixtralAttention")
"""The attention classes that look for a window in the configuration; the others have `sliding_window`, or none."""

ATTENTION = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
MLP = (("gate_proj", "up_proj"), ("down_proj",))
"""The linears that are computed as one product."""


def refusal(model: Any, autocast: torch.dtype | None) -> str | None:
    """Why the fast path can't serve a causal LM as it is now (under autocast in that dtype), or None."""
    dtype = autocast or model.get_input_embeddings().weight.dtype
    if not _turns(model):
        return f"head_dim {head_dim(model.config)} is no power of two"
    for layer in model.base_model.layers:
        module = layer if _is_whole(layer) else layer.self_attn
        reason = _refusal(module, dtype)
        if reason is not None:
            return reason
        if watched(_inner(module)):
            return "modules inside the layers carry hooks, or a forward of their own"
    return None


def _refusal(module: Any, dtype: torch.dtype) -> str | None:
    """Why a layer, or an attention, as its modules are now, can't be computed as one function, or None."""
    for part, kind in _blocks(module):
        if not _is_own(part, kind):
            return f"{type(part).__name__} has another forward than transformers'"
    attention, *mlp = (part for part, _ in _blocks(module))
    if mlp and _activation(mlp[0]) is None:
        return f"activation {type(mlp[0].act_fn).__name__} has no kernel"
    if _norms_all_heads(attention):
        return "q_norm is over all heads at once"
    for norm in _norms(module):
        if not _is_known_norm(norm):
            return f"{type(norm).__name__} has no kernel"
    reasons = (linears_refusal(group, dtype) for group in _linears(module))
    return next((reason for reason in reasons if reason is not None), None)


def enable(model: Any, backend: Backend) -> None:
    """Give the layers of a causal LM their fast classes.

    Args:
        backend: of packed attention.
    """
    turns = _turns(model)
    for module in model.base_model.modules():
        own: Any = type(module)
        if _is_known_norm(module):
            module.__class__ = _norm_class(own)
        elif turns and _is_whole(module):
            module.__class__ = _layer_class(own, backend)
        elif turns and _is_own(module, "Attention") and not _norms_all_heads(module):
            module.__class__ = _attention_class(own, backend)


def settle(model: Any, backend: Backend) -> None:
    """Put together what layers multiply with and keep for every forward (`merged.settle`). Weights that are trained
    stay where they are: under autocast every forward copies them, and saving copies what lies together."""
    x = model.get_input_embeddings().weight
    for layer in model.base_model.layers if _turns(model) and not x.is_meta else ():
        parts = _parts(layer if _is_whole(layer) else layer.self_attn, x, backend)
        if parts is not None:
            frozen = [group for group in parts.groups if not base_of(group.linears[0]).weight.requires_grad]
            merged.settle(frozen, _compute_dtype(x))


def is_fused(module: nn.Module) -> bool:
    """Whether a decoder layer or an attention computes packed batches as one function, without calling its modules."""
    kept = module.__dict__.get("_pronghorn_parts")
    return kept is not None and kept.usable is not None


def watched(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody hooked one of the modules or gave it a forward of its own, so that it has to be called."""
    return any(
        has_own_forward(module) or any(_is_foreign(hook) for name in _HOOKS for hook in getattr(module, name).values())
        for module in modules
    )


def output_is_seen(backbone: Any) -> bool:
    """Whether somebody may look at what the last layer or the last norm gives, so that all rows of it are wanted."""
    modules = backbone, backbone.layers[-1], backbone.norm
    names = "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"
    hooks = [hook for module in modules for name in names for hook in getattr(module, name).values()]
    hooks += backbone.norm._forward_pre_hooks.values()
    return any(map(has_own_forward, modules)) or any(_is_foreign(hook) and not _is_own_hook(hook) for hook in hooks)


@functools.cache
def _norm_class(original: Any) -> type[nn.Module]:
    offset = NORM_OFFSETS[original.__name__]

    @functools.wraps(original.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x.contiguous(), self.weight, _eps(self), offset)

    return subclass(original, forward=forward)


@functools.cache
def _attention_class(original: Any, backend: Backend) -> type[nn.Module]:
    plain: Any = original.forward

    @functools.wraps(plain)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed: PackedBatch | None = None,
        **kwargs: Any,
    ) -> Any:
        if packed is not None:
            parts = None if position_embeddings is None else _parts(self, hidden_states, backend)
            if parts is not None:
                cos, sin = _rows(position_embeddings, hidden_states, self.head_dim)
                x = hidden_states.flatten(0, 1).to(_compute_dtype(hidden_states))
                with _without_autocast(x):
                    return fused.attention(x, cos, sin, packed, parts).view_as(hidden_states), None
            kwargs["packed"] = packed
        return plain(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)

    return subclass(original, forward=forward, _apply=moving(original, _drop_parts))


@functools.cache
def _layer_class(original: Any, backend: Backend) -> type[nn.Module]:
    plain: Any = original.forward

    @functools.wraps(plain)
    def forward(self: Any, hidden_states: Tensor, *args: Any, output_wanted: bool = True, **kwargs: Any) -> Any:
        packed: PackedBatch | None = kwargs.get("packed")
        turns = kwargs.get("position_embeddings")  # by position it goes transformers' way
        parts = None if packed is None or turns is None else _parts(self, hidden_states, backend)
        if packed is None or parts is None:
            return plain(self, hidden_states, *args, **kwargs)
        cos, sin = _rows(turns, hidden_states, self.self_attn.head_dim)
        policy = self.__dict__.get(POLICY, Policy.KEEP)
        if policy in WHOLE_LAYER and not self.gradient_checkpointing:  # which is switched off
            policy = Policy.KEEP
        x, dtype = hidden_states.flatten(0, 1).contiguous(), _compute_dtype(hidden_states)
        rows = packed.loss_rows if packed.narrowed_in is self else None
        # a forward of its own calls this one, and may compute with what it gives
        wanted = output_wanted or has_own_forward(self) or not all(map(_is_own_hook, self._forward_hooks.values()))
        with _without_autocast(hidden_states):
            y = fused.layer(x, cos, sin, packed, parts, dtype, policy, rows, wanted)
        return y.view_as(hidden_states) if rows is None else y[None]

    return subclass(original, forward=forward, _apply=moving(original, _drop_parts), **{OUTPUT_NOT_WANTED: True})


def _drop_parts(module: Any) -> None:
    """They hold the weights where they lay."""
    module.__dict__.pop("_pronghorn_parts", None)


def _is_foreign(hook: Any) -> bool:
    return not _is_from(hook, _RECORDER)


def _is_own_hook(hook: Any) -> bool:
    """Profile's: it takes the time and doesn't look at what a module gives."""
    return _is_from(hook, "pronghorn.")


def _is_from(hook: Any, package: str) -> bool:
    return str(getattr(hook, "__module__", None)).startswith(package)


def _make(module: Any, backend: Backend) -> LayerParts | AttentionParts:
    """What a layer, or an attention, is computed from."""
    groups = [LinearGroup(linears) for linears in _linears(module)]
    attention = _blocks(module)[0][0]
    config, norms = attention.config, [_make_norm(norm) for norm in _norms(module)]
    of_layer, of_heads = (norms[:-2], norms[-2:]) if hasattr(attention, "q_norm") else (norms, [])
    heads = Heads(
        query=config.num_attention_heads,
        key_value=config.num_key_value_heads,
        dim=attention.head_dim,
        query_norm=of_heads[0].weight if of_heads else None,
        key_norm=of_heads[1].weight if of_heads else None,
        eps=of_heads[0].eps if of_heads else 0.0,
        offset=of_heads[0].offset if of_heads else 0.0,
    )
    sinks, window = getattr(attention, "sinks", None), _window(attention)
    parts = AttentionParts(groups[0], groups[1], heads, attention.scaling, window, backend, sinks)
    if module is attention:
        return parts
    activation = _activation(module.mlp)
    assert activation is not None
    before, after = (of_layer[0], of_layer[1]), (of_layer[2], of_layer[3]) if of_layer[2:] else None
    return LayerParts(parts, MLPParts(groups[2], groups[3], activation), before, after)


def _blocks(module: Any) -> list[tuple[Any, str]]:
    """A layer's attention and MLP, or an attention alone, each with its kind."""
    layer = "self_attn" in module._modules
    return [(module.self_attn, "Attention"), (module.mlp, "MLP")] if layer else [(module, "Attention")]


def _linears(module: Any) -> list[list[Any]]:
    """Of a layer, or an attention: those that are computed as one product together."""
    groups = {"Attention": ATTENTION, "MLP": MLP}
    return [[part._modules[name] for name in names] for part, kind in _blocks(module) for names in groups[kind]]


def _norms(module: Any) -> list[Any]:
    """Those before attention and MLP, then those after, where the family has such, then q's and k's."""
    attention, names = module, []
    if "self_attn" in module._modules:
        attention, gemma = module.self_attn, "pre_feedforward_layernorm" in module._modules
        names = ["input_layernorm", "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"]
        names += ["post_attention_layernorm", "post_feedforward_layernorm"] if gemma else []
    heads = [attention.q_norm, attention.k_norm] if "q_norm" in attention._modules else []
    return [*(module._modules[name] for name in names), *heads]


def _make_norm(module: Any) -> Norm:
    return Norm(module.weight, _eps(module), NORM_OFFSETS[type(module).__name__])


@dataclass(frozen=True)
class _Kept:
    """What `_parts` keeps on a module."""

    state: list[Any]
    parts: Any
    """None where they can't be computed as one function."""
    inner: list[nn.Module]
    """The modules that a fused function doesn't call."""
    hooks: list[dict[Any, Any]]
    """Theirs: looked at in every forward, so without going through the modules."""

    @property
    def usable(self) -> Any:
        """The parts; None where a module inside has to be called."""
        suspect = any(self.hooks) or any("forward" in module.__dict__ for module in self.inner)
        return None if suspect and watched(self.inner) else self.parts


def _parts(module: Any, x: Tensor, backend: Backend) -> Any:
    """The parts kept on a layer, or an attention, made again where what they depend on is another; None where this call
    isn't for the fast way."""
    if not all(_is_own(part, kind) for part, kind in _blocks(module)):
        module.__dict__.pop("_pronghorn_parts", None)  # which `is_fused` looks for
        return None
    now = [_compute_dtype(x), *_state(module)]
    kept: _Kept | None = module.__dict__.get("_pronghorn_parts")
    if kept is None or kept.state != now:
        parts, inner = None if _refusal(module, now[0]) else _make(module, backend), _inner(module)
        kept = _Kept(now, parts, inner, [getattr(each, name) for each in inner for name in _HOOKS])
        module.__dict__["_pronghorn_parts"] = kept
    return kept.usable


def parts_of(model: nn.Module) -> list[Any]:
    """All that layers and attentions keep for their next forwards."""
    return [module.__dict__["_pronghorn_parts"] for module in model.modules() if "_pronghorn_parts" in module.__dict__]


def state_of(layer: Any) -> list[Any]:
    """What a decoder layer's fused path depends on: compare it to know whether it goes the same way again."""
    module = layer if _is_whole(layer) else layer.self_attn
    own = all(_is_own(part, kind) for part, kind in _blocks(module))
    return _state(module) if own else [module, *_blocks(module)]


def _state(module: Any) -> list[Any]:
    """All that `_refusal` and `_make` depend on besides the products' dtype, and may change from forward to forward."""
    attention, *mlp = (part for part, _ in _blocks(module))
    sinks = attention._parameters.get("sinks")
    found = [attention.scaling, _window(attention), id(sinks), *(part.act_fn for part in mlp)]
    for norm in _norms(module):
        eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
        found += norm, id(getattr(norm, "weight", None)), eps
    for linears in _linears(module):
        found += state(linears)
    return found


def _rows(position_embeddings: Any, hidden_states: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D], a row a token."""
    tokens = hidden_states.shape[0] * hidden_states.shape[1]
    cos, sin = (x.reshape(-1, x.shape[-1]).expand(tokens, -1) for x in position_embeddings)
    if cos.shape[1] < head_dim:  # gpt-oss gives one of the equal halves
        return torch.cat([cos, cos], 1), torch.cat([sin, sin], 1)
    return cos, sin


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What products of x are computed in: autocast's dtype where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """The fused functions choose every dtype themselves."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def head_dim(config: Any) -> int:
    """D, which some configurations leave to be computed."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _turns(model: Any) -> bool:
    """Whether the RoPE kernel serves these heads; in plain torch all are."""
    dim = head_dim(model.config)
    return (dim >= 16 and dim & (dim - 1) == 0) or next(model.parameters()).device.type == "cpu"


def _is_whole(layer: Any) -> bool:
    """Whether the layer is computed as one function, its MLP with it."""
    return type(layer).__name__ in LAYERS and _is_own(layer, "DecoderLayer")


def _is_own(module: Any, kind: str) -> bool:
    """Whether a module of that kind computes what transformers wrote: it isn't wrapped or replaced, nor its forward."""
    own: Any = type(module)
    return own.__name__.endswith(kind) and own.forward.__module__.startswith(_MODELS)


def _is_known_norm(norm: Any) -> bool:
    return type(norm).__name__ in NORM_OFFSETS and _is_own(norm, "RMSNorm")


def _inner(module: nn.Module) -> list[nn.Module]:
    return list(module.modules())[1:]


def _norms_all_heads(attention: Any) -> bool:
    """OLMoE's qk-norm, which the RoPE kernel hasn't."""
    norm = getattr(attention, "q_norm", None)
    return norm is not None and norm.weight.numel() != attention.head_dim


def _window(attention: Any) -> int | None:
    of_config = type(attention).__name__.endswith(_OF_CONFIG)
    return getattr(attention.config if of_config else attention, "sliding_window", None)


def _eps(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _activation(mlp: Any) -> Activation | None:
    return ACTIVATIONS.get(type(mlp.act_fn).__name__)
