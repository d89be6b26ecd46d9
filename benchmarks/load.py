"""NF4 quantise-on-load against reading the same files: with the page cache dropped, and warm.

    python -m benchmarks.load --model Qwen3-14B --checkpoints DIR --out result.json

A checkpoint with random weights is written first. `read` reads its safetensors files from end to end and does nothing
with them, `read in streams` does so by several threads; `copied` copies each tensor from the mapped file to the device
and drops it, `staged` does so through two pinned buffers, which torch's threads fill by turns; `pronghorn` is
`load_in_4bit` through the house's loader; `transformers` is `from_pretrained` with the same quantisation. Each is tried
`--repeats` times, by turns; times are seconds, medians. Files are dropped from the page cache one by one
(POSIX_FADV_DONTNEED), which asks the system and forces nothing: where it didn't, `cold read` is about `warm read`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import parser_of, run
from benchmarks.record import check_out
from pronghorn.device import device_name, versions
from pronghorn.diagnose.shapes import check_model, checkpoint_of
from pronghorn.loading.load import default_device, load_model, resolve_dtype
from pronghorn.loading.weights import bitsandbytes_config
from pronghorn.models.report import LOADED_BY
from pronghorn.precision.loader import check_weights, checkpoint

PIECE = 16 * 2**20
"""Bytes that `read` asks for at a time."""
STREAMS = 8
"""Threads of `read in streams`."""
STAGE = 128 * 2**20
"""Bytes of each of `staged`'s two buffers."""


def read(folder: Path) -> None:
    """Read all weights' files from end to end."""
    buffer = memoryview(bytearray(PIECE))
    for file in check_weights(folder):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def read_in_streams(folder: Path) -> None:
    """Read the same by several threads, each every eighth piece."""

    def stream(file: Path, first: int) -> None:
        buffer = memoryview(bytearray(PIECE))
        with file.open("rb", buffering=0) as opened:
            for start in range(first * PIECE, file.stat().st_size, STREAMS * PIECE):
                os.preadv(opened.fileno(), [buffer], start)

    with ThreadPoolExecutor(STREAMS) as threads:
        list(threads.map(lambda each: stream(*each), product(check_weights(folder), range(STREAMS))))


def copied(folder: Path) -> None:
    """Copy each tensor to the device, straight from its mapped file, and drop it."""
    for stored in checkpoint(folder):
        stored.read().to(default_device(), copy=True)


def staged(folder: Path) -> None:
    """Copy each tensor to the device through pinned buffers: while one is copied to the device, the other is filled."""
    device = default_device()
    on_cuda = device.type == "cuda"
    buffers = [torch.empty(STAGE, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]
    free: list[Any] = [None, None]
    turn = 0
    for stored in checkpoint(folder):
        source = stored.read().contiguous().view(-1).view(torch.uint8)
        target = torch.empty_like(source, device=device)
        for start in range(0, source.numel(), STAGE):
            part = source[start : start + STAGE]
            if free[turn] is not None:
                free[turn].synchronize()
            buffer = buffers[turn][: part.numel()]
            buffer.copy_(part)
            target[start : start + STAGE].copy_(buffer, non_blocking=True)
            if on_cuda:
                free[turn] = torch.cuda.Event()
                free[turn].record()
            turn = 1 - turn


def drop(folder: Path) -> None:
    """Ask the system to drop the files from its page cache."""
    for file in check_weights(folder):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_pronghorn(folder: Path) -> Any:
    """Load through the house's loader."""
    model, _ = load_model(folder, dtype="bfloat16", max_seq_length=16, load_in_4bit=True)
    assert model.__dict__[LOADED_BY] == "", model.__dict__[LOADED_BY]
    return model


def by_transformers(folder: Path) -> Any:
    """Load as transformers does by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device, config = default_device(), AutoConfig.from_pretrained(folder)
    asked = bitsandbytes_config(config, True, resolve_dtype("bfloat16", device))
    options = {"quantization_config": asked, "device_map": {"": device}}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


WAYS: dict[str, Callable[[Path], Any]] = {
    "read": read, "read in streams": read_in_streams, "copied": copied, "staged": staged,
    "pronghorn": by_pronghorn, "transformers": by_transformers,
}  # fmt: skip


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Return seconds by way and state of the page cache, and the device's peak and rest in bytes."""
    seconds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    on_cuda = torch.cuda.is_available()
    by_pronghorn(folder)  # imports, and kernels compiled
    for _ in range(repeats):
        for state in ("cold", "warm"):
            for name, way in WAYS.items():
                gc.collect()
                if on_cuda:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                if state == "cold":
                    drop(folder)
                else:
                    read(folder)
                started = time.perf_counter()
                model = way(folder)
                if on_cuda:
                    torch.cuda.synchronize()
                    memory |= {f"{name} peak": torch.cuda.max_memory_allocated()}
                    memory |= {f"{name} rest": torch.cuda.memory_allocated()}
                seconds.setdefault(f"{state} {name}", []).append(time.perf_counter() - started)
                del model
    return {"seconds": {name: round(statistics.median(each), 4) for name, each in seconds.items()}, "memory": memory}


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="Qwen3-14B", help="a known shape")
    parser.add_argument("--checkpoints", type=Path, required=True, help="where random weights are kept")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def main(given: argparse.Namespace) -> None:
    """Print one JSON object, and write it."""
    check_out(given.out)
    check_model(given.model)
    folder = checkpoint_of(given.model, given.checkpoints, 0)
    measured = measure(folder, given.repeats)
    seconds = measured["seconds"]
    size = sum(file.stat().st_size for file in check_weights(folder))
    ratios = {state: round(seconds[f"{state} pronghorn"] / seconds[f"{state} read"], 3) for state in ("cold", "warm")}
    report = {"schema": "pronghorn-load-v1", "model": given.model, "file bytes": size, "over reading": ratios}
    report |= measured | {"device": device_name(), "versions": versions(), "commit": given.commit}
    print(json.dumps(report, indent=1))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run(arguments, main)
