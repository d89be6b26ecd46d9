"""Files that outlive a process: written whole or not at all, versioned, locked, and checked before they are trusted.

Everything that Pronghorn keeps on disk goes through here: `run.json`, journals, checkpoints, adapters, token caches,
pages and results. Temporary names are random and created exclusively, so a planted link is never followed, and they end
in `.tmp`, so `clear_leftovers` finds what a killed process left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pronghorn.errors import ConfigError, DataError, causes

MANIFEST = "manifest.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Of a disk, or a quota, that is full."""
_NO_ROOM = (*map(os.strerror, FULL), "Not enough disk space")
"""What libraries of Rust, and `datasets`, say of one."""
_HELD = "held"
"""The file in a temporary folder that its process locks, so that what a dead one left is known."""
_TEMPORARY = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{16}\.(?P<kind>tmp|old)")
_CHUNK = 2**20
"""Bytes that a digest reads at a time: they stay in the processor's cache, which 2**24 in new memory took four times
as long for."""


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`, flush it to the disk, and rename it to `path` when the block ends well.

    A link at `path` stays a link: the file that it leads to is replaced. An exception removes the temporary file.

    Yields:
        The binary file to write.
    Raises:
        OSError: the file can't be made, written or renamed.
    """
    target = path.resolve()
    temporary = _temporary(target, "tmp")
    opened = temporary.open("x+b")
    try:
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        flush(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> Path:
    """Write a whole text file or nothing, and the folders around it. Characters that UTF-8 lacks become `?`.

    Raises:
        OSError: as `new_file`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        file.write(text.encode("utf-8", errors="replace"))
    return path


def write_json(path: Path, schema: str, table: dict[str, Any]) -> Path:
    """Write `table` with its schema's name as a whole JSON file or not at all.

    Raises:
        OSError: as `new_file`. ValueError: a NaN or an infinity, which JSON lacks.
    """
    text = json.dumps({**table, "schema": schema}, indent=1, ensure_ascii=False, allow_nan=False)
    return write_text(path, text + "\n")


def read_json(path: Path, schema: str, remedy: str) -> dict[str, Any]:
    """Read a JSON file that `write_json` wrote under the same schema.

    Raises:
        DataError: the file is missing, unreadable, not JSON, or of another schema; it ends with `remedy`.
    """
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror})", remedy) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})", remedy) from error
    found = table.get("schema") if isinstance(table, dict) else type(table).__name__
    if found != schema:
        raise DataError(f"{path}: schema {found!r}, not {schema!r}", remedy)
    return table


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a temporary folder beside `target` and move it into `target`'s place when the block ends well.

    An earlier `target` stays as it was until then, and after an exception. A link at `target` stays a link. What a
    killed process left of the same target is deleted first.

    Yields:
        The folder to write into. Its parent is temporary, too: scratch files have their place there.
    Raises:
        OSError: the folder can't be made or moved.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in target.parent.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or found["target"] != target.name or not path.is_dir():
            continue
        if _is_dead(path) or (found["kind"] == "old" and target.exists()):
            shutil.rmtree(path, ignore_errors=True)
    around = _temporary(target, "tmp")
    folder = around / target.name
    folder.mkdir(parents=True)
    try:
        with _held(around):
            yield folder
            for path in [*folder.rglob("*"), folder]:
                _share(path, folder)
                flush(path)
            move_into_place(folder, target)
    finally:
        shutil.rmtree(around, ignore_errors=True)


def move_into_place(folder: Path, target: Path) -> None:
    """Rename a finished folder to `target`; what had that name is put aside first and deleted last."""
    old = _temporary(target, "old")
    try:
        if target.exists():
            target.rename(old)
        folder.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that a half-deleted one never has its name."""
    old = _temporary(folder, "old")
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(folder: Path, is_whole: Callable[[Path], bool] | None = None) -> None:
    """Delete what killed processes left in `folder`; only the holder of the folder's lock may call this.

    Args:
        is_whole: says whether a folder that was put aside can be trusted. Such a folder comes back under its own name
            if nothing took its place.
    """
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        found = _TEMPORARY.fullmatch(path.name)
        if found is None:
            continue
        target = path.with_name(found["target"])
        if (path / _HELD).is_file() and not _is_dead(path):
            continue  # an export into the folder, which doesn't hold the folder's lock
        if found["kind"] == "old" and is_whole is not None and not target.exists() and is_whole(path):
            path.rename(target)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Tell whether a path has the name of a file or folder that was being written or deleted."""
    return _TEMPORARY.fullmatch(path.name) is not None


def is_full(error: BaseException | None) -> bool:
    """Tell whether a full disk, or a quota, raised an error or one that it comes from."""
    return any(
        getattr(each, "errno", None) in FULL or any(text in str(each) for text in _NO_ROOM) for each in causes(error)
    )


def remedy_of(error: OSError, otherwise: str) -> str:
    """Return what to do where something can't be written: make room if that is missing, else `otherwise`."""
    if error.errno in FULL:
        return "free some space and try again"
    if error.errno == errno.EFBIG:
        return "raise the quota, ulimit -f or the file system's limit of a file's size, and try again"
    return otherwise


def digest(path: Path) -> str:
    """Compute the xxh3_128 of a file's bytes, in hexadecimal. Raises OSError."""
    import xxhash

    state, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            state.update(chunk[:count])
    return state.hexdigest()


def write_manifest(folder: Path, schema: str, more: dict[str, Any] | None = None) -> None:
    """Write `manifest.json` with the size and digest of every file in `folder`, and flush all of them to the disk.

    Digests are taken right after the files were written, from the system's cache rather than the disk.
    """
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3_128": digest(path)}
        for path in _files(folder)
    }
    write_json(folder / MANIFEST, schema, {**(more or {}), "files": files})
    for path in [*_files(folder), folder]:
        flush(path)


def check_manifest(folder: Path, schema: str, remedy: str, contents: bool = True) -> dict[str, Any]:
    """Compare the files in `folder` with its manifest and return the manifest.

    Args:
        contents: compare digests; without it only names and sizes.
    Raises:
        DataError: no manifest, another schema, or a file that is missing, not a plain file, of another size or of other
            contents. Names the file and ends with `remedy`.
    """
    path = folder / MANIFEST
    table = read_json(path, schema, remedy)
    files = table.get("files")
    if not isinstance(files, dict):
        raise DataError(f"{path}: 'files' is not a table", remedy)
    for name, known in files.items():
        inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if not inside or not isinstance(known, dict) or {"bytes", "xxh3_128"} - known.keys():
            raise DataError(f"{path}: {name!r} is not an entry of a manifest", remedy)
        check_file(folder / name, known, remedy, contents)
    return table


def check_file(file: Path, known: dict[str, Any], remedy: str, contents: bool = True) -> None:
    """Compare a file with the `bytes` and `xxh3_128` that are known of it.

    Raises:
        DataError: as `check_manifest`.
    """
    size = file.stat().st_size if file.is_file() and not file.is_symlink() else None
    if size != known["bytes"]:
        what = "missing" if size is None else f"{size:,} bytes instead of {known['bytes']}"
        raise DataError(f"{file}: {what}", remedy)
    if contents and digest(file) != known["xxh3_128"]:
        raise DataError(f"{file}: its contents changed since it was written (digest differs)", remedy)


@contextmanager
def lock(path: Path, seconds: float, problem: str, remedy: str) -> Iterator[None]:
    """Hold an exclusive lock on `path` while the block runs; a process that is killed lets go of it.

    Args:
        seconds: how long to wait for another holder; -1 waits for ever.
    Raises:
        ConfigError: `problem` and `remedy`, when another process held it all that time.
        OSError: the lock's file can't be made.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(path).acquire(timeout=seconds)
    except Timeout:
        raise ConfigError(problem, remedy) from None
    with held:
        yield


def flush(path: Path) -> None:
    """Flush a file or folder to the disk. Does nothing for a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        if path.is_symlink():
            return
        raise
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)  # some file systems can't flush a folder
    finally:
        os.close(descriptor)


def _share(path: Path, folder: Path) -> None:
    """Let whoever may list a new folder read a file in it. Safetensors' are made for their owner alone, and a server
    is often another user; what the umask forbids is forbidden to the folder, too."""
    if path.is_file() and not path.is_symlink():
        path.chmod(path.stat().st_mode | (folder.stat().st_mode & 0o444))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the file in a temporary folder that tells others that its process lives; not where a disk has no locks."""
    made = folder / f"{_HELD}.new"
    with made.open("wb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made.rename(folder / _HELD)  # locked from the moment that it has its name
        yield


def _is_dead(folder: Path) -> bool:
    """Tell whether the process that wrote into a temporary folder is known to be gone."""
    try:
        with (folder / _HELD).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # locked; or it isn't there, or can't be locked, and nothing is known
        return False


def _temporary(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.{kind}")
