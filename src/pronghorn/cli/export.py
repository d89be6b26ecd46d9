"""`pronghorn export`: what a run trained, for whoever serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pronghorn.cli.console import Console, starting
from pronghorn.cli.options import progress
from pronghorn.errors import ConfigError


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Output folder of a finished run, or folder of an adapter.")
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
            help="Type of a GGUF file's weights: f32, f16, bf16, q8_0 (the default), q5_1, q5_0, q4_1, q4_0 or mxfp4. "
            "With llama.cpp installed, K-quants too (q4_k_m, …).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder to write to. By default a folder in RUN, named like the format (adapter: exported-adapter).",
        ),
    ] = None,
    onto: Annotated[
        str | None,
        typer.Option(
            metavar="seen|original",
            show_default=False,
            help="After training over a 4-bit base: merge onto the weights that training saw, or onto the original "
            "16-bit checkpoint. By default, whichever is nearer to the trained model.",
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            show_default=False,
            help="Python of an environment with vLLM. The merged folder or adapter is also served by it and compared.",
        ),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also push the result to this repository on the hub.")
    ] = None,
) -> None:
    """Write what RUN trained for whatever serves it, load the result, and check that it answers like the trained model.

    The check compares token ids, log-probabilities, greedy answers and where generation stops. If they differ by more
    than the format explains, nothing is written to the target, and the likely causes are named.

    Formats: [bold]merged[/] for transformers, vLLM and SGLang; [bold]adapter[/] for PEFT; [bold]served-adapter[/] for
    vLLM and SGLang, with adapters of experts; [bold]fp8[/] for vLLM; [bold]gguf[/] for llama.cpp and LM Studio;
    [bold]gguf-lora[/] for llama.cpp; [bold]ollama[/], a GGUF file with its Modelfile.

    [bold]Examples[/]

      pronghorn export runs/demo

      pronghorn export runs/demo --to gguf --quantization q8_0

      pronghorn export runs/demo --to ollama --output out
    """
    from pronghorn.records.finished import check_finished

    check_finished(run)
    with starting():
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
