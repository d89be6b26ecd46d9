"""`pronghorn verify`: are the numbers right on this model and these data?"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType

from pronghorn.cli.console import Console, starting
from pronghorn.cli.options import ApiKey, Checkpoints, Method, Overrides, Seed, Timeout, progress
from pronghorn.compute_names import ComputeName
from pronghorn.errors import ConfigError

if TYPE_CHECKING:
    from pronghorn.diagnose.verify_report import Report
    from pronghorn.export.comparison import Comparison

ROWS, SUPERVISED = 4, 0.7
"""Rows of random documents with --model, and the share of each document that has labels."""


def verify(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="YAML file that says what to train, and on which data. With --served: a finished run.",
        ),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE|PATH|NAME",
            help="Instead of RECIPE: a known shape with random weights, or a folder. With --served: the model's name.",
        ),
    ] = None,
    served: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare the model of this running server with what RUN trained.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="With --served: the format of the server's weights, which decides the limits.")
    ] = "merged",
    timeout: Timeout = 60.0,
    api_key: ApiKey = None,
    method: Method = "lora",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="With --model: dtype of the weights. With --served: float32 if the server computes in it."),
    ] = "auto",
    compute: Annotated[
        ComputeName, typer.Option(help="With --model: in what numbers frozen weights multiply.")
    ] = "dtype",
    tokens: Annotated[
        int, typer.Option(min=16, help="Tokens of the first packed row. The second has half as many.")
    ] = 2048,
    seed: Seed = 0,
    checkpoints: Checkpoints = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Compare the packed path with plain transformers and PEFT, on your own model and data.

    It compares loss, logits and every gradient with float32, one document at a time. It checks what each layer's
    attention sees, packed documents against each one alone, the same batch twice, merged weights, and what is saved and
    loaded again. A difference may be twice the error of plain transformers in the same dtype. If a check fails, the
    command names the likely cause and ends with code 1. It changes none of your files.

    A large model is upcast one layer at a time. Products in 8 bits are compared with exact products of the same
    operands. Without a recipe, --model says what to compare, and --method, --dtype, --compute, --seed and --checkpoints
    say how it is made.

    With --served it compares the model of a server (vLLM, SGLang, llama-server, Ollama) with what a run trained: token
    ids of rendered conversations, log-probabilities, greedy answers, and where generation stops.

    [bold]Examples[/]

      pronghorn verify my.yaml

      pronghorn verify my.yaml precision.dtype=float32 --tokens 512 --json > verdict.json

      pronghorn verify --model Llama-3.1-8B --checkpoints checkpoints

      pronghorn verify --model tiny --tokens 256

      pronghorn verify --served http://127.0.0.1:8000 runs/mine
    """
    if served is not None:
        if recipe is None or overrides:
            example = f"write e.g. pronghorn verify --served {served} runs/mine"
            raise ConfigError("verify --served needs one run", example)
        _tell(_served(recipe, served, model, format, dtype == "float32", timeout, api_key), as_json)
        return
    if (recipe is None) == (model is None):
        raise ConfigError("verify needs a recipe or --model, and one of them", "write e.g. pronghorn verify my.yaml")
    for option in ("method", "dtype", "compute", "seed", "checkpoints") if model is None else ():
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            instead = "leave it out: the recipe says it (adapter.method, model.load_in_4bit, precision)"
            raise ConfigError(f"--{option} is for --model", instead)
    from pronghorn.config.recipe import Recipe

    settings = None if model is not None else Recipe.load(recipe or "", overrides or [])
    with starting():
        from pronghorn.diagnose.verify_checks import verify as run
        from pronghorn.diagnose.verify_report import render
        from pronghorn.diagnose.verify_subject import subject_of

    say = progress()
    with tempfile.TemporaryDirectory(prefix="pronghorn-verify-") as scratch:
        documents = None
        if settings is None:
            assert model is not None
            say(f"checkpoint of {model}")
            numbers: dict[str, str] = {"dtype": dtype, "compute": compute}
            folder = checkpoints or Path(scratch)
            settings, documents = _without_recipe(model, method, numbers, tokens, seed, folder)
        subject = subject_of(settings, tokens, documents, Console(stderr=True, highlight=False))
        report = run(replace(subject, name=model or str(recipe)), say)
    _tell((report, render(report)), as_json)


def _tell(found: tuple[Report | Comparison, RenderableType], as_json: bool) -> None:
    """Print what came out, and leave with code 1 if something is wrong."""
    report, shown = found
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        Console(highlight=False).print(shown)
    if not report.ok:
        raise typer.Exit(1)


def _served(
    run: Path, url: str, model: str | None, format: str, exact: bool, timeout: float, api_key: str | None
) -> tuple[Comparison, RenderableType]:
    """Compare a server's model with what a run trained, and show what came out."""
    from pronghorn.diagnose.served import compare_served, render
    from pronghorn.export.comparison import LIMITS
    from pronghorn.export.engines.http import Server
    from pronghorn.export.engines.openai import OpenAIServer

    if format not in LIMITS:
        raise ConfigError(f"--format {format!r} is unknown", f"use one of {', '.join(LIMITS)}")
    say = progress()
    engine = OpenAIServer(Server(url, api_key, timeout), model)
    say(engine.name)
    comparison = compare_served(run, engine, format, exact, say)
    return comparison, render(comparison)


def _without_recipe(
    model: str, method: str, numbers: dict[str, str], tokens: int, seed: int, folder: Path
) -> tuple[Any, list[dict[str, Any]]]:
    """Make a recipe around a bare model, and random documents for it."""
    from transformers import AutoConfig

    from pronghorn.config.recipe import Recipe
    from pronghorn.diagnose.shapes import check_model, checkpoint_of, random_documents

    check_model(model)
    path = checkpoint_of(model, folder.resolve(), seed)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if tokens > (limit := getattr(config, "max_position_embeddings", None) or tokens):
        raise ConfigError(f"--tokens {tokens} > {limit}, the positions of {model}", f"use --tokens {limit} or fewer")
    settings = Recipe.model_validate(
        {
            "model": {"name": str(path), "max_seq_length": tokens, "load_in_4bit": method == "qlora"},
            "adapter": {"method": "full" if method == "full" else "lora"},
            "data": {"train": "random"},
            "train": {"output": "nowhere"},
            "precision": numbers,
        }
    )
    rng = random.Random(seed)
    documents = [d for _ in range(ROWS) for d in random_documents(tokens, config.vocab_size, SUPERVISED, rng)]
    return settings, [{"input_ids": d.input_ids, "labels": d.labels} for d in documents]
