"""Folders that appear whole or not at all, and the tokenizer in them; a full disk is an error that says so."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pronghorn import state
from pronghorn.errors import ConfigError, PronghornError, TrainingError

_NAMED: ContextVar[tuple[Path, Path] | None] = ContextVar("_NAMED", default=None)
"""Where the folder being written has its scratch files, and what whoever asked for it calls it."""


def refuse_filled(target: Path) -> None:
    """Refuse to write a folder where something is (ConfigError)."""
    if os.path.exists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} already exists", "choose another folder or delete it")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Write into a folder beside `target` that takes its place when the block ends well, as `state.new_folder`.

    Errors of a folder inside another one name the outer folder, which is the one that is known.

    Yields:
        The folder to write into.
    Raises:
        TrainingError: the disk is full, or no folder can be made or moved there, or no file in it.
    """
    outer = _NAMED.get()
    named = outer[1] if outer is not None and target.is_relative_to(outer[0]) else target
    ours, scratch = True, None  # what goes wrong outside the block
    try:
        # raised inside, while what filled the disk is still there, and outside for the flush and the move
        with full_disk(named), state.new_folder(target) as folder, full_disk(named):
            ours, scratch = False, folder.parent
            before = _NAMED.set((folder.parent, named))
            try:
                yield folder
            finally:
                _NAMED.reset(before)
            ours = True
    except OSError as error:
        within = scratch is not None and str(error.filename).startswith(f"{scratch}/")
        if not ours and (not within or error.errno == errno.ENOENT):  # of a file that is read, or never was written
            raise
        raise TrainingError(
            f"{named} can't be written ({error.strerror or error})",
            "fix the path, its rights or the disk, or name another folder; what was there before is untouched",
        ) from error


@contextmanager
def full_disk(target: Path) -> Iterator[None]:
    """Tell of a full disk, and of a file that may not be so large, by a TrainingError, where something is written for
    `target`."""
    try:
        yield
    except Exception as error:
        kept = "try again; what was there before is untouched"
        if disk_is_full(error, target):
            raise TrainingError(f"the disk of {target} is full", f"free some space and {kept}") from error
        if _is_cut_off(error):
            raise TrainingError(
                f"a file of {target} can't be written whole",
                f"raise the quota, ulimit -f or the file system's limit of a file's size, whichever it is, and {kept}",
            ) from error
        raise


def _is_cut_off(error: Exception) -> bool:
    """Tell whether the system took only a part of a file; of torch's error only the place says so, of numpy's the
    text."""
    if isinstance(error, PronghornError):
        return False
    too_large = getattr(error, "errno", None) == errno.EFBIG or os.strerror(errno.EFBIG) in str(error)
    cut = isinstance(error, OSError) and re.fullmatch(r"\d+ requested and \d+ written", str(error)) is not None
    return too_large or cut or (isinstance(error, RuntimeError) and "inline_container.cc" in str(error))


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Tell whether that, or a quota, is why writing into `folder` failed. Of safetensors' error only the text says so;
    torch's and numpy's say no more than that a file isn't whole."""
    if isinstance(error, PronghornError):
        return False
    if state.is_full(error):
        return True
    # it may not have come so far as to make the folder
    made = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    tells_nothing = isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno is None)
    return tells_nothing and shutil.disk_usage(made).free < 2**20


def write_index(folder: Path, split: Any, **metadata: Any) -> None:
    """Write which of several files holds which tensor, as `split_torch_state_dict_into_shards` has it."""
    if split.is_sharded:
        index = {"metadata": {**metadata, **split.metadata}, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer beside a model. Its chat template is the processor's, too, so the original's is taken out of the
    older places, in which a processor looks first."""
    tokenizer.save_pretrained(folder)
    if getattr(tokenizer, "chat_template", None):
        forget_older_templates(folder)


def forget_older_templates(folder: Path) -> None:
    """Take a processor's chat template out of the older places, in which it looks before chat_template.jinja."""
    (folder / "chat_template.json").unlink(missing_ok=True)
    path = folder / "processor_config.json"
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if table.pop("chat_template", None) is not None:
        path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
