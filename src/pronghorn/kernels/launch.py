"""Launch a Triton kernel without Triton's own look at every argument, which takes the host as long as some kernels run.

Triton finds the compiled form of a kernel by binding and specialising all arguments in each call. Here it is found by
what can change that form: dtypes and alignment of tensors, values of numbers, compile-time values. The first call of a
kind goes through Triton, which compiles it and returns the compiled kernel; later ones launch that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:

    class _Absent:
        """Stand for Triton where it isn't installed, so that files of operations can be imported."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **options: Any) -> Any:
            return self

    triton = tl = TensorDescriptor = _Absent()

__all__ = ["TensorDescriptor", "by_device", "cdiv", "launch", "next_power_of_2", "tl", "triton"]

P = ParamSpec("P")
R = TypeVar("R")

_ALIGNMENT = 16
"""Bytes that Triton specialises the addresses of tensors by."""
_MOST = 4096
"""Kinds of calls that are remembered; beyond that all are forgotten, and found again."""
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By kind of call: the compiled kernel, and the compile-time values that follow its arguments."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Do what `kernel[grid](*args, **options)` does, on the current device and stream.

    Args:
        kernel: a function under `triton.jit`; its compile-time parameters come last.
        args: tensors, their descriptors and numbers, in order.
        options: compile-time values, and Triton's own (num_warps, num_stages).
    """
    shown = [_kind(a) for a in args]
    key = (kernel, torch.cuda.current_device() if torch.cuda.is_initialized() else -1, *shown, *options.values())
    known = _compiled.get(key)
    if known is not None:
        compiled, more = known
        compiled[(*grid, 1, 1)[:3]](*args, *more)
        return
    compiled = kernel[grid](*args, **options)
    if hasattr(compiled, "packed_metadata"):  # not in the interpreter
        if len(_compiled) >= _MOST:
            _compiled.clear()
        names = kernel.arg_names[len(args) :]
        if all(name in options for name in names):
            _compiled[key] = compiled, tuple(options[name] for name in names)


def _kind(argument: Any) -> Any:
    """Return what of an argument can change the compiled form."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT
    if hasattr(argument, "block_shape"):
        return argument.base.dtype, *argument.block_shape
    return argument


def by_device(reference: Callable[P, R], kernel: Callable[P, R], at: int = 0, float64: bool = True) -> Callable[P, R]:
    """Return the operation that a reference and a kernel compute, which is documented at the reference: by the kernel
    on a GPU, by the reference elsewhere.

    Args:
        at: which argument tells where the tensors are; it is given by position.
        float64: whether the kernel serves float64, too.
    """

    @functools.wraps(reference)
    def operation(*args: P.args, **named: P.kwargs) -> R:
        x: Any = args[at]
        return (kernel if x.is_cuda and (float64 or x.dtype != torch.float64) else reference)(*args, **named)

    return operation


def cdiv(a: int, b: int) -> int:
    """Divide and round up. (`triton.cdiv` is made for kernels, too, and takes the host five microseconds.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
