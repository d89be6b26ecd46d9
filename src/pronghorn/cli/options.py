"""Arguments that several commands share, and what goes with them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from pronghorn.cli.console import Console
from pronghorn.environment import API_KEY
from pronghorn.errors import ConfigError
from pronghorn.state import remedy_of

RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE", help="YAML file that says what to train, on which data, and where the result goes."
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Change keys of the recipe, for this call only.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
Method = Annotated[
    Literal["lora", "qlora", "full"],
    typer.Option(
        case_sensitive=False, help="lora: rank 16 on all linears; qlora: the same over NF4 weights; full: every weight."
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of random weights, adapters and tokens.")]
Checkpoints = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write checkpoints to this folder, and reuse those in it.", file_okay=False),
]

Timeout = Annotated[float, typer.Option(min=0.1, help="With --served: how many seconds an answer may take.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar=API_KEY, show_default=False, help="With --served: the server's key, if it has one."),
]
"""Best given by the environment: other users of the machine see a command's arguments."""


def progress() -> Callable[[str], None]:
    """Make a function that prints on stderr what is being done, and after how many seconds."""
    console, began = Console(stderr=True, highlight=False), time.monotonic()
    return lambda text: console.print(f"{time.monotonic() - began:4.0f} s  {text}", style="dim", markup=False)


def tell_next(console: Console, recipe: Path) -> None:
    """Print what follows a recipe that was written, as a shell takes it."""
    name = shlex.quote(str(recipe))
    console.print(f"Next: pronghorn data inspect {name}, then pronghorn train {name}", markup=False)


def write_new(path: Path, text: str, otherwise: str = "give another name") -> None:
    """Write a whole file that isn't there yet, or nothing.

    Args:
        otherwise: what to do if it is.

    Raises:
        ConfigError: it is there, or its folder can't be written to.
    """
    try:
        file = path.open("x", encoding="utf-8")
        try:
            with file:
                file.write(text)
        except BaseException:
            path.unlink()  # half a recipe can be a recipe
            raise
    except FileExistsError:
        raise ConfigError(f"{path} already exists", otherwise) from None
    except OSError as error:
        remedy = remedy_of(error, "give a name in a folder that is there, and that you may write to")
        raise ConfigError(f"{path} can't be written ({error.strerror})", remedy) from None
