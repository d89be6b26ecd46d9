"""The commands, each in a file of its own. Only typer and rich load at start; the rest where a command needs it."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pronghorn import __version__
from pronghorn.cli.bench import bench
from pronghorn.cli.chat import chat
from pronghorn.cli.convert import convert
from pronghorn.cli.data import inspect_data
from pronghorn.cli.docs import docs
from pronghorn.cli.doctor import doctor
from pronghorn.cli.errors import full_disk_told, with_plain_errors
from pronghorn.cli.export import export
from pronghorn.cli.habits import COMMANDS, Answering, OfRecipe
from pronghorn.cli.init import init
from pronghorn.cli.launch import launch
from pronghorn.cli.plan import plan
from pronghorn.cli.profile import profile
from pronghorn.cli.report import report
from pronghorn.cli.train import train
from pronghorn.cli.verify import verify
from pronghorn.environment import draw_without_windows, grow_segments, stay_quiet

ORDER = [
    *("init", "convert", "train", "data", "report", "chat", "export"),
    *("plan", "verify", "profile", "bench", "launch", "doctor", "docs"),
]


class _InOrder(TyperGroup):
    """The commands in the order that people need them; of other tools' commands ours is named."""

    @full_disk_told()
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left after the options.

        Raises:
            UsageError: an unknown option, with where options stand.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", None)
            if type(error).__name__ == "NoSuchOption" and option in ("-V", "-v"):
                ctx.fail(f"No such option: {option}. Did you mean --version?")
            if type(error).__name__ == "NoSuchOption" and option is not None:
                ctx.fail(f"No such option: {option}. Options follow a command: {ctx.command_path} COMMAND {option}")
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of this name.

        Raises:
            UsageError: there is none, with the one that was meant.
        """
        name, commands = args[0], self.list_commands(ctx)
        if name in commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name in ("dpo", "kto", "orpo", "grpo"):
            ctx.fail(
                f"No such command '{name}'. TRL's trainers take Pronghorn's models: pronghorn docs preference-training"
            )
        if ctx.info_name == "data":
            ctx.fail(f"No such command '{name}'. Did you mean {ctx.command_path} inspect RECIPE?")
        near = COMMANDS.get(name) or next(iter(difflib.get_close_matches(name, commands, n=1, cutoff=0.65)), None)
        if near is None:
            ctx.fail(f"No such command '{name}'. Commands: {', '.join(commands)}")
        ctx.fail(f"No such command '{name}'. Did you mean {ctx.command_path} {near}?")

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names as `--help` lists them."""
        return sorted(super().list_commands(ctx), key=lambda name: (*ORDER, name).index(name))


app = typer.Typer(
    name="pronghorn",
    cls=_InOrder,
    invoke_without_command=True,
    help="Fine-tune large language models from one YAML file: fast, checked, and with a report of each run.",
    epilog="Start with: pronghorn init. Read the documentation: pronghorn docs",
    rich_markup_mode="rich",
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)


def _help(command: Callable[..., Any]) -> str:
    """Return a command's docstring, each paragraph in one line, which the terminal's width then breaks."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.__doc__ or ""))


data = typer.Typer(cls=_InOrder, help="Look at what a recipe trains on.", no_args_is_help=True)
app.add_typer(data, name="data")
data.command("inspect", cls=OfRecipe, no_args_is_help=True, help=_help(inspect_data))(with_plain_errors(inspect_data))
for command in (train, plan, verify, profile, bench, launch):
    app.command(cls=OfRecipe, no_args_is_help=True, help=_help(command))(with_plain_errors(command))
for other in (convert, report, chat, export):
    app.command(cls=Answering, no_args_is_help=True, help=_help(other))(with_plain_errors(other))
for alone in (docs, doctor, init):
    app.command(cls=Answering, help=_help(alone))(with_plain_errors(alone))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pronghorn {__version__}")
        raise typer.Exit


def _is_no_load_report(record: logging.LogRecord) -> bool:
    """Leave transformers' table of what a checkpoint lacks out: an error of ours tells it in a line."""
    return "LOAD REPORT" not in str(record.msg)


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        with full_disk_told():
            typer.echo(context.get_help())
        raise typer.Exit
    grow_segments()
    stay_quiet()
    draw_without_windows()
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_load_report)
    # on some CPUs it tells everybody who imports it to install a package that nothing here uses
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
