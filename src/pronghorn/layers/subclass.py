"""Classes of the same name in the place of a module's own, one instance at a time, and the way back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

_OWN = "_pronghorn_own"
"""The attribute of a class made here that holds the one in whose place it is."""


def subclass(own: Any, *mixins: type, **members: Any) -> type[nn.Module]:
    """Make a subclass with other members; of the same name, by which transformers, TRL, saving and FSDP look it up.

    Whoever calls it, as `type(model).from_pretrained` does, gets a module of the class in whose place it is.
    """
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    metaclass: Any = type(own)
    made: type[nn.Module] = _makes_own(metaclass)(own.__name__, (*mixins, own), {**members, **names, _OWN: own})
    return made


@functools.cache
def _makes_own(metaclass: Any) -> Any:
    """Make the metaclass of the classes made here, one below their own's: instances that are made anew (and not
    copied) lack what `attach` keeps on a module."""

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(cls, _OWN)(*args, **kwargs)

    return type(metaclass.__name__, (metaclass,), {"__call__": __call__})


def with_globals(function: types.FunctionType, **others: Any) -> types.FunctionType:
    """Make a function of the same code that finds other things under some of its module's names."""
    made = types.FunctionType(
        function.__code__,
        function.__globals__ | others,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def moving(original: Any, moved: Callable[[Any], None]) -> Any:
    """Make a module's `_apply` (of `.to` and the like), which calls `moved` where it changed device or dtype."""

    def places(module: Any) -> set[Any]:
        return {(parameter.device, parameter.dtype) for parameter in module.parameters()}

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, result = places(self), original._apply(self, *args, **kwargs)
        if places(self) != before:
            moved(self)
        return result

    return _apply


def own_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a module had, if it has one made here (and nobody, like FSDP, made another of that)."""
    return type(module).__dict__.get(_OWN)


def restore(model: nn.Module) -> None:
    """Give the modules of a model their own classes back, and take off what was kept on them.

    Copies that were made of modules since (PEFT's `modules_to_save`) are among them.
    """
    for module in model.modules():
        while (own := own_class(module)) is not None:
            module.__class__ = own
        for name in [name for name in module.__dict__ if name.startswith("_pronghorn_")]:
            del module.__dict__[name]
