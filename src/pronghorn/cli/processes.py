"""Start one process a GPU, or join those that somebody started, and stop all of them together.

Processes that torchrun, accelerate or Slurm started are joined. `pronghorn train` does not call torchrun for its own:
torchrun gives all processes the same 30 seconds to end. That is too short where a user asked for a checkpoint, and too
long where one process died and the others can only wait for it. It also shows a trace rather than the first error.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pronghorn.environment import ERROR_FILE, RAN_OUT, environment_of_process, error_file
from pronghorn.errors import ConfigError, MemoryRanOut, PronghornError, RunStopped, TrainingError
from pronghorn.text import counted

if TYPE_CHECKING:
    from pronghorn.config.recipe import Recipe

GRACE = 3.0
"""Seconds that the others have to end by themselves after one has failed: they may be writing its like."""
POLL = 0.05
"""Seconds between looks at the processes."""
DYING = 2.0
"""Seconds that a killed process may take to end on a busy machine, while others see already that it is gone."""
LAST_LINES = 20
PORTS = range(20_000, 30_000)
"""The port through which the processes find each other is drawn from these."""


@dataclass(frozen=True)
class Choice:
    """How many GPUs a run takes, and what to tell about it."""

    gpus: int
    note: str | None = None


def choose_gpus(recipe: Recipe, visible: int) -> Choice:
    """Choose how many of the visible GPUs a run takes: those asked for, or as many as can share the rows of a step.

    Raises:
        ConfigError: more are asked for than there are or can share the rows, or several machines of one process.
    """
    launch, rows = recipe.launch, recipe.step_rows
    if launch.nodes > 1:
        raise ConfigError(
            f"launch.nodes is {launch.nodes}, and this process was started alone",
            "pronghorn launch --slurm RECIPE writes a batch script; without Slurm start torchrun on every machine: "
            f"torchrun --nnodes {launch.nodes} --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            "-m pronghorn train RECIPE",
        )
    if isinstance(launch.gpus, int):
        if launch.gpus > max(visible, 1):
            there = counted(visible, "GPU") if visible else "no GPU"
            remedy = f"set launch.gpus: {visible}, or leave it out to use what is there" if visible else "leave it out"
            raise ConfigError(f"launch.gpus is {launch.gpus}, and this process sees {there}", remedy)
        from pronghorn.config.checks import share_of_step

        share_of_step(recipe, launch.gpus)  # raises where it can't be, before processes are started for it
        return Choice(launch.gpus)
    most = max(visible, 1)
    gpus = max(n for n in range(1, most + 1) if rows % n == 0)
    if gpus == most:
        return Choice(gpus)
    accumulated = most // math.gcd(most, recipe.packing.rows_per_step)
    return Choice(
        gpus,
        f"trains on {gpus} of {most} GPUs: a step has {counted(rows, 'row')}, whatever the number of "
        f"GPUs; to use all of them set train.gradient_accumulation_steps to a multiple of {accumulated}",
    )


def visible_gpus() -> int:
    """Count the GPUs that this process sees, without using one."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start(count: int, command: Sequence[str]) -> int:
    """Start `python -m pronghorn COMMAND` once a GPU, wait for all, and return the exit status.

    The first process keeps the terminal. SIGINT, SIGTERM and SIGHUP are passed on. Where one process fails, the others
    are ended at once and its error is raised; checkpoints are whole or not there, so nothing is lost by that. Where
    memory ran out in a step that none can repeat alone, all are started again, go on from the newest checkpoint, and
    keep less.

    Raises:
        TrainingError: what the process that failed first said.
    """
    ran_out: list[dict[str, Any]] = []
    while True:
        try:
            return _start(count, command, {RAN_OUT: json.dumps(ran_out)} if ran_out else {})
        except MemoryRanOut as error:  # of as many as one training survives
            ran_out.append(error.event)
            sys.stderr.write(f"{error.problem}: all start again from the newest checkpoint, and keep less\n")
            command = [part for part in command if part != "--overwrite"]  # which was done


def _start(count: int, command: Sequence[str], environment: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="pronghorn-") as folder:
        group = _Group(count, Path(folder))
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        earlier = {number: signal.signal(number, group.pass_on) for number in heard}
        try:
            group.begin(command, environment)
            return group.wait()
        finally:
            group.kill()
            for number, handler in earlier.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def leaving_group() -> Iterator[None]:
    """Leave the group of processes that is joined in this block, if one is, at its end or when all stop together: torch
    warns of a group that the interpreter's end finds, and gloo's threads may abort a process there.

    A group that was joined before stays, and so does one after an error: the others would tell theirs first, of a
    process that is gone, and NCCL would wait for them.
    """
    import torch.distributed as dist

    def joined_now() -> bool:
        return dist.is_available() and dist.is_initialized()

    before, together = joined_now(), True
    try:
        yield
    except BaseException as error:
        together = isinstance(error, RunStopped)
        raise
    finally:
        if together and joined_now() and not before:
            dist.destroy_process_group()


