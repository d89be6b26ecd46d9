"""The checks of kernels under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1]


def check_interpreted(script: str, names: Sequence[str], *arguments: str) -> None:
    """Run a file of tests/support, which checks these kernels, in a process of its own: the interpreter is chosen when
    a kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(TESTS / "support" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{name} ok" for name in names]


def begin() -> None:
    """Make a process ready for checks by the interpreter: memory that nobody wrote holds NaN, tensors are too small for
    a second thread, and triton.language is made the interpreter's once a launch."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    _patch_once_a_launch()


def _patch_once_a_launch() -> None:
    """Spare the interpreter what it does again for each function that a kernel calls, `tl.sum` too: replacing
    everything in triton.language, which is replaced already while a kernel runs. That is up to a third of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(getattr(interpreter, "_LangPatchScope", None), "restore"):
        return  # another Triton: right all the same, and slower
    patched: list[object] = []

    def once(function: Any) -> Any:
        modules = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        if modules and all(any(each is known for known in patched) for each in modules):
            return interpreter._LangPatchScope()
        scope = patch(function)
        restore = scope.restore

        def undo() -> None:
            restore()
            patched.clear()

        scope.restore = undo
        patched.extend(modules)
        return scope

    interpreter._patch_lang = once
