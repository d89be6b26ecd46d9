"""`pronghorn doctor`: whether this machine and installation can train."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from pronghorn.cli.console import Console


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine and installation, and name the command that fixes what is wrong.

    It ends with code 1 if something required is missing or has an unsupported version. It also shows what is only slow.

    [bold]Examples[/]

      pronghorn doctor

      pronghorn doctor --json > doctor.json
    """
    from pronghorn.diagnose.doctor import diagnose, healthy, render

    findings = diagnose()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        Console().print(render(findings))
    if not healthy(findings):
        raise typer.Exit(1)
