"""`pronghorn data inspect`: what a recipe's data becomes before training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pronghorn.cli.console import Console, starting
from pronghorn.cli.options import Overrides, RecipeFile


def inspect_data(
    recipe: RecipeFile,
    overrides: Overrides = None,
    split: Annotated[Literal["train", "eval"], typer.Option("--split", help="Show data.train or data.eval.")] = "train",
    rows: Annotated[int, typer.Option("--rows", min=0, help="How many documents to show token by token.")] = 3,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="PATH", help="Also write everything to one HTML page.", dir_okay=False),
    ] = None,
) -> None:
    """Show what RECIPE's data become: which tokens are supervised, how long documents are, and how full rows get.

    The data are read, rendered and tokenised as in training. Only the tokenizer is loaded, no weights. Supervised
    tokens are coloured, or stand between ⟦ and ⟧ where there are no colours. Warnings come last.

    [bold]Examples[/]

      pronghorn data inspect my.yaml

      pronghorn data inspect my.yaml --split eval --rows 10 --html eval.html

      pronghorn data inspect my.yaml data.loss_on=last model.max_seq_length=8192
    """
    console = Console()
    from pronghorn.config.recipe import Recipe
    from pronghorn.records.page import check_page

    settings = Recipe.load(recipe, overrides or [])
    check_page(html)
    with starting():
        from pronghorn.diagnose.inspect import inspect, show, write_report
        from pronghorn.train.progress import RowsProgress
    with RowsProgress(console) as progress:
        found = inspect(settings, split, rows, progress)
    show(found, console)
    if html is not None:
        console.print(f"\nPage: {write_report(found, html)}", markup=False, soft_wrap=True)
