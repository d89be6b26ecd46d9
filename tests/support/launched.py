"""`pronghorn train` on several processes as programs that are forked from this one, which spares each the imports.

What starts them is `pronghorn.cli.processes.start` itself, and each runs the whole command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer
from accelerate.state import AcceleratorState

from pronghorn.cli import processes
from pronghorn.cli.errors import plain_errors
from pronghorn.cli.main import app

Fault = Callable[[int], object]
"""Called in each process with its number before it begins, to plant a defect."""


class Forked:
    """A forked process, with what `subprocess.Popen` has of it.

    Args:
        work: what it does; returns its exit status.
    """

    def __init__(self, work: Callable[[], int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            torch.set_num_threads(1)  # the parent's pool of threads is not forked
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        """Return the exit status, None as long as it runs."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Return the exit status when it has ended; TimeoutError if it doesn't."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                self.kill()
                raise TimeoutError(f"process {self.pid} did not end in {timeout} seconds")
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to it, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Launch(Forked):
    """`pronghorn train ARGUMENTS` on so many processes, each a fork.

    Args:
        folder: for what it prints.
        fault: see `Fault`.
    """

    def __init__(self, count: int, *arguments: str, folder: Path, fault: Fault | None = None) -> None:
        self._printed = [folder / f"{name}-{time.monotonic_ns()}" for name in ("stdout", "stderr")]
        super().__init__(partial(self._start, count, ["train", *arguments], fault))

    def _start(self, count: int, command: list[str], fault: Fault | None) -> int:
        for descriptor, path in enumerate(self._printed, start=1):
            _redirect(descriptor, os.open(path, os.O_WRONLY | os.O_CREAT))
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        stand_in = SimpleNamespace(Popen=partial(_popen, fault), DEVNULL=subprocess.DEVNULL)
        processes.subprocess = stand_in  # type: ignore[assignment]  # this process is the launcher, and nothing else
        try:
            with plain_errors(False):
                return processes.start(count, command)
        except typer.Exit as end:
            return end.exit_code

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Return what it printed and its errors when it has ended; TimeoutError if it doesn't."""
        self.wait(timeout)
        output, errors = (path.read_text() for path in self._printed)
        return output, errors

    def children(self) -> list[int]:
        """Return the identities of its processes, in their order."""
        return [int(each) for each in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]


def _popen(fault: Fault | None, line: list[str], env: dict[str, str], stdout: Any = None, stderr: Any = None) -> Forked:
    assert line[:3] == [sys.executable, "-m", "pronghorn"]
    return Forked(partial(_program, line[3:], env, fault, stdout, stderr))


def _program(command: list[str], env: dict[str, str], fault: Fault | None, stdout: Any, stderr: Any) -> int:
    """Be `python -m pronghorn COMMAND`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if stdout == subprocess.DEVNULL:
        _redirect(1, os.open(os.devnull, os.O_WRONLY))
    if stderr is not None:
        _redirect(2, stderr.fileno())
    os.environ.clear()
    os.environ.update(env)
    AcceleratorState._reset_state(reset_partial_state=True)  # earlier tests had one process
    if fault is not None:
        fault(int(env["RANK"]))
    try:
        app(command)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _redirect(descriptor: int, to: int) -> None:
    os.dup2(to, descriptor)
    stream = os.fdopen(descriptor, "w", buffering=1, closefd=False)
    if descriptor == 1:
        sys.stdout = stream
    else:
        sys.stderr = stream


def launch(count: int, *arguments: str, folder: Path, fault: Fault | None = None) -> subprocess.CompletedProcess[str]:
    """Run `pronghorn train ARGUMENTS` on so many processes to its end."""
    program = Launch(count, *arguments, folder=folder, fault=fault)
    output, errors = program.communicate()
    assert program.returncode is not None
    return subprocess.CompletedProcess([], program.returncode, output, errors)
