"""`pronghorn report`: the report of a finished run, written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pronghorn.cli.console import Console
from pronghorn.cli.errors import plain_errors
from pronghorn.cli.options import Debug


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Output folder of a finished run, or its run.json.")],
    debug: Debug = False,
) -> None:
    """Write RUN's report.html from its run.json, over an earlier one.

    [bold]Examples[/]

      pronghorn report runs/demo
    """
    with plain_errors(debug):
        from pronghorn.train.report import rewrite_report

        Console().print(f"Report: {rewrite_report(run)}", markup=False, soft_wrap=True)
