"""The commands, each in a file of its own. Only typer and rich load at start; the rest where a command needs it."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pronghorn import __version__
from pronghorn.cli.bench import bench
from pronghorn.cli.chat import chat
from pronghorn.cli.convert import convert
from pronghorn.cli.data import inspect_data
from pronghorn.cli.doctor import doctor
from pronghorn.cli.options import grow_segments, stay_quiet
from pronghorn.cli.plan import plan
from pronghorn.cli.profile import profile
from pronghorn.cli.report import report
from pronghorn.cli.train import train
from pronghorn.cli.verify import verify

ORDER = ("init", "convert", "train", "data", "report", "chat", "plan", "verify", "profile", "bench", "doctor")


class _InOrder(TyperGroup):
    """The commands in the order that people need them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names as `--help` lists them."""
        return sorted(super().list_commands(ctx), key=lambda name: (*ORDER, name).index(name))


app = typer.Typer(
    name="pronghorn",
    cls=_InOrder,
    invoke_without_command=True,
    help="Fine-tune large language models: packed rows, a recipe in one YAML file, and a report of what happened.",
    epilog="Start with: pronghorn doctor",
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)

data = typer.Typer(help="Look at what a recipe trains on.", no_args_is_help=True)
app.add_typer(data, name="data")
data.command("inspect", no_args_is_help=True)(inspect_data)
for command in (convert, train, report, chat, plan, verify, profile, bench):
    app.command(no_args_is_help=True)(command)
app.command()(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pronghorn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    grow_segments()
    stay_quiet()
    # on some CPUs it tells everybody who imports it to install a package that nothing here uses
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
