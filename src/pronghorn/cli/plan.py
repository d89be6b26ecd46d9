"""`pronghorn plan`: what a run will take, before it runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pronghorn.cli.console import Console, starting
from pronghorn.cli.options import Overrides, RecipeFile
from pronghorn.text import counted

if TYPE_CHECKING:
    from pronghorn.diagnose.plan_report import PlanReport
    from pronghorn.memory.strategies import Choice


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="GPU|SIZE",
            help="GPU to plan for (t4, 'rtx 4060 laptop', h100, …) or its memory (24GiB). By default this machine's.",
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Load the model and time one layer on this GPU. Takes seconds.")
    ] = False,
    gpus: Annotated[int, typer.Option("--gpus", min=1, metavar="N", help="Number of such GPUs.")] = 1,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="auto|copies|sharded",
            help="How several GPUs hold the model. auto takes what fits. By default launch.strategy of the recipe.",
        ),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(
            metavar="GB/s", help="Measured rate between two GPUs, in each direction. By default the datasheet's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Predict how much GPU memory and time a run takes, and choose which layers to keep, recompute or offload.

    It reads only the model's configuration: it loads no weights and needs no GPU. It shows the fastest plan that fits,
    or the one that memory.gradient_checkpointing asks for. If none fits, it shows what would. Times come from
    datasheets unless --calibrate measures a layer. A packed row is always full, so every step takes the most memory.

    [bold]Examples[/]

      pronghorn plan my.yaml --device rtx4090

      pronghorn plan my.yaml memory.budget=16GiB --calibrate

      pronghorn plan my.yaml --gpus 4 --device h100
    """
    from pronghorn.config.recipe import Recipe

    loaded = Recipe.load(recipe, overrides or [])
    with starting():
        from pronghorn.diagnose.plan_report import SeveralGpus, report_plan

    console = Console(stderr=True, highlight=False)
    several = SeveralGpus.asked(gpus, strategy, link, loaded)
    report = report_plan(loaded, device, calibrate, console, several)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        Console(highlight=False).print(render(report))


def render(report: PlanReport) -> RenderableType:
    """Return the report for a terminal."""
    from pronghorn.diagnose.plan_report import policy_map
    from pronghorn.memory.estimate import CONTEXT_BYTES, GIB
    from pronghorn.text import duration

    predicted, budget = report.plan.predicted, report.plan.budget_bytes or 0
    memory = Table("memory at the peak", "GiB", box=None, padding=(0, 2, 0, 0))
    memory.columns[1].justify = "right"
    allowance = predicted["process"] - predicted["peak"] - CONTEXT_BYTES
    kinds = {k: v for k, v in predicted.items() if k not in ("peak", "process", "step_ms")}
    for kind, size in (kinds | {"fragmentation, at most": allowance, "CUDA context": CONTEXT_BYTES}).items():
        memory.add_row(kind, f"{size / GIB:.2f}")
    memory.add_row("[bold]the process[/]", f"[bold]{predicted['process'] / GIB:.2f}[/] of {budget / GIB:.2f}")
    memory.add_row("of it, as torch counts", f"{predicted['peak'] / GIB:.2f}")

    work, device = report.work, report.device
    times = "one layer measured here" if report.measured else device.source
    what = "micro-batch" if report.gpus is None else "step"
    lines = [
        f"[bold]{escape(report.model)}[/], {work.method}, {work.tokens:,} tokens a micro-batch, on {device.name}",
        f"[bold]{policy_map(report.plan)}[/]",
        *(
            [f"planned as layers of transformers and PEFT, in the model's dtype: {report.unfused}"]
            if report.unfused
            else []
        ),
        f"{report.step_ms:,.0f} ms a {what}, {report.tokens_per_s:,.0f} tokens/s ({times})",
    ]
    if report.data is None or report.seconds is None:
        lines.append(f"a million tokens take {duration(1e6 / report.tokens_per_s)}")
    else:
        found = report.data["documents"], report.data["tokens"], report.data["micro_batches"]
        documents, tokens, batches = map(counted, found, ("document", "token", "micro-batch"))
        lines.append(f"{documents}, {tokens}: {batches}, {duration(report.seconds)}")
    if device.display_bytes:
        lines.append(f"{device.display_bytes / GIB:.1f} GiB are left to a screen; memory.budget sets another limit")
    several = [strategies(report.gpus), ""] if report.gpus else []
    return Group(*lines, "", *several, memory, "", f"for the recipe: {report.recipe_lines}")


def strategies(choice: Choice) -> RenderableType:
    """Return what each strategy for several GPUs takes, side by side."""
    from pronghorn.memory.estimate import GIB

    table = Table(f"{choice.gpus} GPUs", "GiB a GPU", "GiB of host", "ms a step", "of it waiting", "", box=None)
    for each in choice.candidates:
        times = [f"{each.step_ms:,.0f}", f"{each.communication_ms:,.1f}"] if each.plan else ["", ""]
        said = each.refusal or (f"[bold]chosen[/]: {choice.why}" if each is choice.chosen else "fits")
        sizes = f"{each.process_bytes / GIB:.2f}", f"{each.host_bytes / GIB:.2f}"
        table.add_row(each.strategy.value, *sizes, *times, said)
    rate = f"{choice.link / 1e9:,.0f} GB/s between GPUs ({choice.link_source}); times on several GPUs were not measured"
    return Group(table, rate)
