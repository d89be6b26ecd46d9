"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pronghorn.errors import TrainingError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Write into a folder beside `target`, which takes its place only when everything is written.

    An exception (a full disk, Ctrl-C) removes what was written and leaves an earlier `target` as it was.

    Yields:
        The folder to write into.
    Raises:
        TrainingError: the disk is full.
    """
    target = target.resolve()  # a link stays one: what it leads to is replaced, on its disk
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.writing")
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        aside.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        full = disk_is_full(error, aside)
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
        if full:
            raise TrainingError(
                f"the disk of {target} is full", "free some space and save again; what was there before is untouched"
            ) from error
        raise


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether that is why writing into `folder` failed. Of safetensors' error only the text tells, and torch's says no
    more than that its file isn't whole."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
        return True
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())  # it may not have come so far
    return isinstance(error, RuntimeError) and shutil.disk_usage(there).free < 2**20
