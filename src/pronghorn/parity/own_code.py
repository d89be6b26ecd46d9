"""A model that computes by transformers' own code, whatever packages with kernels are installed.

In the place of its own functions transformers calls those of fla-core, causal-conv1d or mamba-ssm where they can be
imported. They take tensors of a GPU only, round otherwise, and some versions refuse (fla-core on Hopper with a Triton
before 3.7.1, whose results are wrong). What others are judged by must not depend on them. transformers' own round to
float32 inside, which a reference in float64 must not do.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pronghorn.layers.subclass import own_class, subclass, with_globals

_KNOWN = (
    *("transformers", "torch", "peft", "kernels", "pronghorn"),
    *("functools", "contextlib", "warnings", "typing_extensions", "huggingface_hub", "accelerate"),
)
"""Whose functions a model of transformers and PEFT has, and what wraps them without a change."""
_DEFINES = (ast.ClassDef, ast.FunctionDef)
_GLOBAL_HOOKS = ("forward_pre", "forward", "backward_pre", "backward")


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


def replaced(model: Any) -> list[str]:
    """List what of a model that isn't attached another package put in the place of what transformers, PEFT and torch
    wrote: "LlamaMLP.forward (liger_kernel.mlp)".

    Looked at are the methods of its modules' classes, what the files of transformers' models and
    `torch.nn.functional` define, the attentions that are looked up, and hooks of all modules.
    """
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    found = list[tuple[str, Any]]()
    for kind in kinds:
        if kind.__module__.partition(".")[0] in _KNOWN:
            found += [(f"{kind.__name__}.{name}", method) for name, method in vars(kind).items()]
    for module in dict.fromkeys(
        kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")
    ):
        source = sys.modules[module]
        defined = {node.name for node in ast.parse(inspect.getsource(source)).body if isinstance(node, _DEFINES)}
        found += [(name, value) for name, value in vars(source).items() if name in defined]
    functions = vars(torch.nn.functional).items()
    found += [(f"torch.nn.functional.{name}", f) for name, f in functions if inspect.isfunction(f)]
    names = dict.fromkeys(("sdpa", "eager", model.config._attn_implementation))
    found += [(f"attention {name!r}", ALL_ATTENTION_FUNCTIONS.get(name)) for name in names]
    strange = [f"{name} ({writer})" for name, value in found if (writer := _stranger(value)) is not None]
    hooked = any(getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in _GLOBAL_HOOKS)
    return [*strange, *["hooks of all modules"] * hooked]


def _stranger(value: Any) -> str | None:
    """Return the module that wrote a function or a class, or a wrapper around it, if that is of another package."""
    while value is not None:
        written = value.__module__ if isinstance(value, type) else getattr(value, "__globals__", {}).get("__name__")
        if written is not None and str(written).partition(".")[0] not in _KNOWN:
            return str(written)
        value = getattr(value, "__wrapped__", None)
    return None
