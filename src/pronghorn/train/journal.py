"""What a run's folder knows about the run in it: enough to go on after anything, and to refuse to go on with another.

`journal.json` is written before training (the recipe, what the data hash to, the held-out loss before) and again when
training has ended, each time whole. `run.json` is there when everything is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pronghorn import state
from pronghorn.config import Recipe
from pronghorn.device import versions
from pronghorn.errors import ConfigError
from pronghorn.train.record import FILE_NAME as RECORD
from pronghorn.train.record import read_table, write_table

FILE_NAME = "journal.json"
SCHEMA = "pronghorn-journal-v1"

LOCK = ".lock"
PATIENCE = 5.0
"""Seconds that a process which was just killed may take to be gone."""

FREE = (
    "report",
    "data.cache",
    "data.workers",
    "train.output",
    "train.max_minutes",
    "train.min_improvement",
    "train.save_steps",
    "train.save_minutes",
    "train.keep_checkpoints",
    "train.load_best",
    "train.logging_steps",
    "train.report_to",
)
"""Keys, or whole sections, that a resumed run may change: they change no step of the training."""


@dataclass
class Journal:
    """The state of an unfinished run."""

    recipe: dict[str, dict[str, Any]]
    data: dict[str, str] = field(default_factory=dict)
    """Hashes of the tokenised data, by split."""
    before: float | None = None
    """Held-out loss before training."""
    answers: list[str] = field(default_factory=list)
    """The sample prompts' answers before training."""
    judged: bool = False
    """`before` and `answers` are there."""
    trained: int | None = None
    """The last step, once training has ended; it holds as long as that step's checkpoint is the newest."""
    stopped: str | None = None
    """Why it ended before the last planned step, if it did."""
    processes: int | None = None
    """How many trained, so that each step had the rows of so many."""
    resumed_at: list[int] = field(default_factory=list)
    """The steps at which the run was taken up again."""
    versions: dict[str, str] = field(default_factory=versions)
    schema: str = SCHEMA

    def write(self, output: Path) -> None:
        """Write `journal.json` into the run's folder; TrainingError if it can't be written."""
        write_table(output / FILE_NAME, SCHEMA, asdict(self))


def open_journal(output: Path, recipe: Recipe, allow: bool) -> Journal:
    """Return the journal of the unfinished run in `output`, or a new one where nothing was begun.

    Only the holder of the folder's lock may call this.

    Raises:
        ConfigError: a folder of something else or, unless `allow`, of another recipe.
        DataError: a journal that can't be read.
    """
    path = output / FILE_NAME
    _refuse_other_folders(output)
    if not path.exists():
        return Journal(recipe.to_dict())
    remedy = "restore the file, go on with the version that began the run, or choose another train.output"
    journal = read_table(path, SCHEMA, Journal, remedy)
    changed = changes(journal.recipe, recipe.to_dict())
    if changed and not allow:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in changed)
        raise ConfigError(
            f"{output} holds an unfinished run of another recipe: {listed}",
            "put them back, choose another train.output, or give --allow to go on with the changed recipe",
        )
    if changed:
        journal.trained = journal.stopped = None  # there may be more to train now
    if journal.recipe.get("report") != recipe.to_dict()["report"]:
        journal.judged = False  # the loaded model, before a checkpoint's weights, answers the prompts of now
    if journal.judged and journal.before is None and recipe.data.eval is not None:
        journal.before = math.nan  # which JSON lacks
    journal.recipe = recipe.to_dict()
    return journal


def changes(earlier: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, earlier value, value now) of every recipe key that differs and isn't free to."""
    old, new = _bound(earlier), _bound(now)
    return [(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def recipe_hash(recipe: Recipe) -> str:
    """Hash the keys of a recipe that aren't free to change: checkpoints name the recipe that trained them by it."""
    bound = {key: value for key, value in _bound(recipe.to_dict()).items() if value is not None}
    return hashlib.blake2b(json.dumps(bound, sort_keys=True).encode(), digest_size=16).hexdigest()


def _bound(recipe: dict[str, Any]) -> dict[str, Any]:
    """The keys, as section.key, that a resumed run may not change."""
    flat = {f"{section}.{key}": value for section, keys in recipe.items() for key, value in keys.items()}
    return {key: value for key, value in flat.items() if key not in FREE and key.partition(".")[0] not in FREE}


def check_data(journal: Journal, split: str, key: str, allow: bool) -> None:
    """Note what the data of `split` hash to; refuse other data than the run began with, unless `allow`."""
    earlier = journal.data.setdefault(split, key)
    if earlier != key and not allow:
        raise ConfigError(
            f"data.{split}: the data, the tokenizer or the chat template changed since the run began",
            "put them back, choose another train.output, or give --allow to go on with the data as they are",
        )
    journal.data[split] = key


def check_output(output: Path) -> None:
    """Make the run's folder, which may be there; ConfigError where no folder can be, or is one of something else."""
    try:
        if output.resolve() == Path.cwd():
            raise ConfigError("train.output is the current folder", "give the run a folder of its own")
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL character
        raise _unwritable(output, error) from error
    _refuse_other_folders(output)


@contextmanager
def sole_run(output: Path) -> Iterator[None]:
    """Hold the lock of a run's folder: within it no other run reads or writes there; one that is killed lets go of it.

    Raises:
        ConfigError: another one does.
    """
    problem = f"another process trains the run in {output}"
    remedy = "wait for it, or end it first: torchrun's processes go on when torchrun itself was killed"
    with ExitStack() as held:
        try:
            held.enter_context(state.lock(output / LOCK, PATIENCE, problem, remedy))
        except OSError as error:
            raise _unwritable(output, error) from error
        yield


def _unwritable(output: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"train.output: {output} is no folder that can be written to ({reason})", "choose another train.output"
    )


def _refuse_other_folders(output: Path) -> None:
    """Refuse a folder with files in it but no run (ConfigError)."""
    ours = any((output / name).exists() for name in (FILE_NAME, RECORD))
    if not ours and any(path.name != LOCK and not state.is_temporary(path) for path in output.iterdir()):
        raise ConfigError(f"{output} is not empty, and no run was begun there", "choose another train.output")


def check_processes(journal: Journal, count: int, allow: bool) -> None:
    """Note how many processes train; refuse another number than the run began with, unless `allow`."""
    if journal.processes not in (None, count) and not allow:
        raise ConfigError(
            f"the run began with {journal.processes} processes and would go on with {count}, its steps with other rows",
            "start as many, choose another train.output, or give --allow to go on with these",
        )
    journal.processes = count
