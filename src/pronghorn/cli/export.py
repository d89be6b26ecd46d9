"""`pronghorn export`: what a run trained, for whoever serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pronghorn.cli.console import Console
from pronghorn.cli.errors import plain_errors
from pronghorn.cli.options import Debug, progress
from pronghorn.errors import ConfigError


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Output folder of a finished run, or an adapter's folder.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="merged, adapter, served-adapter, fp8, gguf, gguf-lora or ollama."),
    ] = "merged",
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Of a GGUF file: f32, f16, bf16, q8_0 (the default), q5_1, q5_0, q4_1, q4_0 or mxfp4; by an "
            "installed llama.cpp q4_k_m and its like.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where it goes; default: a folder of the format's name in RUN (adapter: exported-adapter).",
        ),
    ] = None,
    onto: Annotated[
        str | None,
        typer.Option(
            metavar="seen|original",
            show_default=False,
            help="Of a run over a base in 4 bits: merge onto these, as trained, or onto the checkpoint in 16 bits; "
            "default: the nearer to what was trained.",
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            show_default=False,
            help="An interpreter with vLLM: merged folders and adapters are served by it, and compared, too.",
        ),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Push it to this repository of the hub, too.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write what RUN trained in the format of whoever serves it, load that again, and compare it with what was trained.

    An export whose token ids, log-probabilities, answers or stops differ by more than its format explains is not put in
    its place; the causes are named.

    [bold]merged[/] transformers, vLLM, SGLang. [bold]adapter[/] PEFT. [bold]served-adapter[/] vLLM and SGLang, experts
    too. [bold]fp8[/] vLLM. [bold]gguf[/] llama.cpp, LM Studio. [bold]gguf-lora[/] llama.cpp. [bold]ollama[/] a GGUF
    file and its Modelfile.

    [bold]Examples[/]

      pronghorn export runs/demo

      pronghorn export runs/demo --to gguf --quantization q8_0

      pronghorn export runs/demo --to ollama --output out
    """
    with plain_errors(debug):
        from pronghorn.diagnose.export_run import export_run
        from pronghorn.diagnose.served import render
        from pronghorn.export.hub import check_push, push_folder

        console = Console(highlight=False)
        if quantization is not None and to not in ("gguf", "ollama"):
            raise ConfigError(f"--quantization with --to {to}", "add --to gguf or --to ollama, or leave it out")
        if push is not None:
            check_push(push)
        exported = export_run(run, to, output, (quantization or "q8_0").lower(), progress(), onto, vllm)
        if not exported.comparisons:
            console.print(
                "[yellow]Not compared:[/] nothing here reads this format. Serve it, then: pronghorn verify --served"
            )
        for comparison in exported.comparisons:
            console.print(render(comparison))
        for note in exported.notes:
            console.print(note)
        console.print(f"[bold]Written to[/] {escape(str(exported.folder))}", soft_wrap=True)
        if push is not None:
            console.print(f"[bold]Pushed to[/] {escape(push_folder(exported.folder, push))}", soft_wrap=True)
        console.print(f"[bold]Next[/] {escape(exported.next)}", soft_wrap=True)
