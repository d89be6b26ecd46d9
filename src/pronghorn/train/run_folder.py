"""The folder of a run: locked, cleared up and checked before anything in it is trusted."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.prompt import Confirm

from pronghorn import state
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, DataError, TrainingError
from pronghorn.records.record import FILE_NAME as RECORD
from pronghorn.records.record import RunRecord
from pronghorn.records.report import FILE_NAME as REPORT
from pronghorn.records.report import is_final, rewrite_report
from pronghorn.train.checkpoint import checkpoints, clear_leftovers, verify
from pronghorn.train.run_state import FILE_NAME as STATE
from pronghorn.train.run_state import RunState, changed_keys, open_run_state, recipe_hash

LOCK = ".lock"
PATIENCE = 5.0
"""Seconds that a process which was just killed may take to be gone."""


def open_folder(
    recipe: Recipe, console: Console, locked: ExitStack, allow: bool, allow_older: bool, overwrite: bool = False
) -> tuple[RunState, Path | None] | RunRecord:
    """Lock the run's folder and return its state and newest checkpoint, or the record if the run was finished.

    Args:
        overwrite: delete what an earlier run left there first; a folder of anything else is refused as ever.
    """
    output = Path(recipe.train.output)
    _make_folder(output)
    lock_folder(output, locked)
    clear_leftovers(output)
    if overwrite:
        _delete_run(output)
    if (output / RECORD).exists():
        return _complete_finished_run(recipe, output, console)
    _refuse_other_folders(output)
    return open_run_state(output, recipe, allow), _newest_checkpoint(recipe, output, console, allow, allow_older)


def _complete_finished_run(recipe: Recipe, output: Path, console: Console) -> RunRecord:
    """Write the report that a finished run of the same recipe lacks, and judge the run again.

    Raises:
        ConfigError: nothing is missing, or it is a run of another recipe.
        DataError: `run.json` can't be read.
        TrainingError: the held-out loss did not fall as asked for.
    """
    record = RunRecord.read(output)
    if not changed_keys(record.recipe, recipe.to_dict()):
        lacks_report = recipe.report.html and not is_final(output / REPORT)
        if lacks_report:
            rewrite_report(output)
            console.print(f"The run in {escape(str(output))} was finished; its report was missing and is written")
        must_have_improved(recipe, record.heldout)
        if lacks_report:
            return record
    inside = next((part for part in ("adapter", "model") if (output / part).is_dir()), "adapter")
    raise ConfigError(
        f"{output} already holds a finished run",
        f"choose another train.output (model.name={output / inside} there trains it on), or give --overwrite",
    )


def _delete_run(output: Path) -> None:
    """Delete a run's files and folders, its state last: a deletion that is cut short can be done again."""
    left = [path for path in output.iterdir() if path.name != LOCK]
    try:
        for path in sorted(left, key=lambda path: path.name in (STATE, RECORD)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise _unwritable(output, error) from error


def _newest_checkpoint(recipe: Recipe, output: Path, console: Console, allow: bool, allow_older: bool) -> Path | None:
    """Return the checkpoint to go on from, if there is one, whose contents are what its manifest says.

    Raises:
        DataError: it is damaged, and no older one is there or may be taken.
        ConfigError: it is of another recipe.
    """
    candidates = checkpoints(output)
    while candidates:
        newest = candidates.pop()
        try:
            made_by = verify(newest).get("recipe")
        except DataError as error:
            if not candidates:
                raise DataError(error.problem, f"delete {newest.name} and run again, from the start") from error
            older = candidates[-1].name
            if not allow_older and console.is_terminal and sys.stdin is not None and sys.stdin.isatty():
                console.print(escape(error.problem))
                allow_older = Confirm.ask(f"Go on from {older}?", console=console, default=False)
            if not allow_older:
                raise DataError(
                    error.problem, f"give --allow-older to go on from {older}, or put the files back"
                ) from error
            console.print(f"[yellow]{escape(error.problem)}: going on from {older}[/]")
            continue
        if made_by != recipe_hash(recipe) and not allow:
            raise ConfigError(
                f"{newest} was trained by another recipe",
                "choose another train.output, or give --allow to go on from it with this recipe",
            )
        return newest
    return None


def _make_folder(output: Path) -> None:
    """Make the run's folder, which may be there; ConfigError where no folder can be, or is one of something else."""
    try:
        gone = next((path for path in (output, *output.parents) if path.is_symlink() and not path.exists()), None)
        if gone is not None:  # perhaps on a disk that isn't mounted; mkdir would say that the file exists
            raise FileNotFoundError(errno.ENOENT, f"{gone} links to {gone.readlink()}, which is not there")
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:  # a loop of links, a NUL character
        raise _unwritable(output, error) from error
    _refuse_other_folders(output)


def lock_folder(output: Path, locked: ExitStack) -> None:
    """Hold the lock of a run's folder until `locked` closes, so that no other run reads or writes in it; a killed
    process lets go of it.

    Raises:
        ConfigError: another one does.
    """
    problem = f"another process trains the run in {output}"
    remedy = "wait for it, or end it first: torchrun's processes go on when torchrun itself was killed"
    try:
        locked.enter_context(state.lock(output / LOCK, PATIENCE, problem, remedy))
    except OSError as error:
        raise _unwritable(output, error) from error


def _unwritable(output: Path, error: Exception) -> ConfigError:
    """Return the error of a folder that can't be made or written to."""
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"train.output: {output} is not a folder that can be written to ({reason})", "choose another train.output"
    )


def _refuse_other_folders(output: Path) -> None:
    """Refuse a folder with files in it but no run (ConfigError)."""
    has_run = any((output / name).exists() for name in (STATE, RECORD))
    if not has_run and (whole := checkpoints(output)):
        raise ConfigError(
            f"{output} has checkpoints, but no {STATE}, which says what they are of",
            f"bring it back; or train on from {whole[-1]} (model.name) in another train.output",
        )
    if not has_run and any(path.name != LOCK and not state.is_temporary(path) for path in output.iterdir()):
        raise ConfigError(f"{output} is not empty, and no run was begun there", "choose another train.output")


def must_have_improved(recipe: Recipe, heldout: dict[str, Any]) -> None:
    """Refuse a held-out loss that did not fall by `train.min_improvement`."""
    wanted, before, after = recipe.train.min_improvement, heldout.get("before"), heldout.get("after")
    if wanted is not None and before is not None and after is not None and not before - after >= wanted:
        raise TrainingError(
            f"the held-out loss went from {before:.4f} to {after:.4f}, which is not a fall of {wanted} or more",
            "train longer, or change train.learning_rate; the run is saved and its report tells more",
        )
