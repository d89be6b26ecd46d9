"""Run each candidate in a process of its own: `Worker` in the parent, `python -m benchmarks.worker`.

    worker.call("steps", count=4, warm=2)   ->   ("steps", {"count": 4, "warm": 2})   ->   {"steps": [...], ...}

A library that patches others at its import then changes nobody else's figures, and its import can be timed, for which
nothing heavy is imported here at the start. A candidate may have an interpreter of its own, with its own packages.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from benchmarks.candidates import CANDIDATES, Built, Spec
from benchmarks.timing import Clock, CudaClock, HostClock, timed_step
from benchmarks.workload import Row
from pronghorn.errors import PronghornError

ROOT = Path(__file__).resolve().parents[1]
LOG_LINES = 12
PATIENCE_S = 30
"""How long a process may take to end by itself."""


class WorkerError(PronghornError, RuntimeError):
    """A worker process answered with an error, or died."""


class OutOfMemory(WorkerError):
    """The device had no room for what a worker was asked."""


class Worker:
    """Hold a running worker process; end it by `close`.

    Args:
        role: `candidate`, or `prepare` for what is made once.
        log: takes whatever the process prints; its end is shown with an error. The process runs in the log's folder.
        python: its interpreter; one that isn't ours imports its own packages, and this repository's source.
    """

    def __init__(self, role: str, log: Path, python: str = sys.executable) -> None:
        self._log = log
        paths = [*map(os.path.abspath, sys.path)] if python == sys.executable else [str(ROOT), str(ROOT / "src")]
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
        self._connection, theirs = Pipe()
        os.set_inheritable(theirs.fileno(), True)
        with theirs, log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.worker", role, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths)},
                cwd=log.parent,  # some libraries leave folders where they are started
                close_fds=False,  # it holds the lock of `benchmarks/on_a_gpu.sh`, too, should this process die first
            )

    def call(self, function: str, **arguments: Any) -> Any:
        """Call a method of the process's role and return what it returns.

        Raises:
            OutOfMemory: the device's memory was too small.
            WorkerError: any other error there, or the process died.
        """
        try:
            self._connection.send((function, arguments))
            error, reply = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise WorkerError(f"its process ended with code {code} during {function!r}", self._last_words()) from None
        if error is not None:
            kind = OutOfMemory if error == "memory" else WorkerError
            raise kind(f"{function}: {reply}", self._last_words())
        return reply

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(["look at the end of its output", *lines])

    def close(self) -> None:
        """Let the process end, or kill it if it doesn't; waits until its memory is free."""
        self._connection.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class CandidateProcess:
    """Do what a candidate's process is called for, in this order: load, gate, steps and rest by turns, gate, count."""

    _built: Built
    _optimizer: Any

    def load(self, spec: Spec, rows: list[Row]) -> dict[str, Any]:
        """Import the library, load the checkpoint, set the adapters, make the optimiser."""
        start = time.perf_counter()
        candidate = CANDIDATES[spec.candidate]
        candidate.prepare()
        imported = time.perf_counter()
        import torch

        from benchmarks.candidates.base import LEARNING_RATE, set_adapters, trainable
        from pronghorn.device import versions
        from pronghorn.memory.estimate import CONTEXT_BYTES

        self._spec, self._rows = spec, itertools.cycle(rows)
        self._first_row = rows[0]
        self._cuda = torch.cuda.is_available()
        self._clock: Clock = CudaClock() if self._cuda else HostClock()
        if self._cuda and spec.memory is not None:
            share = (spec.memory - CONTEXT_BYTES) / torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
        self._built = candidate.build(spec)
        set_adapters(self._built.model, spec.seed)
        parameters = list(trainable(self._built.model).values())
        self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        self._synchronize()
        self._notes = list(self._built.notes)
        if self._cuda and not any(part.get("is_expandable") for part in torch.cuda.memory_snapshot()):
            self._notes.append("the allocator's segments don't grow")
        if not self._cuda and spec.memory is not None:
            self._notes.append("no limit on memory: there is no GPU")
        return {
            "import_s": imported - start,
            "load_s": time.perf_counter() - imported,
            "notes": self._notes + self._built.describe(),
            "versions": versions(*candidate.requirements),
        }

    def gate(self, reference: Any) -> dict[str, Any]:
        """Measure what the gate compares (`gate.measure`), from the adapters that `load` set."""
        from benchmarks.candidates.base import set_adapters
        from benchmarks.gate import measure

        set_adapters(self._built.model, self._spec.seed)
        return measure(self._built, self._spec, self._first_row, reference, self._optimizer, self._synchronize)

    def steps(self, count: int, warm: int) -> dict[str, Any]:
        """Run `warm` untimed and `count` timed steps on the next rows; return times, losses and peak memory."""
        import torch

        from pronghorn.device import peak_bytes

        for _ in range(warm):
            self._step()
        retries = self._retries()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        times, losses = zip(*(self._step() for _ in range(count)), strict=True)
        return {
            "steps": list(times),
            "losses": list(losses),
            "memory_retries": self._retries() - retries,
            "peak": peak_bytes(torch.device("cuda")) if self._cuda else None,
        }

    def rest(self) -> dict[str, Any]:
        """Free gradients and caches; return the bytes still held (weights, optimiser), and notes as of now."""
        import torch

        from pronghorn.device import graph_bytes

        self._optimizer.zero_grad()
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()
        resting = torch.cuda.memory_allocated() + graph_bytes() if self._cuda else None
        return {"resting": resting, "notes": self._notes + self._built.describe()}

    def count(self) -> dict[str, Any]:
        """Count launches and synchronisations of a step; nothing on the CPU."""
        if not self._cuda:
            return {}
        from benchmarks.counts import count_launches, count_synchronisations

        works = self._works()

        def step() -> None:
            for work in works:
                work()

        return {"launches": count_launches(step), "syncs": count_synchronisations(step)}

    def _step(self) -> tuple[dict[str, float], float]:
        times = timed_step(self._works(), self._clock)
        return times, self._loss.item()

    def _works(self) -> list[Callable[[], None]]:
        """Make the next row's forward, backward and update; the batch is on the device before the clock starts."""
        from benchmarks.candidates.base import autocast

        batch = self._built.make_batch(next(self._rows))

        def forward() -> None:
            with autocast(self._spec.method):
                self._loss = self._built.model(**batch).loss

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad()

        self._synchronize()
        return [forward, lambda: self._loss.backward(), update]

    def _retries(self) -> int:
        import torch

        return torch.cuda.memory_stats().get("num_alloc_retries", 0) if self._cuda else 0

    def _synchronize(self) -> None:
        import torch

        if self._cuda:
            torch.cuda.synchronize()


