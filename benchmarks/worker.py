"""Run each candidate in a process of its own: `Worker` in the parent, `python -m benchmarks.worker`.

    worker.call("steps", count=4, warm=2)   ->   ("steps", {"count": 4, "warm": 2})   ->   {"steps": [...], ...}

A library that patches others at its import then changes nobody else's figures, and its import can be timed, for which
nothing heavy is imported here at the start. A candidate may have an interpreter of its own, with its own packages.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from benchmarks.candidates import CANDIDATES, Built, Spec
from benchmarks.timing import Clock, CudaClock, HostClock, timed_step
from benchmarks.workload import Row, make_rows
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
        log: takes whatever the process prints; its end is shown with an error. The process runs in the log's folder.
        python: its interpreter; one that isn't ours imports its own packages, and the tree's source.
        tree: the checkout whose `benchmarks` and `src/pronghorn` it imports.
    """

    def __init__(self, log: Path, python: str = sys.executable, tree: Path = ROOT) -> None:
        self._log, self._busy = log, False
        ours = map(os.path.abspath, sys.path) if python == sys.executable else ()
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
        self._connection, child = Pipe()
        os.set_inheritable(child.fileno(), True)
        with child, log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.worker", "candidate", str(child.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | quiet | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "src"), *ours])},
                cwd=log.parent,  # some libraries leave folders where they are started
                close_fds=False,  # it holds the lock of `benchmarks/on_a_gpu.sh`, too, should this process die first
            )

    def call(self, function: str, **arguments: Any) -> Any:
        """Call a method of the process and return what it returns.

        Raises:
            OutOfMemory: the device's memory was too small.
            WorkerError: any other error there, or the process died.
        """
        try:
            self._busy = True
            self._connection.send((function, arguments))
            error, reply = self._connection.recv()
            self._busy = False
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
        """Let the process end, or kill it if it doesn't or is still at work; wait until its memory is free."""
        self._connection.close()
        if self._busy:
            self._process.kill()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class CandidateProcess:
    """Do what a process is called for: `prepare` once, or load, gate, steps and rest by turns, gate, count."""

    _built: Built
    _optimizer: Any

    def prepare(self, model: str, folder: Path, lengths: str, supervised: float, spec: Spec) -> dict[str, Any]:
        """Make what all candidates share, in a process that ends before any of them starts, so that its memory is free.

        Args:
            model: a shape, whose checkpoint is written into `folder` unless it is there, or a model's folder.
            lengths: as in `workload.make_rows`; `supervised` too.
            spec: without checkpoint, longest and documents.
        """
        import torch

        from benchmarks.counts import matmul_parameters, measure_ceilings
        from benchmarks.reference import compute_reference
        from pronghorn.device import device_name
        from pronghorn.diagnose.shapes import checkpoint_of

        path = checkpoint_of(model, folder, spec.seed)
        vocab = json.loads((path / "config.json").read_text())["vocab_size"]
        rows = make_rows(spec.tokens, lengths, supervised, vocab, spec.seed)
        longest, documents = max(max(row.lengths) for row in rows), max(len(row.lengths) for row in rows)
        spec = replace(spec, checkpoint=str(path), longest=longest, documents=documents)
        cuda = torch.cuda.is_available()
        ceilings = measure_ceilings() if cuda else {}
        torch.cuda.empty_cache()
        return {
            "spec": spec,
            "rows": rows,
            "ceilings": ceilings,
            "reference": compute_reference(spec, rows[0], Path.cwd()),
            "matmul_parameters": matmul_parameters(model),
            "device": device_name(),
            "device_bytes": torch.cuda.get_device_properties().total_memory if cuda else 0,
        }

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

        self._spec, self._first_row, self._rows = spec, rows[0], itertools.cycle(rows)
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

        def retries() -> int:
            return torch.cuda.memory_stats().get("num_alloc_retries", 0) if self._cuda else 0

        for _ in range(warm):
            self._step()
        before = retries()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        times, losses = zip(*(self._step() for _ in range(count)), strict=True)
        return {
            "steps": list(times),
            "losses": list(losses),
            "memory_retries": retries() - before,
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
        """Count launches, device time and synchronisations of a step; nothing on the CPU."""
        if not self._cuda:
            return {}
        from benchmarks.counts import count_synchronisations, profile_step

        works = self._works()

        def step() -> None:
            for work in works:
                work()

        return {**profile_step(step), "syncs": count_synchronisations(step)}

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

    def _synchronize(self) -> None:
        import torch

        if self._cuda:
            torch.cuda.synchronize()


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
    serve(CandidateProcess(), Connection(int(sys.argv[2])))
