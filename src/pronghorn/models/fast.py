"""The fast path: transformers' own decoder layers, attention and norm modules, given a class that computes the same
with fewer and larger operations (models.fused, kernels). Parameters stay where they are.

A module takes its own class's way wherever the fast one can't serve a call: no packed batch, an adapter that is not
plain LoRA. What somebody hooked, or gave a forward of its own, is called: modules around it take their own way, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
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
from pronghorn.memory.checkpoint import WHOLE_LAYER, has_own_forward
from pronghorn.memory.plan import POLICY, Policy
from pronghorn.models import fused
from pronghorn.models.fused import AttentionParts, LayerParts, MLPParts, Norm
from pronghorn.models.merged import LinearGroup, state
from pronghorn.models.merged import refusal as linears_refusal

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
NORM_OFFSETS = {"LlamaRMSNorm": 0.0, "MistralRMSNorm": 0.0, "Qwen2RMSNorm": 0.0, "Qwen3RMSNorm": 0.0}
NORM_OFFSETS |= {"Qwen3MoeRMSNorm": 0.0, "MixtralRMSNorm": 0.0, "OlmoeRMSNorm": 0.0, "GptOssRMSNorm": 0.0}
NORM_OFFSETS |= {"Gemma3RMSNorm": 1.0}
"""The norm classes that the kernel computes, and what each adds to its weight."""
LAYERS = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")}
"""The layers that are computed as one function."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_RECORDER = "transformers.utils"
"""Where transformers' hooks for output_hidden_states and output_attentions are from: once asked for they stay, on every
layer and attention; packed attention has nothing for them."""

ATTENTION = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
MLP = (("gate_proj", "up_proj"), ("down_proj",))
"""The linears that are computed as one product."""


def refusal(model: Any, autocast: torch.dtype | None) -> str | None:
    """Why the fast path can't serve a causal LM as it is now (under autocast in that dtype), or None."""
    config, dtype = model.config, autocast or model.get_input_embeddings().weight.dtype
    if _activation(config) not in ACTIVATIONS and any(_is_whole(layer) for layer in model.base_model.layers):
        return f"activation {_activation(config)!r} has no kernel"
    if not _turns(model):
        return f"head_dim {head_dim(config)} is no power of two"
    for layer in model.base_model.layers:
        if _norms_all_heads(layer.self_attn):
            return "q_norm is over all heads at once"
        for norm in (*_layer_norms(layer), *_head_norms(layer.self_attn)):
            if type(norm).__name__ not in NORM_OFFSETS:
                return f"{type(norm).__name__} has no kernel"
        blocks = [(layer.self_attn, ATTENTION), *([(layer.mlp, MLP)] if _is_whole(layer) else [])]
        for module, groups in blocks:
            for names in groups:
                reason = linears_refusal([getattr(module, name) for name in names], dtype)
                if reason is not None:
                    return reason
        if watched(_inner(layer if _is_whole(layer) else layer.self_attn)):
            return "modules inside the layers carry hooks, or a forward of their own"
    return None


def enable(model: Any, backend: Backend) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Give the layers of a causal LM their fast classes; returns the modules with the classes that they had.

    Args:
        backend: of packed attention.
    """
    modules: list[Any] = list(model.base_model.modules())
    classes: dict[Any, Any] = {norm: _norm_class for norm in modules if type(norm).__name__ in NORM_OFFSETS}
    for layer in model.base_model.layers:
        if _turns(model) and not _norms_all_heads(layer.self_attn):
            classes[layer.self_attn] = functools.partial(_attention_class, backend=backend)
            if _is_whole(layer) and _activation(model.config) in ACTIVATIONS:
                classes[layer] = functools.partial(_layer_class, backend=backend)
    changed = [(module, type(module)) for module in classes]
    for module, fast_class in classes.items():
        module.__class__ = fast_class(type(module))
    return changed


def disable(changed: list[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Give the modules their own classes back."""
    for module, original in changed:
        module.__class__ = original
        module.__dict__.pop("_pronghorn_parts", None)


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


@functools.cache
def _norm_class(original: Any) -> type[nn.Module]:
    offset = NORM_OFFSETS[original.__name__]

    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x.contiguous(), self.weight, _eps(self), offset)

    return _subclass(original, forward)


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
            parts = None if position_embeddings is None else _attention_parts(self, hidden_states, backend)
            if parts is not None:
                cos, sin = _rows(position_embeddings, hidden_states, self.head_dim)
                x = hidden_states.flatten(0, 1).to(_compute_dtype(hidden_states))
                with _without_autocast(x):
                    return fused.attention(x, cos, sin, packed, parts).view_as(hidden_states), None
            kwargs["packed"] = packed
        return plain(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)

    return _subclass(original, forward)


@functools.cache
def _layer_class(original: Any, backend: Backend) -> type[nn.Module]:
    plain: Any = original.forward

    @functools.wraps(plain)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed: PackedBatch | None = kwargs.get("packed")
        turns = kwargs.get("position_embeddings")  # by position it goes transformers' way
        parts = None if packed is None or turns is None else _layer_parts(self, hidden_states, backend)
        if packed is None or parts is None:
            return plain(self, hidden_states, *args, **kwargs)
        cos, sin = _rows(turns, hidden_states, self.self_attn.head_dim)
        policy = self.__dict__.get(POLICY, Policy.KEEP)
        if policy in WHOLE_LAYER and not self.gradient_checkpointing:  # which is switched off
            policy = Policy.KEEP
        x, dtype = hidden_states.flatten(0, 1).contiguous(), _compute_dtype(hidden_states)
        with _without_autocast(hidden_states):
            return fused.layer(x, cos, sin, packed, parts, dtype, policy).view_as(hidden_states)

    return _subclass(original, forward)


