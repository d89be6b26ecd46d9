"""Kernels are launched past Triton's look at arguments: what is compiled for one kind of call serves no other kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pronghorn.kernels import launch as module
from pronghorn.kernels.launch import launch
from support.marks import needs_triton


class Compiled:
    """Stand for a compiled kernel: note what it is launched with, through Triton's call or past it."""

    packed_metadata, function = "packed", "function"

    def __init__(self) -> None:
        self.through: list[Any] = []
        self.past: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.through.append((grid, args))

    def run(self, gridX: int, gridY: int, gridZ: int, stream: Any, function: Any, *args: Any) -> None:
        self.past.append(((gridX, gridY, gridZ), stream, function, args))


class Kernel:
    """Stand for a function under `triton.jit`: note what it compiles."""

    arg_names = ("x_ptr", "n", "BLOCK")

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **options: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return compile


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Triton without a driver: its hooks."""
    found = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    driver = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
    monkeypatch.setattr(module, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=found), **vars(driver)))
    monkeypatch.setattr(module, "_compiled", {})
    return found


def test_kinds_of_calls(hooks: SimpleNamespace) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    for n in (5, 7, 11):  # of one kind: the first compiles
        launch(kernel, (3,), x, n, BLOCK=8)
    assert len(kernel.made) == 1
    last = (3, 1, 1), "stream of -1", "function", ("packed", None, None, None, x, 11, 8)
    assert kernel.made[0].past[-1][:3] == last[:3]
    assert all(a is b or a == b for a, b in zip(kernel.made[0].past[-1][3], last[3], strict=True))
    others: list[tuple[Any, Any, int]] = [
        (x, 1, 8),  # compiled in
        (x, 16, 8),
        (x, 2**31 + 1, 8),
        (x, 5.0, 8),
        (x, True, 8),
        (x.bfloat16(), 5, 8),
        (x[1:], 5, 8),  # not aligned
        (x[2:], 5, 8),
        (x, 5, 16),
    ]
    for number, (tensor, n, block) in enumerate(others, start=2):
        for _ in range(2):
            launch(kernel, (3,), tensor, n, BLOCK=block)
        assert len(kernel.made) == number and len(kernel.made[-1].past) == 1, (n, block)


def test_hooks_are_called(hooks: SimpleNamespace) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, (3,), x, 5, BLOCK=8)
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        hook.calls.append(print)
        launch(kernel, (3,), x, 5, BLOCK=8)
        hook.calls.clear()
    hooks.launch_enter_hook = print  # somebody's own
    launch(kernel, (3,), x, 5, BLOCK=8)
    assert len(kernel.made[0].through) == 3 and not kernel.made[0].past


def test_another_triton_launches_by_itself(hooks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed in (lambda self, grid, *args: None, None):
        monkeypatch.setattr(Compiled, "run", changed)
        kernel, x = Kernel(), torch.zeros(64)
        for _ in range(2):
            launch(kernel, (3,), x, 5, BLOCK=8)
        ((grid, args),) = kernel.made[0].through
        assert grid == (3, 1, 1) and args[1:] == (5, 8)


@needs_triton
@pytest.mark.parametrize("value", [0, 1, 2, 16, 48, -1, -16, 2**31 - 1, 2**31, 2**40, -(2**31), True, False, 1.0, 0.5])
def test_numbers_are_told_apart_as_triton_does(value: Any) -> None:
    """What Triton specialises one way, has one kind; what it specialises in two, two."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    native = pytest.importorskip("triton._C.libtriton")
    if not hasattr(native, "native_specialize_impl"):
        pytest.skip("this Triton specialises elsewhere")
    backend = type(make_backend(GPUTarget("cuda", 90, 32)))
    for other in (0, 1, 3, 16, -5, 2**33, 2**33 + 1, True, 2.5):
        ways = [native.native_specialize_impl(backend, each, False, True, True) for each in (value, other)]
        kinds = [[(type(kind), kind) for kind in module._kinds((each,))] for each in (value, other)]
        assert (ways[0] == ways[1]) == (kinds[0] == kinds[1]), (value, other, ways)
