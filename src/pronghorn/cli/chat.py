"""`pronghorn chat`: sides' answers next to each other on a wide terminal, one below the other elsewhere; a server's as
it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pronghorn.cli.console import Console, starting
from pronghorn.cli.options import ApiKey, Timeout
from pronghorn.errors import ConfigError, DataError, PronghornError
from pronghorn.text import visible

if TYPE_CHECKING:
    from pronghorn.train.chat import ChatSession, ServedChat

WIDE = 100
LEAST = 0.001
"""The least temperature but 0: log-probabilities divided by much less are infinite."""
COMMANDS = {"/reset": "forget the conversation", "/quit": "leave (so do Ctrl-D and Ctrl-C)"}


def chat(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="Output folder of a finished run, folder of a merged model or an adapter, or GGUF file."
        ),
    ] = None,
    served: Annotated[
        str | None, typer.Option(metavar="URL", help="Talk to this running server instead of RUN.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="With --served: the model's name there.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt, instead of the recipe's.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float,
        typer.Option(min=0, max=100, help="How freely answers are drawn. 0 always takes the likeliest token."),
    ] = 0.0,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the Python code that comes with the model, as training did."),
    ] = False,
    timeout: Timeout = 60.0,
    api_key: ApiKey = None,
) -> None:
    """Talk to the trained model and its base, side by side, with the chat template of the training.

    RUN may also be an export. --served talks to a server with OpenAI's interface (vLLM, SGLang, llama-server, Ollama).

    Type questions, or pipe them in, one a line. /reset forgets the conversation. /quit, Ctrl-D or Ctrl-C ends the chat.
    A model without a chat template continues each question as plain text, without the earlier ones.

    [bold]Examples[/]

      pronghorn chat runs/demo

      echo "What does abs do?" | pronghorn chat runs/demo

      pronghorn chat --served http://127.0.0.1:8000
    """
    if (run is None) == (served is None):
        raise ConfigError("chat needs a run or --served, and one of them", "write e.g. pronghorn chat runs/mine")
    if model is not None and served is None:
        raise ConfigError("--model is the name of a server's model", "leave it out, or give --served URL")
    if 0 < temperature < LEAST:
        raise ConfigError(
            f"--temperature {temperature:g} is below {LEAST}", "give 0, which always takes the likeliest token"
        )
    if run is not None:
        from pronghorn.records.finished import check_finished

        check_finished(run)
    with starting():
        from pronghorn.train.chat import ServedChat, load_chat

    session: ChatSession | ServedChat
    if served is not None:
        from pronghorn.export.engines.http import Server
        from pronghorn.export.engines.openai import OpenAIServer

        server = OpenAIServer(Server(served, api_key, timeout), model)
        session = ServedChat(server, system, max_new_tokens, temperature)
    else:
        assert run is not None
        options = {} if system is None else {"system": system}
        session = load_chat(
            run,
            trust_remote_code=trust_remote_code,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            **options,
        )
    converse(session, Console())


def converse(session: ChatSession | ServedChat, console: Console) -> None:
    """Ask and answer until the input ends. A turn that can't be served is told at a terminal, which goes on.

    Raises:
        PronghornError: such a turn where the input is a pipe. DataError: a question that is not text.
    """
    if sys.stdin is None:  # it was closed when the program began
        return
    typed = console.is_terminal and sys.stdin.isatty()
    if typed:
        help_line = ", ".join(f"[bold]{command}[/]: {what}" for command, what in COMMANDS.items())
        console.print(f"Ask what you like. {help_line}.")
    while True:
        try:
            text = console.input("[bold]you>[/] " if typed else "").strip()
            text.encode()  # half a surrogate pair is how some locales read a byte that is not text
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        except UnicodeError as error:
            raise DataError(
                f"the question is not text in {sys.stdin.encoding} ({error})",
                "give UTF-8, with PYTHONIOENCODING=utf-8 where the terminal's own encoding is another",
            ) from error
        if text == "/quit":
            return
        if text == "/reset":
            session.reset()
            console.print("Forgotten.")
        elif text.startswith("/") and text[1:].isalpha():
            console.print(f"{escape(text)} is not a command: {', '.join(COMMANDS)}")
        elif text:
            try:
                _show(session, text, console)
            except KeyboardInterrupt:
                console.print("Stopped; the question is forgotten.")
            except PronghornError as error:
                if not typed:
                    raise
                console.print(Text(f"{error.problem}: {error.remedy}", style="yellow"))


def _show(session: ChatSession | ServedChat, text: str, console: Console) -> None:
    """Print all sides' replies."""
    if not hasattr(session, "replies"):
        try:
            for piece in session.pieces(text):
                console.print(Text(piece), end="", soft_wrap=True)
        finally:  # an error in the middle of an answer gets a line of its own
            console.print()
        return
    if not console.is_terminal or console.width < WIDE:
        for side, reply in session.replies(text):
            console.print(f"[bold]{side}:[/] {escape(reply)}", highlight=False, soft_wrap=True)
        return
    with console.status("answering"):
        replies = dict(session.replies(text))
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in replies:
        table.add_column(ratio=1)
    table.add_row(*(Panel(Text(visible(reply)), title=side, title_align="left") for side, reply in replies.items()))
    console.print(table)
