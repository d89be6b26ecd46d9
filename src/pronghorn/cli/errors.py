"""How every command ends when something goes wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from pronghorn.errors import PronghornError, RunStopped

INTERRUPTED = 130
"""The exit code of a program ended by Ctrl-C (128 + SIGINT)."""


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Pronghorn's own errors, and memory that ran out, as two lines and exit code 1; Ctrl-C as one line and 130. Others
    stay as they are.

    Other libraries' notices to programmers (deprecations) are shown with --debug only.
    """
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore", FutureWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except RunStopped as stop:
        _stderr().print(f"{escape(stop.problem)}; {escape(stop.remedy)}.")
        raise typer.Exit(128 + stop.signal) from None
    except PronghornError as error:
        if debug:
            raise
        console = _stderr()
        console.print(f"[bold red]error:[/] {escape(error.problem)}")
        console.print(f"[bold]remedy:[/] {escape(error.remedy)}")
        raise typer.Exit(1) from None
    except RuntimeError as error:
        from pronghorn.device import is_out_of_memory

        if debug or not is_out_of_memory(error):
            raise
        console = _stderr()
        console.print(f"[bold red]error:[/] memory ran out: {escape(str(error))}")
        less = "shorter rows (model.max_seq_length, --tokens), a quantised base, or nothing else on the device"
        console.print(f"[bold]remedy:[/] {less}; pronghorn plan tells what fits")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if debug:
            raise
        _stderr().print("Interrupted. What is in the output folder is whole; what was being written is not there.")
        raise typer.Exit(INTERRUPTED) from None


def _stderr() -> Console:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.show_cursor()  # a progress bar that was torn down may have hidden it
    return console
