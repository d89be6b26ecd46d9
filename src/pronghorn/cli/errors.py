"""How every command ends when something goes wrong."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.markup import escape

from pronghorn.cli.console import Console
from pronghorn.cli.options import Debug
from pronghorn.cli.processes import leave_error
from pronghorn.environment import check_distributed
from pronghorn.errors import PronghornError, RunStopped, causes
from pronghorn.state import is_full
from pronghorn.text import clip

INTERRUPTED = 130
"""The exit code of a program ended by Ctrl-C (128 + SIGINT)."""


LONGEST = 360
"""Characters of a problem or a remedy, so that both are at most eight lines; of longer ones the middle is left out."""
MEMORY, THREADS, DISK, FILES = "memory", "threads", "disk space", "files that may be open"
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
"""Of files that a process, or the whole system, has open."""
_DISK_FAILS = (errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO)
"""What a disk or a file system fails with, wherever a file is read or written."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
_OF_TORCH = ("PytorchStreamWriter failed", "file write failed")
"""What torch.save says of any error of the disk, without saying which."""
_NO_ROOM = ("failed to map segment", "returned NULL without setting an exception")
"""What the loader says of a library for which no memory is left, and Python of an import that had none."""


def with_plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command that shows errors as `plain_errors` does, and has the option --debug, which it may take itself."""
    own = inspect.signature(command, eval_str=True).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    every = {**own, "debug": inspect.Parameter("debug", kind, default=False, annotation=Debug)}

    @functools.wraps(command)
    def run(*, debug: bool, **given: Any) -> None:
        with plain_errors(debug):
            command(**given, **({"debug": debug} if "debug" in own else {}))

    # which typer reads
    run.__signature__ = inspect.Signature([*every.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in every.items()}
    return run


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Show Pronghorn's own errors, memory, a disk or open files that ran out, and disks that fail, as two lines with
    exit code 1, and Ctrl-C as one with 130.

    Other errors stay as they are. Other libraries' notices to programmers (deprecations) are shown with --debug only.
    """
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore", FutureWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
            check_distributed()
            yield
    except RunStopped as stop:
        _stderr().print(f"{escape(stop.problem)}; {escape(stop.remedy)}.")
        raise typer.Exit(128 + stop.signal) from None
    except PronghornError as error:
        if debug:
            _raise(error)
        _tell(_ran_out(error, FILES, "") if _lacks_files(error) else error)
    except Exception as error:
        short_of = _short_of(error)
        if debug or (short_of is None and not _disk_fails(error)):
            _raise(error)
        if short_of is None:
            _tell(_failed(error))
        less = "shorter rows (model.max_seq_length, --tokens), a quantised base, or nothing else on the device"
        if short_of == THREADS:
            less = "raise the shell's limits (ulimit -v for memory, ulimit -u for threads)"
        _tell(_ran_out(error, short_of, f"{less}; pronghorn plan tells what fits"))
    except KeyboardInterrupt:
        if debug:
            raise
        whole = "Interrupted. What is in the output folder is whole; what was being written is not there."
        _stderr().print(f"{whole} The same command goes on, or begins again.")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def full_disk_told() -> Iterator[None]:
    """Show a disk that is full under the output of help, where no command runs yet, as two lines with exit code 1."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        _tell(_ran_out(error, DISK, ""))


def _ran_out(error: Exception, short_of: str, remedy: str) -> PronghornError:
    """Return the error that says what the machine had too little of."""
    if short_of == DISK:
        remedy = "free some space where files, temporary ones (TMPDIR) and this output go, and try again"
    if short_of == FILES:
        remedy = "raise the shell's limit (ulimit -n 1024) and run the same command again"
    said = " ".join(str(getattr(error, "problem", error)).split())  # without the remedy of an error of ours
    return PronghornError(f"{short_of} ran out: {said or type(error).__name__}", remedy)


def _short_of(error: BaseException | None) -> str | None:
    """Return what the machine had too little of, if that raised the error or one before it."""
    if is_full(error):
        return DISK
    if _lacks_files(error):
        return FILES
    for each in causes(error):
        if "can't start new thread" in str(each):
            return THREADS
        no_room = getattr(each, "errno", None) == errno.ENOMEM or any(text in str(each) for text in _NO_ROOM)
        if isinstance(each, MemoryError) or no_room:
            return MEMORY
        if isinstance(each, RuntimeError):
            from pronghorn.device import is_out_of_memory

            if is_out_of_memory(each):
                return MEMORY
    return None


def _disk_fails(error: BaseException | None) -> bool:
    """Tell whether an error, or one that it was made of, is of a disk or of what may be done on it."""
    while error is not None:
        said = _OF_RUST.search(str(error))
        number = int(said[1]) if said else getattr(error, "errno", None)
        if (number in _DISK_FAILS and (said or isinstance(error, OSError))) or any(t in str(error) for t in _OF_TORCH):
            return True
        error = error.__cause__
    return False


def _failed(error: Exception) -> PronghornError:
    """Return the error that says what a file or its disk refused."""
    said = " ".join(str(error).split())
    remedy = (
        "look at the rights, limits (ulimit -f) and quota where this command reads and writes, and at the disk (dmesg)"
    )
    return PronghornError(f"a file can't be read or written: {said}", f"{remedy}; then run the same command again")


def _lacks_files(error: BaseException | None) -> bool:
    """Tell whether too many open files raised an error or one that it comes from."""
    too_many = os.strerror(errno.EMFILE)
    return any(getattr(each, "errno", None) in _TOO_MANY or too_many in str(each) for each in causes(error))


def _raise(error: BaseException) -> NoReturn:
    """Raise an error as it is; leave it to the process that started this one, if it is one of several."""
    if leave_error(error):
        raise typer.Exit(1) from None
    raise error


def _tell(error: PronghornError) -> NoReturn:
    """Print a problem and its remedy, and leave with code 1."""
    if leave_error(error):
        raise typer.Exit(1) from None
    console = _stderr()
    console.print(f"[bold red]error:[/] {escape(clip(error.problem, LONGEST))}")
    console.print(f"[bold]remedy:[/] {escape(clip(error.remedy, LONGEST))}")
    raise typer.Exit(1) from None


def _stderr() -> Console:
    """Make the console of error messages."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.show_cursor()  # a progress bar that was torn down may have hidden it
    return console
