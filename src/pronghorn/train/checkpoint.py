"""Checkpoints that are whole or not there, and that know which model they are of.

A checkpoint is written into a folder aside, with a manifest of its files as the last of them, flushed to the disk and
renamed to `checkpoint-N`: a process killed at any moment leaves earlier ones as they were. Before one is loaded, its
manifest is compared with its files (sizes: what a full disk or an interrupted copy cuts short) and with the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pronghorn.errors import DataError

MANIFEST = "manifest.json"
SCHEMA = "pronghorn-checkpoint-v1"
ASIDE = ".unfinished"
"""The folder, beside the checkpoints, that one is written into."""


@dataclass(frozen=True)
class Fingerprint:
    """What a checkpoint's weights belong to, as hashes."""

    trainable: str
    """Names, shapes and dtypes of the trainable tensors."""
    frozen: str
    """The same of the frozen ones, with the first values of each: training never moves them."""

    @classmethod
    def of(cls, model: Any) -> Fingerprint:
        """Of a model as it is before DDP or FSDP wrap it. Waits for the device once."""
        trainable: list[str] = []
        frozen: list[str] = []
        values: list[torch.Tensor] = []
        for name, parameter in sorted(model.named_parameters()):
            line = f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            (trainable if parameter.requires_grad else frozen).append(line)
            if not parameter.requires_grad and parameter.numel() and not parameter.is_meta:
                values.append(parameter.detach().reshape(-1)[:8].double())
        sample = torch.cat(values).cpu().numpy().tobytes() if values else b""
        return cls(_digest("\n".join(trainable).encode()), _digest("\n".join(frozen).encode() + sample))


def seal(folder: Path, fingerprint: Fingerprint) -> None:
    """Write the manifest of a finished folder and flush every file to the disk."""
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in _files(folder)}
    table = {"schema": SCHEMA, "model": asdict(fingerprint), "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for path in [*_files(folder), folder]:
        _flush(path)


def publish(aside: Path, target: Path) -> None:
    """Move a sealed folder to its place; one of the same name is there until the new one is."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    _flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def verify(folder: Path, fingerprint: Fingerprint) -> None:
    """Refuse a checkpoint that is damaged or of another model; one without a manifest (stock TRL's) passes.

    Raises:
        DataError: naming the file, its size and what it should be, or which weights differ.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        return
    try:
        table = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(manifest, f"not valid JSON ({error})") from error
    if not isinstance(table, dict) or table.get("schema") != SCHEMA:
        found = table.get("schema") if isinstance(table, dict) else type(table).__name__
        raise DataError(
            f"{manifest}: schema {found!r}, not {SCHEMA!r}", "resume with the version that wrote it, or start anew"
        )
    for name, size in table["files"].items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise _damaged(file, "missing" if found is None else f"{found:,} bytes instead of {size:,}")
    for part, ours in asdict(fingerprint).items():
        if table["model"][part] != ours:
            raise DataError(
                f"{folder} is a checkpoint of another model: its {part} weights have other names, shapes"
                + (" or dtypes" if part == "trainable" else ", dtypes or values"),
                "name the model and adapter that it was made with, or choose another train.output",
            )


def checkpoints(output: Path) -> list[Path]:
    """The checkpoints in a run's folder, earliest step first."""
    found = [path for path in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimiser steps done when it was saved."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def keep_newest(output: Path, count: int | None, best: Path | None) -> None:
    """Delete all but the last `count` checkpoints that were written (None, or below 1 as in transformers: delete none)
    and the `best`."""
    # not by step: a training begun anew in the folder of a longer one would lose each of its own at once
    found = sorted(checkpoints(output), key=lambda path: path.stat().st_mtime_ns)
    for path in [] if count is None or count < 1 else found[: max(len(found) - count, 0)]:
        if best is None or path.name != best.name:
            old = path.with_name(f".{path.name}.old")
            path.rename(old)  # a half-deleted checkpoint must not look like one
            shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(output: Path) -> None:
    """Remove what a killed process was writing or deleting, and bring back what it had put aside."""
    shutil.rmtree(output / ASIDE, ignore_errors=True)
    for old in output.glob(".checkpoint-*.old"):
        target = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        whole = not target.exists() and (old / MANIFEST).exists() and _is_whole(old)
        old.rename(target) if whole else shutil.rmtree(old, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def _damaged(file: Path, what: str) -> DataError:
    return DataError(
        f"{file}: {what}: the checkpoint is damaged",
        f"delete {file.parent.name} and run again: training goes on from the checkpoint before it, or from the start",
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
