"""Launch a Triton kernel without Triton's own look at every argument, which takes the host as long as some kernels run.

Triton finds the compiled form of a kernel by binding and specialising all arguments in each call. Here it is found by
what can change that form: dtypes and alignment of tensors, kinds of numbers, compile-time values. The first call of a
kind goes through Triton, which compiles it and returns the compiled kernel; later ones launch that, and past Triton's
look for hooks where nobody has set any.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Stand for Triton where it isn't installed, so that files of operations can be imported."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **options: Any) -> Any:
            return self

    triton = tl = _Absent()

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # kernels do without
    TensorDescriptor = None

__all__ = ["TensorDescriptor", "by_device", "cdiv", "launch", "next_power_of_2", "tl", "triton", "uses_tma"]

P = ParamSpec("P")
R = TypeVar("R")

_ALIGNMENT = 16
"""Bytes that Triton specialises the addresses of tensors by, and the divisor that it specialises integers by."""
_INT32 = 2**31
_MOST = 4096
"""Kinds of calls that are remembered; beyond that all are forgotten, and found again."""
_RUN = "gridX", "gridY", "gridZ", "stream", "function"
"""What a compiled kernel's `run` takes first, in the versions of Triton whose other arguments are known here."""
_compiled: dict[tuple[Any, ...], Callable[[tuple[int, ...], tuple[Any, ...]], None]] = {}
"""By kind of call: what launches the compiled kernel, given the grid and the arguments that aren't compile-time."""


def uses_tma(device: torch.device) -> bool:
    """Tell whether kernels fetch tiles by TMA there, as this Triton can: on Hopper alone, where it was measured."""
    return TensorDescriptor is not None and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Do what `kernel[grid](*args, **options)` does, on the current device and stream.

    Args:
        kernel: a function under `triton.jit`; its compile-time parameters come last.
        args: tensors, their descriptors and numbers, in order.
        options: compile-time values, and Triton's own (num_warps, num_stages).
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    key = (kernel, device, *_kinds(args), *options.values())
    known = _compiled.get(key)
    if known is not None:
        known((*grid, 1, 1)[:3], args)
        return
    compiled = kernel[grid](*args, **options)
    if hasattr(compiled, "packed_metadata"):  # not in the interpreter
        if len(_compiled) >= _MOST:
            _compiled.clear()
        names = kernel.arg_names[len(args) :]
        if all(name in options for name in names):
            _compiled[key] = _launcher(compiled, tuple(options[name] for name in names), device)


def _kinds(args: tuple[Any, ...]) -> list[Any]:
    """Return what of arguments can change the compiled form, as Triton specialises them."""
    kinds: list[Any] = []
    addresses = 0
    for each in args:
        kind = type(each)
        if kind is int:  # 1 is compiled in
            wide = not -_INT32 <= each < _INT32
            kinds.append(1 if each == 1 else 4 * wide + 2 * (each % _ALIGNMENT == 0))
        elif isinstance(each, Tensor):
            kinds.append(each.dtype)
            addresses |= each.data_ptr()
        elif hasattr(each, "block_shape"):
            kinds += each.base.dtype, *each.block_shape
        else:
            kinds.append(kind if kind is float or kind is bool else each)
    if addresses % _ALIGNMENT:
        kinds += [each.data_ptr() % _ALIGNMENT for each in args if isinstance(each, Tensor)]
    return kinds


def _launcher(compiled: Any, more: tuple[Any, ...], device: int) -> Callable[[tuple[int, ...], tuple[Any, ...]], None]:
    """Return what launches a compiled kernel on a device.

    Args:
        more: the compile-time values that follow its arguments.
    """

    def by_triton(grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        compiled[grid](*args, *more)

    try:
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        names = list(inspect.signature(run).parameters)
        stream_of, hooks = triton.runtime.driver.active.get_current_stream, triton.knobs.runtime
    except (AttributeError, TypeError, ValueError):
        return by_triton
    if tuple(names[: len(_RUN)]) != _RUN or names[-1] != "args":
        return by_triton

    def directly(grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if getattr(hooks.launch_enter_hook, "calls", True) or getattr(hooks.launch_exit_hook, "calls", True):
            by_triton(grid, args)
        else:
            run(*grid, stream_of(device), function, packed, None, None, None, *args, *more)

    return directly


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
