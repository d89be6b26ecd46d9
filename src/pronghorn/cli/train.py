"""`pronghorn train`: a whole run, and the table that it ends with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from pronghorn.cli.console import Console, starting
from pronghorn.cli.options import Debug, Overrides, RecipeFile
from pronghorn.cli.processes import choose_gpus, leaving_group, start, visible_gpus
from pronghorn.environment import join_slurm, joined, main_process

if TYPE_CHECKING:
    from pronghorn.records.record import RunRecord


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    allow: Annotated[
        bool,
        typer.Option("--allow", help="Continue an unfinished run even if its recipe or data changed."),
    ] = False,
    allow_older: Annotated[
        bool,
        typer.Option("--allow-older", help="If the newest checkpoint is damaged, continue from the one before."),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, help="Number of GPUs to train on, like launch.gpus. By default all of this machine."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the output folder and start again.")
    ] = False,
    paths: Annotated[bool, typer.Option("--paths", help="List every path that training took, and why.")] = False,
    debug: Debug = False,
) -> None:
    """Train what RECIPE says, and write the adapter (or model), run.json and report.html to its output folder.

    The held-out loss is measured before and after training, so you see whether it helped. Ctrl-C, SIGTERM and a dropped
    connection save a checkpoint first. The same command then continues from it; after a crash it continues from the
    newest checkpoint.

    [bold]Examples[/]

      pronghorn train my.yaml

      pronghorn train my.yaml train.max_steps=20

      pronghorn train my.yaml --gpus 2

      pronghorn train my.yaml 'report.sample_prompts=["What is a mutex?"]'
    """
    from pronghorn.config.recipe import Recipe

    join_slurm()
    console = Console(quiet=not main_process())
    changes = [*(overrides or []), *([] if gpus is None else [f"launch.gpus={gpus}"])]
    settings = Recipe.load(recipe, changes)
    if not joined():
        choice = choose_gpus(settings, visible_gpus())
        if choice.note is not None:
            console.print(f"[yellow]{escape(choice.note)}[/]", highlight=False)
        if choice.gpus > 1:
            given = {"--allow": allow, "--allow-older": allow_older, "--overwrite": overwrite, "--paths": paths}
            flags = [name for name, on in (given | {"--debug": debug}).items() if on]
            raise typer.Exit(start(choice.gpus, ["train", str(recipe), *changes, *flags]))
    with starting():
        from pronghorn.train.run import run

    with leaving_group():
        record = run(settings, console, allow, allow_older, overwrite)
    console.print()
    console.print(summary(record, Path(settings.train.output), paths))


def summary(record: RunRecord, output: Path, paths: bool = False) -> Table:
    """Make a table of the report's headlines, the paths taken (in one line unless `paths`), answers, and where the
    run's files are."""
    from pronghorn.records.report import FILE_NAME, headlines, warnings

    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, figure, note in headlines(record):
        table.add_row(label, f"{escape(figure)} [dim]({escape(note)})[/]")
    for warning in warnings(record):
        table.add_row("[yellow]Warning[/]", f"[yellow]{escape(warning)}[/]")
    if record.paths and not paths:
        first, more = record.paths[0], len(record.paths) - 1
        others = f" [dim](and {more} more: --paths, or run.json)[/]" if more else ""
        table.add_row("Path taken", escape(f"{first['part']}: {first['path']}") + others)
    for path in record.paths if paths else ():
        line = f"{path['part']}: {path['path']}"
        table.add_row("Path taken", escape(line) + f" [dim]({escape(path['why'])})[/]")
    for sample in record.samples:
        table.add_row("Asked", escape(sample["prompt"]))
        table.add_row("  before", escape(sample["before"]))
        table.add_row("  after", escape(sample["after"]))
    table.add_row("Output", escape(str(output)))
    if (output / FILE_NAME).is_file():
        table.add_row("Report", escape(str(output / FILE_NAME)))
    for step, command in next_steps(output):
        table.add_row("Next", f"{escape(command)} [dim]({step})[/]")
    return table


def next_steps(output: Path) -> list[tuple[str, str]]:
    """Return what to do with a finished run, each with what a shell or a script takes."""
    weights = output / ("model" if (output / "model").is_dir() else "adapter")
    load = f"FastLanguageModel.from_pretrained({str(weights)!r})"
    run = shlex.quote(str(output))
    return [
        ("ask it beside its base", f"pronghorn chat {run}"),
        ("merged for vLLM; --to gguf or ollama for others: pronghorn docs after-training", f"pronghorn export {run}"),
        ("in Python", load),
    ]
