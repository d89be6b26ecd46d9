"""`pronghorn bench`: what a recipe's training step costs here, against plain transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pronghorn.cli.console import Console, starting
from pronghorn.cli.options import Overrides, RecipeFile

if TYPE_CHECKING:
    from pronghorn.diagnose.speed import Comparison, Side


def bench(
    recipe: RecipeFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to time, of each.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Steps to run before those, of each.")] = 20,
) -> None:
    """Time RECIPE's training step against plain transformers and PEFT on this machine.

    First the losses of the same rows must agree. Then each trains the same model on the same packed rows with AdamW,
    one after the other in this process. Nothing is saved. `pronghorn verify` compares gradients and more. A time on a
    CPU says nothing about a GPU.

    [bold]Examples[/]

      pronghorn bench my.yaml

      pronghorn bench my.yaml --steps 2 --warmup 1
    """
    from pronghorn.config.recipe import Recipe

    settings = Recipe.load(recipe, overrides or [])
    with starting():
        from pronghorn.diagnose.speed import compare

    comparison = compare(settings, Console(stderr=True, highlight=False), steps, warmup)
    Console().print(_table(comparison, settings.model.name))


def _table(comparison: Comparison, model: str) -> Table:
    """Make a column for each of the two, and the ratio of their medians below."""
    from pronghorn.device import device_name

    table = Table(
        "", "Pronghorn", "plain transformers", title=f"{model}, {comparison.tokens:,} tokens a step, {device_name()}"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    sides = comparison.pronghorn, comparison.plain
    table.add_row("loss of the first rows", *(f"{side.loss:.6f}" for side in sides))
    table.add_row("step, ms: median (min to max)", *map(_step, sides))
    table.add_row("tokens/s", *(f"{comparison.tokens / side.median_ms * 1e3:,.0f}" for side in sides))
    if comparison.pronghorn.peak_bytes and comparison.plain.peak_bytes:
        table.add_row("peak memory, GiB", *(f"{(side.peak_bytes or 0) / 2**30:.2f}" for side in sides))
    ratio = comparison.plain.median_ms / comparison.pronghorn.median_ms
    table.caption = f"Plain transformers takes {ratio:.2f} times as long"
    if comparison.recomputes:
        table.caption += ", and recomputes its layers"
    return table


def _step(side: Side) -> str:
    return f"{side.median_ms:.1f} ({min(side.step_ms):.1f} to {max(side.step_ms):.1f})"
