"""`pronghorn bench ops`: what each kernel costs, and what torch's and others' cost."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import Console

from pronghorn.cli.errors import plain_errors
from pronghorn.cli.options import Commit, Debug, Results, names, progress


def ops(
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op",
            metavar="NAME",
            help="rms_norm, rope, rope_qk_norm, swiglu, geglu, attention, cross_entropy, linear_cross_entropy; all if "
            "none is given. Can be repeated.",
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
        from pronghorn.bench.record import check_out, write_results
        from pronghorn.bench.tables import ops_table

        check_out(out)
        others = None if against is None else names(against)
        options = OpsOptions(tuple(op or ()), tokens, dtype, repeats, others, commit)
        results = bench_ops(options, progress())
        Console().print(ops_table(results))
        if out is not None:
            write_results(results, out)
    if not all(result.gate["green"] for result in results if result.contender == "pronghorn"):
        raise typer.Exit(1)
