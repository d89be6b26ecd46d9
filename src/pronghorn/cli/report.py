"""`pronghorn report`: the report of a finished run, written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pronghorn.cli.console import Console
from pronghorn.errors import ConfigError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Output folders of finished runs, or their run.json files.")
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="PATH",
            help="Page to write the comparison to. By default comparison.html.",
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Write RUN's report.html again from its run.json, or compare several runs on one page.

    The comparison shows their losses, speeds and memory, and the settings that differ.

    [bold]Examples[/]

      pronghorn report runs/demo

      pronghorn report runs/a runs/b --html a-and-b.html
    """
    for run in runs:
        if run.suffix.lower() in (".yaml", ".yml"):
            raise ConfigError(f"{run} is a recipe, no run", "give its run's folder, which train.output names")
    if len(runs) > 1:
        from pronghorn.records.compare import write_comparison

        page = write_comparison(runs, html or Path("comparison.html"))
        Console().print(f"Comparison: {page}", markup=False, soft_wrap=True)
        return
    if html is not None:
        raise ConfigError("--html with one run", "leave it out: the page is report.html in the run's folder")
    from pronghorn.records.report import rewrite_report

    Console().print(f"Report: {rewrite_report(runs[0])}", markup=False, soft_wrap=True)
