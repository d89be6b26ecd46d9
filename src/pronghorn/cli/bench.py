"""`pronghorn bench`: what a training step and each kernel cost here, and what they cost with others."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from pronghorn.cli.errors import plain_errors
from pronghorn.cli.options import Checkpoints, Commit, Debug, Method, Results, Seed, names, progress

bench = typer.Typer(help="Measure, with a gate first: who computes something else is not faster.", no_args_is_help=True)


def environment() -> dict[str, str]:
    """Of measured processes: they import what this one does, and talk to nobody."""
    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    alone = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
    return {**os.environ, **alone, "PYTHONPATH": paths}


@bench.command(no_args_is_help=True)
def step(
    model: Annotated[
        str,
        typer.Option(
            metavar="SHAPE|PATH",
            help="A known shape with random weights (SHAPE@12: its first 12 layers), or a model's folder.",
        ),
    ],
    method: Method = "lora",
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
        Literal["off", "on", "offload", "auto"],
        typer.Option(
            help="Recompute layers in the backward pass; offload also moves their inputs to the host; auto is each "
            "one's own default: Pronghorn's plan, Unsloth's offloading, and recomputing for the others."
        ),
    ] = "off",
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What each may take of the GPU, as on a smaller card: 8GiB, say."),
    ] = None,
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
    seed: Seed = 0,
    checkpoints: Checkpoints = None,
    out: Results = None,
    commit: Commit = "unknown",
    debug: Debug = False,
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
        from pronghorn.bench.record import check_out, keeper, write_results
        from pronghorn.bench.step import StepOptions, bench_step
        from pronghorn.bench.tables import step_table
        from pronghorn.memory.devices import parse_bytes

        check_out(out)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, or a checkpoint of many GB stays behind
        options = StepOptions(
            model=model,
            method=method,
            tokens=tokens,
            lengths=lengths,
            labelled=labelled,
            recompute=recompute,
            memory=None if memory is None else parse_bytes(memory, "--memory"),
            experts=experts,
            against=names(against),
            ablate=tuple(ablate or ()),
            repeats=repeats,
            seed=seed,
            checkpoints=checkpoints,
            commit=commit,
        )
        results = bench_step(options, environment(), progress(), keeper(out))
        write_results(results, out)
        Console().print(step_table(results))
    if not results[0].gate["green"]:
        raise typer.Exit(1)


@bench.command()
def ops(
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op",
            metavar="NAME",
            help="rms_norm, rope, rope_qk_norm, swiglu, geglu, swiglu_lora, residual_lora, residual_wide, "
            "adapter_gradients, attention, cross_entropy, linear_cross_entropy, and of experts moe_route, moe_gather, "
            "moe_combine, moe_glu, grouped_gemm, grouped_lora; all if none is given. Can be repeated.",
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Rows; 8192, or 64 on the CPU, if not given.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Of inputs and outputs.")
    ] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Timed calls of each contender.")] = 20,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="compile, liger; with commas. If not given, both on a GPU, none on the CPU."
        ),
    ] = None,
    out: Results = None,
    commit: Commit = "unknown",
    debug: Debug = False,
) -> None:
    """Time each kernel: Pronghorn's, the same formula in plain torch, that compiled by torch, and Liger's.

    Before any clock starts outputs and gradients are compared with the formula in float64; who is more than twice as
    far off as plain torch is shown as failed and its figures are withheld. Ends with code 1 if Pronghorn itself fails.

    Forward and backward are timed apart, by turns, with cold caches. The ceiling is a copy of as many bytes, or a
    product of the same size, in the same run. Figures are medians with least and greatest. Without a GPU it runs on
    the CPU with small shapes, and says so.

    [bold]Examples[/]

      pronghorn bench ops --out ops.json

      pronghorn bench ops --op rms_norm --op swiglu --tokens 16384 --against compile
    """
    with plain_errors(debug):
        from pronghorn.bench.ops import OpsOptions, bench_ops
        from pronghorn.bench.record import check_out, keeper, write_results
        from pronghorn.bench.tables import ops_table

        check_out(out)
        others = None if against is None else names(against)
        options = OpsOptions(tuple(op or ()), tokens, dtype, repeats, others, commit)
        results = bench_ops(options, progress(), keeper(out))
        write_results(results, out)
        Console().print(ops_table(results))
    if not all(result.gate["green"] for result in results if result.contender == "pronghorn"):
        raise typer.Exit(1)
