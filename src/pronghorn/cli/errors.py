"""How every command ends when something goes wrong."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.markup import escape

from pronghorn.cli.console import Console
from pronghorn.cli.processes import leave_error
from pronghorn.errors import ConfigError, PronghornError, RunStopped
from pronghorn.text import clip

INTERRUPTED = 130
"""The exit code of a program ended by Ctrl-C (128 + SIGINT)."""


LONGEST = 360
"""Characters of a problem or a remedy, so that both are at most eight lines; of longer ones the middle is left out."""
MEMORY, THREADS = "memory", "threads"
_NO_ROOM = ("failed to map segment", "returned NULL without setting an exception")
"""What the loader says of a library for which no memory is left, and Python of an import that had none."""
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Show Pronghorn's own errors, and memory that ran out, as two lines with exit code 1, and Ctrl-C as one with 130.

    Other errors stay as they are. Other libraries' notices to programmers (deprecations) are shown with --debug only.
    """
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore", FutureWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
            _check_environment()
            yield
    except RunStopped as stop:
        _stderr().print(f"{escape(stop.problem)}; {escape(stop.remedy)}.")
        raise typer.Exit(128 + stop.signal) from None
    except PronghornError as error:
        if debug:
            _raise(error)
        _tell(error)
    except (RuntimeError, MemoryError, ImportError, OSError) as error:
        short_of = _short_of(error)
        if debug or short_of is None:
            _raise(error)
        less = "shorter rows (model.max_seq_length, --tokens), a quantised base, or nothing else on the device"
        if short_of == THREADS:
            less = "raise the shell's limits (ulimit -v for memory, ulimit -u for threads)"
        problem = f"{short_of} ran out: {' '.join(str(error).split()) or type(error).__name__}"
        _tell(PronghornError(problem, f"{less}; pronghorn plan tells what fits"))
    except KeyboardInterrupt:
        if debug:
            raise
        _stderr().print("Interrupted. What is in the output folder is whole; what was being written is not there.")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        _raise(error)


def _check_environment() -> None:
    """Refuse variables of torch.distributed that are no numbers, or left over from another program: torch would
    read them while training is built."""
    for name in _NUMBERS:
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit()):
            raise ConfigError(f"the environment's {name}={value!r} is no number", f"unset {name}, or start by torchrun")
    for name, harmless in (("WORLD_SIZE", "01"), ("LOCAL_RANK", "")):
        value = os.environ.get(name, "")
        if value not in ("", *harmless) and "MASTER_ADDR" not in os.environ:
            problem = f"the environment has {name}={value} of a distributed run, but no MASTER_ADDR"
            raise ConfigError(problem, f"unset {name}, or start by torchrun")


def _short_of(error: BaseException | None) -> str | None:
    """Return what the machine had too little of, if that raised the error or one before it."""
    while error is not None:
        if "can't start new thread" in str(error):
            return THREADS
        if (
            isinstance(error, MemoryError)
            or getattr(error, "errno", None) == errno.ENOMEM
            or any(text in str(error) for text in _NO_ROOM)
        ):
            return MEMORY
        if isinstance(error, RuntimeError):
            from pronghorn.device import is_out_of_memory

            if is_out_of_memory(error):
                return MEMORY
        error = error.__cause__ or error.__context__
    return None


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
