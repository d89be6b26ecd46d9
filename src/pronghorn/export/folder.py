"""Folders that appear whole or not at all; a full disk is an error that says so."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pronghorn import state
from pronghorn.errors import ConfigError, PronghornError, TrainingError


def refuse_filled(target: Path) -> None:
    """Refuse to write a folder where something is (ConfigError)."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} is there already", "choose another folder or delete it")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Write into a folder beside `target` that takes its place when the block ends well, as `state.new_folder`.

    Yields:
        The folder to write into.
    Raises:
        TrainingError: the disk is full.
    """
    # raised inside, while what filled the disk is still there, and outside for the flush and the move
    with full_disk(target), state.new_folder(target) as folder, full_disk(target):
        yield folder


@contextmanager
def full_disk(target: Path) -> Iterator[None]:
    """Tell of a full disk by a TrainingError, where something is written for `target`."""
    try:
        yield
    except Exception as error:
        if not disk_is_full(error, target):
            raise
        raise TrainingError(
            f"the disk of {target} is full", "free some space and save again; what was there before is untouched"
        ) from error


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Tell whether that is why writing into `folder` failed. Of safetensors' error only the text says so, and torch's
    says no more than that its file isn't whole."""
    if isinstance(error, PronghornError):
        return False
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
        return True
    made = next(path for path in (folder, *folder.absolute().parents) if path.exists())  # it may not have come so far
    return isinstance(error, RuntimeError) and shutil.disk_usage(made).free < 2**20
