"""The commands. Only typer and rich load at start; the rest where a command needs it."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from pronghorn import __version__
from pronghorn.cli.bench import bench
from pronghorn.cli.console import Console
from pronghorn.cli.errors import plain_errors
from pronghorn.cli.options import Debug, Overrides, RecipeFile, grow_segments, main_process, stay_quiet
from pronghorn.cli.plan import plan
from pronghorn.cli.profile import profile
from pronghorn.cli.report import report as run_report
from pronghorn.cli.verify import verify

ORDER = ("train", "data", "report", "chat", "plan", "verify", "profile", "bench", "doctor")


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
app.command("verify", no_args_is_help=True)(verify)
app.command("plan", no_args_is_help=True)(plan)
app.command("profile", no_args_is_help=True)(profile)
app.command("report", no_args_is_help=True)(run_report)
app.command("bench", no_args_is_help=True)(bench)


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


@app.command(no_args_is_help=True)
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    allow: Annotated[
        bool,
        typer.Option(
            "--allow", help="Go on with an unfinished run although its recipe, data or number of processes changed."
        ),
    ] = False,
    allow_older: Annotated[
        bool,
        typer.Option("--allow-older", help="Where the newest checkpoint is damaged, go on from the one before."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train what RECIPE says, and leave the adapter (or model), run.json and report.html in its output folder.

    The held-out loss is measured before and after, so the run says itself whether it helped. Ctrl-C, SIGTERM and a
    dropped connection save a checkpoint and leave; the same command goes on from there, and after a crash from the
    newest checkpoint.

    [bold]Examples[/]

      pronghorn train recipes/gpu-lora.yaml

      pronghorn train recipes/gpu-lora.yaml train.max_steps=20

      pronghorn train my.yaml 'report.sample_prompts=["What is a mutex?"]'
    """
    console = Console(quiet=not main_process())
    with plain_errors(debug):
        from pronghorn.config import Recipe

        settings = Recipe.load(recipe, overrides or [])
        from pronghorn.cli.summary import summary
        from pronghorn.train.run import run

        record = run(settings, console, allow, allow_older)
        console.print()
        console.print(summary(record, Path(settings.train.output)))


@data.command("inspect", no_args_is_help=True)
def inspect_data(
    recipe: RecipeFile,
    overrides: Overrides = None,
    split: Annotated[Literal["train", "eval"], typer.Option("--split", help="Show data.train or data.eval.")] = "train",
    rows: Annotated[int, typer.Option("--rows", min=0, help="Show so many documents, token by token.")] = 3,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Write it all to one page, too.", dir_okay=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Show what RECIPE's data becomes before training: which tokens are supervised, how long documents are, how they
    pack.

    Reads, renders and tokenises as training does, with the tokenizer only: no weights are loaded. Supervised tokens are
    coloured, or between ⟦ and ⟧ where there are no colours. What looks wrong although it is allowed is told last.

    [bold]Examples[/]

      pronghorn data inspect recipes/gpu-lora.yaml

      pronghorn data inspect my.yaml --split eval --rows 10 --html eval.html

      pronghorn data inspect my.yaml data.loss_on=last model.max_seq_length=8192
    """
    console = Console()
    with plain_errors(debug):
        from pronghorn.config import Recipe
        from pronghorn.train.page import check_page

        settings = Recipe.load(recipe, overrides or [])
        check_page(html)
        from pronghorn.diagnose.inspect import inspect, show, write_report
        from pronghorn.train.progress import RowsProgress

        with RowsProgress(console) as progress:
            found = inspect(settings, split, rows, progress)
        show(found, console)
        if html is not None:
            console.print(f"\nPage: {write_report(found, html)}", markup=False, soft_wrap=True)


@app.command(no_args_is_help=True)
def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Output folder of a finished run.")],
    system: Annotated[str | None, typer.Option(help="System prompt, instead of the recipe's.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer at most.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="How freely answers are drawn; 0 always the likeliest.")
    ] = 0.0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model, as the run did.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Talk to what RUN trained and to what it began from, side by side, through the template of the training.

    Questions come from the terminal or, a line each, from a pipe. /reset forgets the conversation; /quit, Ctrl-D and
    Ctrl-C leave. A model without a chat template continues each question as it is, by itself.

    [bold]Examples[/]

      pronghorn chat runs/demo

      echo "What does abs do?" | pronghorn chat runs/demo
    """
    with plain_errors(debug):
        from pronghorn.cli.chat import converse
        from pronghorn.train.talk import load_talk

        options = {} if system is None else {"system": system}
        talk = load_talk(
            run,
            trust_remote_code=trust_remote_code,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            **options,
        )
        converse(talk, Console())


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, for programs.")] = False,
    debug: Debug = False,
) -> None:
    """Check this machine and installation, and name the command that mends what is wrong.

    Ends with code 1 if something needed is missing or has an unsupported version; what is merely slower is told, not
    punished.

    [bold]Examples[/]

      pronghorn doctor

      pronghorn doctor --json > doctor.json
    """
    with plain_errors(debug):
        from pronghorn.diagnose.doctor import diagnose, healthy, render

        findings = diagnose()
        if as_json:
            typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        else:
            Console().print(render(findings))
    if not healthy(findings):
        raise typer.Exit(1)
