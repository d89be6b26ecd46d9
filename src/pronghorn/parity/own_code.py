"""A model that computes by transformers' own code, whatever packages with kernels are installed.

In the place of its own functions transformers calls those of fla-core, causal-conv1d or mamba-ssm where they can be
imported. They take tensors of a GPU only, round otherwise, and some versions refuse (fla-core on Hopper with a Triton
before 3.7.1, whose results are wrong). What others are judged by must not depend on them. transformers' own round to
float32 inside, which a reference in float64 must not do.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.layers.subclass import own_class, subclass, with_globals


@contextmanager
def own_code(model: nn.Module) -> Iterator[None]:
    """Let a transformers model that isn't attached call no other package's functions while the block runs."""
    modules: list[Any] = [module for module in model.modules() if own_class(module) is None]
    made = {own: subclass(own, **members) for own in {type(each) for each in modules} if (members := _unwrapped(own))}
    changed = [(module, type(module)) for module in modules if type(module) in made]
    try:
        for module, own in changed:
            module.__class__ = made[own]
        yield
    finally:
        for module, own in changed:
            module.__class__ = own


def _unwrapped(own: type) -> dict[str, Any]:
    """Return those methods of a class of transformers that call such functions, calling what these stand for."""
    members = {}
    for name, given in vars(own).items() if own.__module__.startswith("transformers.models.") else ():
        method = inspect.unwrap(given) if inspect.isfunction(given) else None
        if not isinstance(method, types.FunctionType):
            continue
        called = {each: method.__globals__[each] for each in method.__code__.co_names if each in method.__globals__}
        plain = {each: _own(f) for each, f in called.items() if _stands_for_another(f)}
        if plain:
            members[name] = with_globals(method, **plain)
    return members


class _InFloat64:
    """torch, with float64 where it says float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _own(function: Any) -> Callable[..., Any]:
    """Return transformers' own function, which a choice wraps. Given float64 it computes in float64 throughout."""
    plain: Any = inspect.unwrap(function)
    wide = with_globals(plain, torch=_InFloat64())

    def call(*args: Any, **kwargs: Any) -> Any:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        return (wide if any(each.dtype is torch.float64 for each in given) else plain)(*args, **kwargs)

    return call


def _stands_for_another(function: Any) -> bool:
    """Tell whether a function is transformers' choice between a package's and its own, which it wraps."""
    if not inspect.isfunction(function) or not hasattr(function, "__wrapped__"):
        return False
    return "implementation" in function.__code__.co_freevars  # that of another decorator changes what is computed
