"""Name the parts of a step for torch's profiler. A name is recorded while a profiler runs, and costs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from torch.autograd import profiler

PREFIX = "pronghorn:"
"""What the names of our ranges begin with in a trace: `pronghorn:scores`."""
SCORES = "scores"
"""Packed attention proper, or the gated delta rule in its place, forward and backward."""
ADAPTERS = "adapters"
"""Adapters' gradients, and the products of experts that have a rank."""
PRODUCTS = "products"
"""The other products of experts, and products in 8-bit integers: no operation of torch names their kernels."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def part(name: str) -> AbstractContextManager[Any]:
    """Open the range `pronghorn:name` if a profiler runs, which torch itself knows: backward threads see no context
    variable of the thread that began to profile."""
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else nullcontext()


def in_part(name: str) -> Callable[[_Function], _Function]:
    """Decorate a function: each call lies in the range `pronghorn:name` while a profiler runs."""

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with part(name):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