def leave_error(error: BaseException) -> bool:
    """Leave an error for the process that started this one, and tell whether there is such a one."""
    path = error_file()
    if path is None:
        return False
    about: dict[str, Any] = {"time": time.time()}
    if isinstance(error, PronghornError):
        about |= {"problem": error.problem, "remedy": error.remedy, "event": getattr(error, "event", None)}
    else:
        about["trace"] = traceback.format_exc()
    path.write_text(json.dumps(about), encoding="utf-8")
    return True


_USUAL = {
    "SIGKILL": "; the system kills what takes its last memory",
    "SIGABRT": "; NCCL ends what has waited for launch.timeout_minutes",
}
"""What usually ends a process so."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Group:
    """The processes of one run on this machine."""

    def __init__(self, count: int, folder: Path) -> None:
        self._folder = folder
        self._signal = 0
        """The last one that was passed on."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._seen = dict.fromkeys(range(count), time.time())
        """When each was last seen to run."""

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the processes. A signal that comes meanwhile reaches all of them, too."""
        port, count = _free_port(), len(self._seen)
        for rank in range(count):
            own = environment_of_process(count, rank, port, {**environment, ERROR_FILE: str(self._error_file(rank))})
            with self._log(rank).open("wb") as log:
                quiet = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": log}
                line = [sys.executable, "-m", "pronghorn", *command]
                self._processes.append(subprocess.Popen(line, env=own, **quiet))  # type: ignore[call-overload]
            if self._signal:
                self._processes[-1].send_signal(self._signal)

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"{rank}.json"

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to every process. A terminal's Ctrl-C they have already got, which does no harm."""
        self._signal = number
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        """Wait for all, or for the first that fails."""
        while self._running() and not self._failed():
            time.sleep(POLL)
        until = time.monotonic() + GRACE
        while self._running() and time.monotonic() < until:
            time.sleep(POLL)
        statuses = {process.poll() for process in self._processes}
        if len(statuses) == 1 and (told := statuses.pop() or 0) > 128:
            return told  # a signal that one got, after which all saved and left together
        if failed := self._failed():
            raise self._first_error(failed)
        # a signal that comes before training ends a process as usual
        return 128 + self._signal if any(process.returncode for process in self._processes) else 0

    def _running(self) -> bool:
        """Tell whether any process runs, and note which do."""
        now = time.time()
        running = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        self._seen |= dict.fromkeys(running, now)
        return bool(running)

    def _failed(self) -> list[int]:
        """Return the processes that failed: ended, but not as a signal asks for, or left an error, after which one may
        wait for others and not end."""
        asked = (-self._signal, *range(128, 256)) if self._signal else ()
        ended = [rank for rank, process in enumerate(self._processes) if process.poll() not in (None, 0, *asked)]
        return sorted({*ended, *(rank for rank in range(len(self._processes)) if self._error_file(rank).exists())})

    def _first_error(self, failed: Sequence[int]) -> TrainingError:
        """Return the error of the process that failed first, by the time at which it left one. A process that was
        killed had no time to: it ended after it was last seen to run, and what the others say is that it is gone."""
        left = {rank: json.loads(path.read_text()) for rank in failed if (path := self._error_file(rank)).exists()}

        def failed_at(rank: int) -> float:
            killed = self._processes[rank].poll() in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
            return float(left[rank]["time"]) if rank in left else self._seen[rank] - DYING * killed

        rank = min(failed, key=failed_at)
        count, code, error = len(self._processes), self._processes[rank].poll() or 0, left.get(rank)
        if error is None and code < 0:
            name = signal.Signals(-code).name
            return TrainingError(
                f"process {rank} of {count} was ended by {name}{_USUAL.get(name, '')}",
                "run the same command again: it goes on from the newest checkpoint",
            )
        if error is None:
            said = self._log(rank).read_text(errors="replace").splitlines()[-LAST_LINES:]
            return TrainingError(
                f"process {rank} of {count} ended with status {code}" + "".join(f"\n{line}" for line in said),
                "run the same command with --debug to see its whole trace",
            )
        if "trace" in error:
            sys.stderr.write(error["trace"])
            last = error["trace"].strip().splitlines()[-1]
            return TrainingError(
                f"process {rank} of {count} failed: {last}",
                "the trace above is that process's; training goes on from the newest checkpoint when it runs again",
            )
        if error.get("event") is not None and not self._signal:
            return MemoryRanOut(error["problem"], error["remedy"], error["event"])
        return TrainingError(error["problem"], error["remedy"])

    def kill(self) -> None:
        """End what is left."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    """Return a port that nobody listens on. Ports that the system gives to connections are left alone: NCCL or another
    run may get that one before the first process listens."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise TrainingError(f"no port of {PORTS[0]} to {PORTS[-1]} can be listened on", "see who holds them: ss -ltn")
