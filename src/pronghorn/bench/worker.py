"""A process for one contender: `python -m pronghorn.bench.worker`, spoken to in JSON, a line each way.

    {"command": "steps", "count": 4, "warm": 2}   ->   {"steps": [...], ...}   or   {"error": "...", "kind": "memory"}

A library that patches others, as some do at import, then changes nobody else's figures; and its import can be timed,
for which nothing heavy is imported here at the start. Whatever it prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from pronghorn.bench.contenders import CONTENDERS, Built, Spec
from pronghorn.bench.timing import CudaClock, HostClock, timed_step
from pronghorn.device import is_out_of_memory


class ContenderProcess:
    """What a contender's process is asked, in this order: load, gate, steps and rest by turns, gate, count."""

    _built: Built
    _optimizer: Any

    def load(self, spec: dict[str, Any], rows: str) -> dict[str, Any]:
        """Import the library, load the checkpoint, set the adapters, make the optimiser."""
        start = time.perf_counter()
        self._spec = Spec(**spec)
        contender = CONTENDERS[self._spec.contender]
        contender.prepare()
        imported = time.perf_counter()
        import torch

        from pronghorn.bench.contenders.base import LEARNING_RATE, set_adapters, trainable
        from pronghorn.bench.workload import read_rows
        from pronghorn.device import versions
        from pronghorn.memory.estimate import CONTEXT_BYTES

        self._cuda = torch.cuda.is_available()
        self._clock: Any = CudaClock() if self._cuda else HostClock()
        if self._cuda and self._spec.memory is not None:
            share = (self._spec.memory - CONTEXT_BYTES) / torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
        self._rows = read_rows(Path(rows))
        self._turn = itertools.count()
        self._built = contender.build(self._spec)
        set_adapters(self._built.model, self._spec.seed)
        parameters = list(trainable(self._built.model).values())
        self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        self._synchronize()
        self._notes = notes = list(self._built.notes)
        if self._cuda and not any(part.get("is_expandable") for part in torch.cuda.memory_snapshot()):
            notes.append("the allocator's segments don't grow")
        if not self._cuda and self._spec.memory is not None:
            notes.append("no limit on memory: there is no GPU")
        return {
            "import_s": imported - start,
            "load_s": time.perf_counter() - imported,
            "notes": notes + self._built.paths(),
            "versions": versions(*contender.requirements),
        }

    def gate(self, reference: str) -> dict[str, Any]:
        """What the gate needs to know (`gate.measure`); steps that were taken have moved no adapter."""
        from pronghorn.bench.contenders.base import set_adapters
        from pronghorn.bench.gate import measure
        from pronghorn.bench.reference import Reference

        set_adapters(self._built.model, self._spec.seed)
        right = Reference.read(Path(reference))
        return measure(self._built, self._spec, self._rows[0], right, self._optimizer, self._synchronize)

    def steps(self, count: int, warm: int) -> dict[str, Any]:
        """Run `warm` untimed and `count` timed steps on the next rows; their times, and the most memory they took."""
        import torch

        from pronghorn.device import peak_bytes

        for _ in range(warm):
            self._step()
        retries = self._statistic("num_alloc_retries")
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        times, losses = [], []
        for _ in range(count):
            step_times, loss = self._step()
            times.append(step_times)
            losses.append(loss)
        return {
            "steps": times,
            "losses": losses,
            "memory_retries": self._statistic("num_alloc_retries") - retries,
            "peak": peak_bytes(torch.device("cuda")) if self._cuda else None,
        }

    def rest(self) -> dict[str, Any]:
        """Free gradients and caches; weights and the optimiser's state stay. Bytes still held, and notes as of now."""
        import torch

        from pronghorn.device import graph_bytes

        self._optimizer.zero_grad()
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()
        resting = torch.cuda.memory_allocated() + graph_bytes() if self._cuda else None
        return {"resting": resting, "notes": self._notes + self._built.paths()}

    def count(self) -> dict[str, Any]:
        """Launches and synchronisations of a step; nothing on the CPU."""
        if not self._cuda:
            return {}
        from pronghorn.bench.counts import count_launches, count_synchronisations

        works = self._works()

        def step() -> None:
            for work in works:
                work()

        return {"launches": count_launches(step), "syncs": count_synchronisations(step)}

    def _step(self) -> tuple[dict[str, float], float]:
        times = timed_step(self._works(), self._clock)
        return times, self._loss.item()

    def _works(self) -> list[Callable[[], None]]:
        """The next row's forward, backward and optimiser step. The batch is on the device before the clock starts."""
        from pronghorn.bench.contenders.base import autocast

        batch = self._built.make_batch(self._rows[next(self._turn) % len(self._rows)])

        def forward() -> None:
            with autocast(self._spec.method):
                self._loss = self._built.model(**batch).loss

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad()

        self._synchronize()
        return [forward, lambda: self._loss.backward(), update]

    def _statistic(self, name: str) -> int:
        import torch

        return torch.cuda.memory_stats().get(name, 0) if self._cuda else 0

    def _synchronize(self) -> None:
        import torch

        if self._cuda:
            torch.cuda.synchronize()


class PreparingProcess:
    """What is made once before any contender starts; its process ends then, so that its memory is free."""

    def checkpoint(self, model: str, folder: str, seed: int) -> dict[str, Any]:
        """Write a shape's checkpoint unless it is there; where it is, and what can be told from its config."""
        import torch

        from pronghorn.bench.shapes import checkpoint_of, matmul_parameters
        from pronghorn.device import device_name

        path = checkpoint_of(model, Path(folder), seed)
        config = json.loads((path / "config.json").read_text())
        return {
            "path": str(path),
            "vocab_size": config["vocab_size"],
            "matmul_parameters": matmul_parameters(model),
            "device": device_name(),
            "device_bytes": torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else 0,
        }

    def ceilings(self) -> dict[str, float]:
        """What this GPU reaches now (`record.measure_ceilings`); nothing on the CPU."""
        import torch

        from pronghorn.bench.record import measure_ceilings

        if not torch.cuda.is_available():
            return {}
        found = measure_ceilings()
        torch.cuda.empty_cache()
        return found

    def reference(self, spec: dict[str, Any], rows: str, folder: str) -> dict[str, Any]:
        """Compute and write the gate's reference for the first row; where it is."""
        from pronghorn.bench.reference import compute_reference
        from pronghorn.bench.workload import read_rows

        reference = compute_reference(Spec(**spec), read_rows(Path(rows))[0], Path(folder))
        path = Path(folder) / "reference.json"
        reference.write(path)
        return {"path": str(path)}


def serve(process: Any, requests: IO[str], replies: IO[str]) -> None:
    """Answer requests until there are no more; an error is an answer too, its traceback goes to stderr."""
    for line in requests:
        arguments = json.loads(line)
        try:
            reply = getattr(process, arguments.pop("command"))(**arguments)
        except Exception as error:  # whatever a library raises is for the parent to report
            traceback.print_exc()
            kind = "memory" if is_out_of_memory(error) else "failed"
            reply = {"error": f"{type(error).__name__}: {error}", "kind": kind}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    """Take over stdout for the replies; everything printed, by C code too, goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        process = PreparingProcess() if sys.argv[1:] == ["prepare"] else ContenderProcess()
        serve(process, sys.stdin, replies)


if __name__ == "__main__":
    main()
