"""`pronghorn verify --served`: does the server's model answer as the trained one?"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from pronghorn.cli.console import Console
from pronghorn.cli.options import progress


def verify_served(
    run: Path | None,
    overrides: list[str] | None,
    url: str,
    model: str | None,
    format: str,
    exact: bool,
    timeout: float,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Compare, print what came out, and leave with code 1 if something differs."""
    from pronghorn.diagnose.served import compare_served, render
    from pronghorn.errors import ConfigError
    from pronghorn.export.comparison import LIMITS
    from pronghorn.export.engines.http import Server
    from pronghorn.export.engines.openai import OpenAIServer

    if run is None or overrides:
        raise ConfigError("verify --served needs one run", f"write e.g. pronghorn verify --served {url} runs/mine")
    if format not in LIMITS:
        raise ConfigError(f"--format {format!r} is unknown", f"use one of {', '.join(LIMITS)}")
    say = progress()
    engine = OpenAIServer(Server(url, api_key, timeout), model)
    say(engine.name)
    comparison = compare_served(run, engine, format, exact, say)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict(), indent=1))
    else:
        Console(highlight=False).print(render(comparison))
    if not comparison.ok:
        raise typer.Exit(1)
