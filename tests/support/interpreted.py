"""The checks of kernels under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]


def check_interpreted(script: str, names: Sequence[str]) -> None:
    """Run a file of tests/support, which checks these kernels, in a process of its own: the interpreter is chosen when
    a kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(TESTS / "support" / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{name} ok" for name in names]
