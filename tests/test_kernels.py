"""The Triton kernels: compiled on a GPU, interpreted on the CPU, and cross-compiled for cards that aren't here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NAMES = ("rms_norm", "glu", "rope", "cross_entropy")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    from kernel_checks import CHECKS

    CHECKS[name]("cuda", dtype)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted() -> None:
    """In a process of its own: the interpreter is chosen when a kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    script = str(HERE / "kernel_checks.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{name} ok" for name in NAMES]
