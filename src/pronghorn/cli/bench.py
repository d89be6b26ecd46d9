"""`pronghorn bench`: what a training step costs here, and what it costs with others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from pronghorn.cli.errors import plain_errors

bench = typer.Typer(help="Measure, with a gate first: who computes something else is not faster.", no_args_is_help=True)

CHILD_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
"""Measured processes talk to nobody."""


@bench.command(no_args_is_help=True)
def step(
    model: Annotated[
        str,
        typer.Option(
            metavar="SHAPE|PATH",
            help="A known shape with random weights (SHAPE@12: its first 12 layers), or a model's folder.",
        ),
    ],
    method: Annotated[
        Literal["lora", "qlora", "full"],
        typer.Option(help="LoRA (rank 16, all linears), the same on NF4 weights, or every weight."),
    ] = "lora",
    tokens: Annotated[int, typer.Option(help="Tokens of a packed row, one row a step.")] = 8192,
    lengths: Annotated[
        str,
        typer.Option(
            metavar="FILE|lognormal|one",
            help="Document lengths: a JSON list to draw from, log-normal (mean about 180), or one document a row.",
        ),
    ] = "lognormal",
    labelled: Annotated[float, typer.Option(help="Share of each document that is learned, from its end.")] = 1.0,
    recompute: Annotated[
        Literal["off", "on", "offload"],
        typer.Option(help="Recompute layers in the backward pass; offload also moves their inputs to the host."),
    ] = "off",
    experts: Annotated[
        Literal["frozen", "lora"], typer.Option(help="Whether experts get adapters too; by default attention alone.")
    ] = "frozen",
    against: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="hf, hf-compile, hf-flex, hf-sdpa, liger, liger-sdpa, unsloth; with commas."
        ),
    ] = "",
    ablate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Pronghorn with a switch turned, as one more contender: layers=stock, packing_metadata=per_layer, "
            "attention=masked, offload_buffers=1; several joined by +. Can be repeated.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each contender in a pair.")] = 20,
    seed: Annotated[int, typer.Option(help="Of weights, adapters and rows.")] = 0,
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep written checkpoints here, and use those there.", file_okay=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results as JSON, too.", dir_okay=False)
    ] = None,
    commit: Annotated[str, typer.Option(help="Of this source, for the results.")] = "unknown",
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Time a training step: Pronghorn's, and others' on the same weights, adapters, rows and optimiser.

    Every contender runs in a process of its own, by turns with Pronghorn. Before any clock starts its loss, gradients,
    isolation of documents and weight updates are compared with plain transformers and PEFT in float32, document by
    document; who fails is shown as failed and its figures are withheld. Ends with code 1 if Pronghorn itself fails.

    Figures are medians with least and greatest. Without a GPU it runs on the CPU, and says so.

    [bold]Examples[/]

      pronghorn bench step --model Llama-3.2-1B --against unsloth,hf-compile --out llama-1b.json

      pronghorn bench step --model Qwen3-14B --method qlora --recompute on --checkpoints checkpoints

      pronghorn bench step --model Llama-3.2-1B --ablate layers=stock --ablate layers=stock+packing_metadata=per_layer

      pronghorn bench step --model tiny --tokens 256 --against hf
    """
    with plain_errors(debug):
        from pronghorn.bench.record import write_results
        from pronghorn.bench.results import read_results
        from pronghorn.bench.step import StepOptions, bench_step
        from pronghorn.bench.step_table import render

        if out is not None and out.exists():
            read_results(out)  # what isn't ours is not written over
        options = StepOptions(
            model=model,
            method=method,
            tokens=tokens,
            lengths=lengths,
            labelled=labelled,
            recompute=recompute,
            experts=experts,
            against=_names(against),
            ablate=tuple(ablate or ()),
            repeats=repeats,
            seed=seed,
            checkpoints=checkpoints,
            commit=commit,
        )
        progress = Console(stderr=True, highlight=False)
        paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)  # processes import what this one does
        environment = {**os.environ, **CHILD_ENVIRONMENT, "PYTHONPATH": paths}
        results = bench_step(options, environment, lambda text: progress.print(text, style="dim", markup=False))
        Console().print(render(results))
        if out is not None:
            write_results(results, out)
    if not results[0].gate["green"]:
        raise typer.Exit(1)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
