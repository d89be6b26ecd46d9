"""Checkpoints that are whole or not there, and that know which model and recipe they are of.

A checkpoint is written into a temporary folder, with a manifest of its files' digests as the last of them, flushed to
the disk and renamed to `checkpoint-N`: a process killed at any moment leaves earlier ones as they were. Before one is
loaded, its manifest is compared with its files, with the model and, by `pronghorn train`, with the recipe.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pronghorn import state
from pronghorn.errors import ConfigError, DataError
from pronghorn.models.families import base_causal_lm
from pronghorn.parallel.sharded import first_values, sharded

SCHEMA = "pronghorn-checkpoint-v2"


@dataclass(frozen=True)
class Fingerprint:
    """What a checkpoint's weights belong to, as hashes."""

    trainable: str
    """Names, shapes and dtypes of the trainable tensors."""
    frozen: str
    """The same of the frozen ones, with the first values of each: training never moves them."""

    @classmethod
    def of(cls, model: Any) -> Fingerprint:
        """Take the fingerprint of a model, before DDP or FSDP wrap it. Waits for the device once."""
        if (shared := sharded(base_causal_lm(model))) is not None:
            shared.put_back()  # packed weights that were moved, as trainers do, know their first values again
        trainable: list[str] = []
        frozen: list[str] = []
        values: list[torch.Tensor] = []
        for name, parameter in sorted(model.named_parameters()):
            line = f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            (trainable if parameter.requires_grad else frozen).append(line)
            if not parameter.requires_grad and parameter.numel() and not parameter.is_meta:
                values.append(first_values(parameter))
        sample = torch.cat(values).cpu().numpy().tobytes() if values else b""
        return cls(_digest("\n".join(trainable).encode()), _digest("\n".join(frozen).encode() + sample))


def seal(folder: Path, fingerprint: Fingerprint, recipe: str | None, step_rows: int) -> None:
    """Write the manifest of a finished folder, with the rows of a step and the recipe's hash if a recipe made it, and
    flush every file."""
    state.write_manifest(folder, SCHEMA, {"model": asdict(fingerprint), "recipe": recipe, "step_rows": step_rows})


def other_steps(folder: Path, step_rows: int) -> str | None:
    """Say that steps have other rows from here on than those of the training that wrote a checkpoint; None: they have
    as many, or it doesn't tell (stock TRL's).

    Raises:
        DataError: it has no optimiser state, or none of the learning rate's schedule, without which transformers loads
            neither and tells nobody.
    """
    if not [*folder.glob("optimizer.*"), *folder.glob("shared_optimizer-*")]:
        raise DataError(
            f"{folder} has no optimiser state to go on with (save_only_model=True)",
            "resume from one that was saved without it; or load these weights, and begin anew with them",
        )
    if not (folder / "scheduler.pt").is_file():
        raise DataError(
            f"{folder} has no scheduler.pt, the place in the learning rate's schedule to go on from",
            "copy the whole checkpoint again, or resume from another",
        )
    manifest = state.read_json(folder / state.MANIFEST, SCHEMA, "") if (folder / state.MANIFEST).exists() else {}
    if (before := manifest.get("step_rows", step_rows)) == step_rows:
        return None
    return (
        f"{folder.name} was saved by steps of {before} rows, and those of this training have {step_rows}: its place in "
        "the data is counted in steps, so some rows are trained twice or left out. To go on with the same steps keep "
        f"rows of a micro-batch x gradient_accumulation_steps x processes at {before}"
    )


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not a checkpoint of a trainer: a model's, an adapter's, or none.

    Raises:
        DataError: with what to give.
    """
    if not (folder / "trainer_state.json").is_file():
        raise DataError(
            f"{folder} is not a checkpoint to resume from: it has no trainer_state.json",
            "give a checkpoint-N folder of the trainer's output, or True for its newest; delete one that is not whole",
        )


def verify(folder: Path, contents: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint; DataError if that is missing or doesn't describe the files there."""
    remedy = f"delete {folder.name} and run again: training goes on from the checkpoint before it, or from the start"
    manifest = state.check_manifest(folder, SCHEMA, remedy, contents)
    rows = manifest.get("step_rows", 1)  # which earlier versions didn't write
    if type(rows) is not int or rows < 1:
        raise DataError(f"{folder / state.MANIFEST}: step_rows = {rows!r} is not a number of rows", remedy)
    return manifest


def check_model(folder: Path, manifest: dict[str, Any], fingerprint: Fingerprint) -> None:
    """Refuse the checkpoint of another model (DataError, naming which weights differ)."""
    made_with = manifest.get("model")
    for part, ours in asdict(fingerprint).items():
        if not isinstance(made_with, dict) or made_with.get(part) != ours:
            raise DataError(
                f"{folder} is a checkpoint of another model: its {part} weights have other names, shapes"
                + (" or dtypes" if part == "trainable" else ", dtypes or values"),
                "name the model and adapter that it was made with, or choose another train.output",
            )


def checkpoints(output: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, earliest step first."""
    folders = [path for path in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the optimiser steps done when it was saved."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def named(output: Path, resume: str | bool | None) -> str | None:
    """Return the checkpoint to go on from, if there is one to: by its name, or the last of a folder for True.

    Raises:
        ConfigError: the folder has none.
    """
    if not isinstance(resume, bool):
        return resume
    found = checkpoints(output) if resume else []
    if resume and not found:
        raise ConfigError(f"no checkpoint in {output}", "call train() to start from the beginning")
    return str(found[-1]) if found else None


def name_best(trainer_state: Any, output: Path, saved: str) -> None:
    """Let a trainer's state name the best checkpoint by its final place, not the one aside. Where the best step was not
    saved, or elsewhere, it stays the one before, as long as that is there."""
    best, before = output / f"checkpoint-{trainer_state.best_global_step}", trainer_state.best_model_checkpoint
    if best.is_dir() or best.name == saved:
        trainer_state.best_model_checkpoint = str(best)
    elif before is not None and not Path(before).is_dir():
        trainer_state.best_model_checkpoint = None


def keep_newest(output: Path, count: int | None, *spared: str, among: bool = False) -> None:
    """Delete all but the last `count` checkpoints that were written (None, or below 1 as in transformers: delete none)
    and those that are `spared` by name. `among`: these are among the `count`, as in transformers."""
    # not by step: a training begun anew in the folder of a longer one would lose each of its own at once
    oldest_first = sorted(checkpoints(output), key=lambda path: path.lstat().st_mtime_ns)
    more = 0 if count is None or count < 1 else max(len(oldest_first) - count, 0)
    others = [path for path in oldest_first if path.name not in spared]
    for path in others[:more] if among else oldest_first[:more]:
        if path in others:
            state.remove_folder(path)


def clear_leftovers(output: Path) -> None:
    """Remove what a killed process was writing or deleting, and bring back what it had put aside."""
    state.clear_leftovers(output, _is_whole)


def _is_whole(folder: Path) -> bool:
    try:
        verify(folder, contents=False)
    except DataError:
        return False
    return True


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