def _is_foreign(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", None)).startswith(_RECORDER)


def _subclass(original: type[nn.Module], forward: Any) -> type[nn.Module]:
    """A subclass with the original's name: transformers and FSDP look classes up by it."""
    namespace = {"forward": forward, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), namespace)


def _attention_parts(module: Any, x: Tensor, backend: Backend) -> AttentionParts | None:
    """The module's parts, or None where this call isn't for the fast way."""
    sinks = [module.sinks] if hasattr(module, "sinks") else []
    make = functools.partial(_make_attention, module, backend)
    return _parts(module, [(module, ATTENTION)], _head_norms(module), sinks, x, make)


def _layer_parts(module: Any, x: Tensor, backend: Backend) -> LayerParts | None:
    """The whole layer's parts, or None where this call isn't for the fast way."""
    attention, mlp, norms = module.self_attn, module.mlp, _layer_norms(module)

    def make(qkv: LinearGroup, out: LinearGroup, gate_up: LinearGroup, down: LinearGroup) -> LayerParts:
        before, *after = ([_make_norm(norm) for norm in norms[i : i + 2]] for i in range(0, len(norms), 2))
        return LayerParts(
            _make_attention(attention, backend, qkv, out),
            MLPParts(gate_up, down, ACTIVATIONS[_activation(attention.config)]),
            (before[0], before[1]),
            (after[0][0], after[0][1]) if after else None,
        )

    return _parts(module, [(attention, ATTENTION), (mlp, MLP)], [*norms, *_head_norms(attention)], [], x, make)


def _make_attention(module: Any, backend: Backend, qkv: LinearGroup, out: LinearGroup) -> AttentionParts:
    config, norms = module.config, [_make_norm(norm) for norm in _head_norms(module)]
    heads = Heads(
        query=config.num_attention_heads,
        key_value=config.num_key_value_heads,
        dim=module.head_dim,
        query_norm=norms[0].weight if norms else None,
        key_norm=norms[1].weight if norms else None,
        eps=norms[0].eps if norms else 0.0,
        offset=norms[0].offset if norms else 0.0,
    )
    of_all = getattr(config, "sliding_window", None)  # where layers don't differ (Mistral)
    window = getattr(module, "sliding_window", of_all)
    return AttentionParts(qkv, out, heads, module.scaling, window, backend, getattr(module, "sinks", None))


def _layer_norms(layer: Any) -> list[Any]:
    """Those before attention and MLP, then those after, where the family has such."""
    gemma = hasattr(layer, "pre_feedforward_layernorm")
    names = ["input_layernorm", "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"]
    names += ["post_attention_layernorm", "post_feedforward_layernorm"] if gemma else []
    return [getattr(layer, name) for name in names]


def _head_norms(attention: Any) -> list[Any]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


def _make_norm(module: Any) -> Norm:
    return Norm(module.weight, _eps(module), NORM_OFFSETS[type(module).__name__])


@dataclass(frozen=True)
class _Kept:
    """What `_parts` keeps on a module."""

    made_of: list[Any]
    state: tuple[torch.dtype, list[Any]]
    parts: Any
    """None where the linears or norms can't be computed so."""
    inner: list[nn.Module]
    """The modules that a fused function doesn't call."""
    hooks: list[dict[Any, Any]]
    """Theirs: looked at in every forward, so without going through the modules."""

    @property
    def usable(self) -> Any:
        """The parts; None where a module inside has to be called."""
        suspect = any(self.hooks) or any("forward" in module.__dict__ for module in self.inner)
        return None if suspect and watched(self.inner) else self.parts


def _parts(
    module: Any,
    groups: list[tuple[Any, tuple[tuple[str, ...], ...]]],
    norms: list[Any],
    more: list[Tensor],
    x: Tensor,
    make: Callable[..., Any],
) -> Any:
    """The parts kept on the module; made again where its linears, norms, these' weights or `more` are others (PEFT put
    something around them) or in another state."""
    found = [[getattr(owner, name) for name in names] for owner, sets in groups for names in sets]
    linears = [linear for group in found for linear in group]
    now, made_of = (_compute_dtype(x), state(linears)), [*linears, *norms, *(norm.weight for norm in norms), *more]
    kept: _Kept | None = module.__dict__.get("_pronghorn_parts")
    if kept is None or kept.state != now or any(a is not b for a, b in zip(kept.made_of, made_of, strict=True)):
        refused = any(type(norm).__name__ not in NORM_OFFSETS for norm in norms)
        refused = refused or any(linears_refusal(group, now[0]) for group in found)
        parts, inner = None if refused else make(*(LinearGroup(group) for group in found)), _inner(module)
        kept = _Kept(made_of, now, parts, inner, [getattr(each, name) for each in inner for name in _HOOKS])
        module.__dict__["_pronghorn_parts"] = kept
    return kept.usable


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
    return type(layer).__name__ in LAYERS


def _inner(module: nn.Module) -> list[nn.Module]:
    return list(module.modules())[1:]


def _norms_all_heads(attention: Any) -> bool:
    """OLMoE's qk-norm, which the RoPE kernel hasn't."""
    norm = getattr(attention, "q_norm", None)
    return norm is not None and norm.weight.numel() != attention.head_dim


def _eps(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act
