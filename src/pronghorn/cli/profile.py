"""`pronghorn profile`: where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pronghorn.cli.console import Console, starting
from pronghorn.cli.options import Overrides, RecipeFile
from pronghorn.cli.processes import leaving_group
from pronghorn.environment import main_process


def profile(
    recipe: RecipeFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile. As many are timed without the profiler.")] = 3,
    warmup: Annotated[int, typer.Option(min=1, help="Steps to run before those.")] = 3,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with this profile, written by --json.", exists=True, dir_okay=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the profile as JSON.", dir_okay=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write everything to one HTML page, with a timeline.", dir_okay=False),
    ] = None,
) -> None:
    """Show what a training step of RECIPE spends its time on, and what to change first.

    It trains a few steps exactly as `pronghorn train` does, under torch's profiler, and sorts every millisecond by
    cause: products, attention, LoRA, norms, loss, optimiser, copies, idle device, waiting for data. It saves nothing
    and leaves the recipe's output folder alone. It works on a CPU, too.

    [bold]Examples[/]

      pronghorn profile my.yaml

      pronghorn profile my.yaml --json before.json --html before.html

      pronghorn profile my.yaml memory.gradient_checkpointing=false --against before.json
    """
    from pronghorn.config.recipe import Recipe

    settings = Recipe.load(recipe, overrides or [])
    from pronghorn.diagnose.profile_report import read_profile
    from pronghorn.records.page import check_page, check_writable

    other = None if against is None else read_profile(against)
    if json is not None:
        if json.exists():
            read_profile(json)  # what isn't ours is not written over
        check_writable(json)
    check_page(html)
    with starting():
        from pronghorn.diagnose.profile import profile as record
        from pronghorn.diagnose.profile_report import show, write_report

    with leaving_group():
        report = record(settings, Console(stderr=True, highlight=False, quiet=not main_process()), steps, warmup)
    if not main_process():
        return
    console = Console()
    show(report, console, other)
    if json is not None:
        report.write(json)
    if html is not None:
        console.print(f"\nPage: {write_report(report, html, other)}", markup=False, soft_wrap=True)
