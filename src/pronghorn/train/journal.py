"""What a run's folder knows about the run in it: enough to go on after anything, and to refuse to go on with another.

`journal.json` is written before training (the recipe, what the data hash to, the held-out loss before) and again when
training has ended, each time whole. `run.json` is there when everything is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pronghorn.config import Recipe
from pronghorn.device import versions
from pronghorn.errors import ConfigError, DataError
from pronghorn.train.record import FILE_NAME as RECORD

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

    recipe: dict[str, Any]
    data: dict[str, str] = field(default_factory=dict)
    """Hashes of the tokenised data, by split."""
    before: float | None = None
    """Held-out loss before training."""
    answers: list[str] = field(default_factory=list)
    """The sample prompts' answers before training."""
    judged: bool = False
    """`before` and `answers` are there."""
    trained: int | None = None
    """The last step, once training has ended."""
    stopped: str | None = None
    """Why it ended before the last planned step, if it did."""
    processes: int | None = None
    """How many trained, so that each step had the rows of so many."""
    resumed_at: list[int] = field(default_factory=list)
    """The steps at which the run was taken up again."""
    versions: dict[str, str] = field(default_factory=versions)
    schema: str = SCHEMA

    def write(self, output: Path) -> None:
        """Write `journal.json` into the run's folder; it appears whole or not at all."""
        output.mkdir(parents=True, exist_ok=True)
        unfinished = output / f".{FILE_NAME}.unfinished"
        unfinished.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(output / FILE_NAME)


def open_journal(output: Path, recipe: Recipe, allow: bool) -> Journal:
    """The journal of the unfinished run in `output`, or a new one where the folder is empty or missing.

    Raises:
        ConfigError: a finished run, a folder of something else or that can't be written, or (unless `allow`) another
            recipe.
        DataError: a journal that can't be read.
    """
    path = output / FILE_NAME
    there = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ConfigError(f"train.output: {there} is no folder that can be written to", "choose another train.output")
    if (output / RECORD).exists():
        raise ConfigError(f"{output} already holds a finished run", "choose another train.output or delete the folder")
    if not path.exists():
        if output.exists() and any(path.name != LOCK for path in output.iterdir()):
            raise ConfigError(f"{output} is not empty, and no run was begun there", "choose another train.output")
        return Journal(recipe.to_dict())
    journal = _read(path)
    changed = changes(journal.recipe, recipe.to_dict())
    if changed and not allow:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in changed)
        raise ConfigError(
            f"{output} holds an unfinished run of another recipe: {listed}",
            "put them back, choose another train.output, or give --allow to go on with the changed recipe",
        )
    if changed:
        journal.trained = journal.stopped = None  # there may be more to train now
    journal.recipe = recipe.to_dict()
    return journal


def changes(earlier: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, earlier value, value now) of every recipe key that differs and isn't free to."""
    found = []
    for section in [*earlier, *(section for section in now if section not in earlier)]:
        old, new = earlier.get(section, {}), now.get(section, {})
        for key in [*old, *(key for key in new if key not in old)]:
            name = f"{section}.{key}"
            if old.get(key) != new.get(key) and section not in FREE and name not in FREE:
                found.append((name, old.get(key), new.get(key)))
    return found


def check_data(journal: Journal, split: str, key: str, allow: bool) -> None:
    """Note what the data of `split` hash to; refuse other data than the run began with, unless `allow`."""
    earlier = journal.data.setdefault(split, key)
    if earlier != key and not allow:
        raise ConfigError(
            f"data.{split}: the data, the tokenizer or the chat template changed since the run began",
            "put them back, choose another train.output, or give --allow to go on with the data as they are",
        )
    journal.data[split] = key


@contextmanager
def sole_run(output: Path) -> Iterator[None]:
    """Within it no other run writes into `output`; one that is killed lets go of it.

    Raises:
        ConfigError: another one does.
    """
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / LOCK)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise ConfigError(
            f"another process trains the run in {output}",
            "wait for it, or end it first: torchrun's processes go on when torchrun itself was killed",
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_processes(journal: Journal, count: int, allow: bool) -> None:
    """Note how many processes train; refuse another number than the run began with, unless `allow`."""
    if journal.processes not in (None, count) and not allow:
        raise ConfigError(
            f"the run began with {journal.processes} processes and would go on with {count}, its steps with other rows",
            "start as many, choose another train.output, or give --allow to go on with these",
        )
    journal.processes = count


def _read(path: Path) -> Journal:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})", "choose another train.output") from error
    if not isinstance(table, dict) or table.get("schema") != SCHEMA:
        found = table.get("schema") if isinstance(table, dict) else type(table).__name__
        raise DataError(
            f"{path}: schema {found!r}, not {SCHEMA!r}", "go on with the version that began the run, or start another"
        )
    return Journal(**table)
