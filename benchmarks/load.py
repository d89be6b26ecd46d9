"""Loading, and NF4 quantise-on-load, against reading the same files: with the page cache dropped, and warm.

    python -m benchmarks.load --model Qwen3-14B --checkpoints DIR --out result.json

A checkpoint with random weights is written first. `read` reads its safetensors files from end to end and does nothing
with them, `read in streams` does so by several threads; `copied` copies each tensor from the mapped file to the device
and drops it, `staged` does so through pinned buffers, `staged by half` through half of their bytes by half of the
threads; `pronghorn` is the house's loader, in 4 or 16 bits; `transformers` is `from_pretrained` with the same
quantisation. Each is tried `--repeats` times, by turns; times are seconds, medians. Files are dropped from the page
cache one by one (POSIX_FADV_DONTNEED), which asks the system and forces nothing: where it didn't, `cold read` is about
`warm read`.
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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import parser_of, run
from benchmarks.record import check_out
from pronghorn.device import device_name, versions
from pronghorn.diagnose.shapes import check_model, checkpoint_of
from pronghorn.loading.load import default_device, find_model, resolve_dtype
from pronghorn.loading.one_by_one import load_one_by_one
from pronghorn.loading.staging import BYTES, THREADS, Staging
from pronghorn.loading.weights import bitsandbytes_config
from pronghorn.models.families import check_config
from pronghorn.precision.loader import check_weights, checkpoint

SCHEMA = "pronghorn-load-v1"
PIECE = 16 * 2**20
"""Bytes that `read` asks for at a time."""
STREAMS = 8
"""Threads of `read in streams`."""


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


def staged(folder: Path, shares: int = 1) -> None:
    """Copy each tensor to the device through pinned buffers, as the house's loader does, of a part of their bytes."""
    with Staging(default_device(), BYTES // shares, threads=THREADS // shares) as staging:
        for stored in checkpoint(folder):
            staging.copy(stored, stored.dtype)


def drop(folder: Path) -> None:
    """Ask the system to drop the files from its page cache."""
    for file in check_weights(folder):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_pronghorn(folder: Path, bits: int) -> Any:
    """Load through the house's loader."""
    device = default_device()
    dtype, found = resolve_dtype("bfloat16", device), find_model(folder, max_seq_length=16)
    asked = bitsandbytes_config(found.config, bits == 4, dtype)
    attention = check_config(found.config).load_attention
    model, reason = load_one_by_one(found.name, found.config, asked, dtype, device, found.hub, attention, None)
    assert model is not None, reason
    return model


def by_transformers(folder: Path, bits: int) -> Any:
    """Load as transformers does by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config, device = AutoConfig.from_pretrained(folder), default_device()
    asked = bitsandbytes_config(config, bits == 4, resolve_dtype("bfloat16", device))
    options: dict[str, Any] = {"quantization_config": asked} if asked is not None else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": device}, **options)


WAYS: dict[str, Callable[[Path], Any]] = {
    "read": read, "read in streams": read_in_streams, "copied": copied, "staged": staged,
    "staged by half": partial(staged, shares=2),
}  # fmt: skip
LOADERS: dict[str, Callable[[Path, int], Any]] = {"pronghorn": by_pronghorn, "transformers": by_transformers}


def measure(folder: Path, bits: int, repeats: int, states: tuple[str, ...]) -> dict[str, Any]:
    """Return seconds by way and state of the page cache, and the device's peak and rest in bytes; each time is printed,
    too, since the whole may be cut off."""
    ways = WAYS | {name: partial(loader, bits=bits) for name, loader in LOADERS.items()}
    seconds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    on_cuda = torch.cuda.is_available()
    by_pronghorn(folder, bits)  # imports, and kernels compiled
    for _ in range(repeats):
        for state in states:
            for name, way in ways.items():
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
                print(f"{state} {name}: {seconds[f'{state} {name}'][-1]:.2f} s", flush=True)
                del model
    return {"seconds": {name: round(statistics.median(each), 4) for name, each in seconds.items()}, "memory": memory}


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="Qwen3-14B", help="a known shape")
    parser.add_argument("--checkpoints", type=Path, required=True, help="where random weights are kept")
    parser.add_argument("--bits", type=int, choices=(4, 16), default=4, help="of the model's linears")
    parser.add_argument("--warm", action="store_true", help="leave the dropped page cache out")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def main(given: argparse.Namespace) -> None:
    """Print one JSON object, and write it."""
    check_out(given.out, SCHEMA)
    check_model(given.model)
    folder = checkpoint_of(given.model, given.checkpoints, 0)
    states = ("warm",) if given.warm else ("cold", "warm")
    measured = measure(folder, given.bits, given.repeats, states)
    seconds = measured["seconds"]
    size = sum(file.stat().st_size for file in check_weights(folder))
    ratios = {state: round(seconds[f"{state} pronghorn"] / seconds[f"{state} read"], 3) for state in states}
    report = {
        "schema": SCHEMA,
        "model": given.model,
        "bits": given.bits,
        "file bytes": size,
        "over reading": ratios,
    }
    report |= measured | {"device": device_name(), "versions": versions(), "commit": given.commit}
    print(json.dumps(report, indent=1))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run(arguments, main)
