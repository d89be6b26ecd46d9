"""`pronghorn chat`: both sides' answers next to each other on a wide terminal, one below the other elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pronghorn.cli.console import Console
from pronghorn.errors import DataError
from pronghorn.text import visible

if TYPE_CHECKING:
    from pronghorn.train.talk import Talk

WIDE = 100
COMMANDS = {"/reset": "forget the conversation", "/quit": "leave (so do Ctrl-D and Ctrl-C)"}


def converse(talk: Talk, console: Console) -> None:
    """Ask and answer until the input ends. A turn that can't be served is told at a terminal, which goes on.

    Raises:
        DataError: such a turn where the input is a pipe.
    """
    typed = console.is_terminal and sys.stdin.isatty()
    if typed:
        told = ", ".join(f"[bold]{command}[/]: {what}" for command, what in COMMANDS.items())
        console.print(f"Ask what you like. {told}.")
    while True:
        try:
            text = console.input("[bold]you>[/] " if typed else "").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/quit":
            return
        if text == "/reset":
            talk.reset()
            console.print("Forgotten.")
        elif text.startswith("/") and text[1:].isalpha():
            known = ", ".join(COMMANDS)
            console.print(f"{escape(text)} is no command: {known}")
        elif text:
            try:
                _show(talk, text, console)
            except KeyboardInterrupt:
                console.print("Stopped; the question is forgotten.")
            except DataError as error:
                if not typed:
                    raise
                console.print(Text(f"{error.problem}: {error.remedy}", style="yellow"))


def _show(talk: Talk, text: str, console: Console) -> None:
    if not console.is_terminal or console.width < WIDE:
        for side, answer in talk.answers(text):
            console.print(f"[bold]{side}:[/] {escape(answer)}", highlight=False, soft_wrap=True)
        return
    with console.status("both are answering"):
        answers = dict(talk.answers(text))
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in answers:
        table.add_column(ratio=1)
    table.add_row(*(Panel(Text(visible(answer)), title=side, title_align="left") for side, answer in answers.items()))
    console.print(table)