class PreparingProcess:
    """Make what all candidates share, before any of them starts; the process ends then, so that its memory is free."""

    def checkpoint(self, model: str, folder: Path, seed: int) -> dict[str, Any]:
        """Write a shape's checkpoint unless it is there; return where it is, and what its config tells."""
        import json

        import torch

        from benchmarks.counts import matmul_parameters
        from pronghorn.device import device_name
        from pronghorn.diagnose.shapes import checkpoint_of

        path = checkpoint_of(model, folder, seed)
        return {
            "path": str(path),
            "vocab_size": json.loads((path / "config.json").read_text())["vocab_size"],
            "matmul_parameters": matmul_parameters(model),
            "device": device_name(),
            "device_bytes": torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else 0,
        }

    def ceilings(self) -> dict[str, float]:
        """Measure what this GPU reaches now (`counts.measure_ceilings`); nothing on the CPU."""
        import torch

        from benchmarks.counts import measure_ceilings

        found = measure_ceilings() if torch.cuda.is_available() else {}
        torch.cuda.empty_cache()
        return found

    def reference(self, spec: Spec, row: Row, folder: Path) -> Any:
        """Compute the gate's reference for a row."""
        from benchmarks.reference import compute_reference

        return compute_reference(spec, row, folder)


def serve(process: Any, connection: Connection) -> None:
    """Answer calls until the parent closes its end; an error is an answer too, its traceback goes to the log."""
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = None, getattr(process, function)(**arguments)
        except Exception as error:  # whatever a library raises is for the parent to report
            from pronghorn.device import is_out_of_memory

            traceback.print_exc()
            reply = "memory" if is_out_of_memory(error) else "failed", f"{type(error).__name__}: {error}"
        connection.send(reply)


if __name__ == "__main__":
    serve({"candidate": CandidateProcess, "prepare": PreparingProcess}[sys.argv[1]](), Connection(int(sys.argv[2])))
