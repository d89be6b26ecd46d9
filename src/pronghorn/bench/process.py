"""The parent's end of a worker process (`bench.worker`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pronghorn.errors import PronghornError

LOG_LINES = 12
PATIENCE_S = 30
"""How long a process may take to end by itself."""


class WorkerError(PronghornError, RuntimeError):
    """A worker process answered with an error, or died."""


class OutOfMemory(WorkerError):
    """The device had no room for what a worker was asked."""


class Worker:
    """A running worker process; end it by `close`.

    Args:
        role: `contender`, or `prepare` for what is made once.
        environment: of the process.
        log: takes whatever it prints; the end of it is shown with an error. The process runs in its folder.
    """

    def __init__(self, role: Literal["contender", "prepare"], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pronghorn.bench.worker", role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=dict(environment),
                cwd=log.parent,  # some libraries leave folders where they are started
                close_fds=False,  # it holds the lock of `benchmarks/on_a_gpu.sh`, too, should this process die first
            )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            OutOfMemory: the device's memory was too small.
            WorkerError: any other error there, or the process died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):  # none, or killed within one
            code = self._process.wait()
            raise WorkerError(f"its process ended with code {code} during {command!r}", self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            kind = OutOfMemory if reply["kind"] == "memory" else WorkerError
            raise kind(f"{command}: {reply['error']}", self._last_words())
        return reply

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(["look at the end of its output", *lines])

    def close(self) -> None:
        """Let the process end, and end it if it doesn't; waits until its memory is free."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what a dead process didn't read
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
