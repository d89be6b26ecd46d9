"""Code that registers things for good, or writes to the terminal, in a process of its own that needn't import anew."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


def forked(folder: Path, call: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Call something as a program that was started in a folder, and return what it printed and its exit status."""
    paths = [folder / "stdout", folder / "stderr"]
    process = os.fork()
    if not process:
        status: object = 1
        torch.set_num_threads(1)  # the parent's pool of threads is not forked, and OpenMP would wait for it forever
        try:
            with paths[0].open("w") as sys.stdout, paths[1].open("w") as sys.stderr:
                try:
                    os.chdir(folder)
                    sys.path.insert(0, str(folder))
                    call()
                    status = 0
                except SystemExit as end:
                    status = end.code or 0
                except BaseException:
                    traceback.print_exc()
        finally:
            os._exit(status if isinstance(status, int) else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return subprocess.CompletedProcess([], status, *(path.read_text() for path in paths))
