"""The checks of kernels under Triton's interpreter."""

from __future__ import annotations

import functools
import multiprocessing.context
import multiprocessing.forkserver
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]


def check_interpreted(script: str, names: Sequence[str], *arguments: str) -> None:
    """Run a file of tests/support, which checks these kernels, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        line = [str(TESTS / "support" / script), *arguments]
        process = _interpreting().Process(target=_run, args=(line, printed), daemon=True)
        process.start()
        process.join()
        output, errors = (path.read_text() if path.exists() else "" for path in printed)
    assert process.exitcode == 0, errors[-3000:]
    assert output.split("\n")[:-1] == [f"{name} ok" for name in names]


@functools.cache
def _interpreting() -> multiprocessing.context.ForkServerContext:
    """Return what forks processes from one that has imported the kernels for the interpreter, which is chosen when a
    kernel is defined."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"support.{name}_checks" for name in ("kernel", "moe", "codes", "packed", "int8")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
        multiprocessing.forkserver.ensure_running()
    return context


def _run(line: list[str], printed: list[Path]) -> None:
    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = line
    runpy.run_path(line[0], run_name="__main__")


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
