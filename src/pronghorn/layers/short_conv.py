"""Short convolutions that transformers calls (LFM2's layers), kept to documents.

transformers' function takes documents' bounds where the package causal_conv1d is installed, and refuses them where it
falls back to its own. There an attached model's modules get a class that calls `convolve` in its place; for batches
without bounds that calls transformers'.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pronghorn.kernels.causal_conv import convolve_reference
from pronghorn.kernels.once import refuse_second_derivatives
from pronghorn.layers.subclass import subclass, with_globals
from pronghorn.memory.recompute import has_own_forward

_FUNCTION = "causal_conv1d_fn"
_ACTIVATIONS = (None, "silu", "swish")
"""The activations that `convolve` knows."""


def isolate_convolutions(model: nn.Module) -> None:
    """Give modules whose convolution would refuse documents' bounds a class that takes them."""
    for module in model.modules():
        own: Any = type(module)
        called = _falls_back(own)
        if called is not None and not has_own_forward(module) and not hasattr(module, "_hf_hook"):
            module.__class__ = _isolated_class(own, called)


def _falls_back(own: Any) -> Callable[..., Any] | None:
    """Return transformers' function where a class calls it, and it is transformers' own in the place of a package's.

    None wherever that can't be told.
    """
    method = inspect.unwrap(own.forward) if own.__module__.startswith("transformers.models.") else None
    if not isinstance(method, types.FunctionType) or _FUNCTION not in method.__code__.co_names:
        return None
    called = method.__globals__.get(_FUNCTION)
    if not inspect.isfunction(called):
        return None
    return called if inspect.getclosurevars(called).nonlocals.get("is_new_implementation") is False else None


@functools.cache
def _isolated_class(original: Any, called: Callable[..., Any]) -> type[nn.Module]:
    method: Any = inspect.unwrap(original.forward)
    return subclass(original, forward=with_globals(method, **{_FUNCTION: functools.partial(convolve, called)}))


def convolve(
    called: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Do what transformers' `causal_conv1d_fn` does, each document by itself where bounds are given.

    Args:
        called: transformers' function.
        x: [B, C, L]; weight: [C, K]; bias: [C].
        kwargs: others of that function; `seq_idx` is int32 [1, L], the number of each token's document.
    """
    document_ids = kwargs.get("seq_idx")
    if document_ids is None or len(x) != 1 or activation not in _ACTIVATIONS:
        return called(x, weight, bias, activation, **kwargs)
    y = _Convolution.apply(x[0].t(), weight, document_ids[0]).t()[None]
    y = y if bias is None else y + bias[:, None]
    return (y if activation is None else silu(y)).to(x.dtype)


class _Convolution(torch.autograd.Function):
    """Keeps x and not its shifted copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, document_ids: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, document_ids)
        return convolve_reference(x, weight, document_ids).to(x.dtype)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, document_ids = ctx.saved_tensors
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = convolve_reference(*leaves, document_ids)
        return *torch.autograd.grad(y, leaves, dy.to(y.dtype)), None
