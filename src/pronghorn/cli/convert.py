"""`pronghorn convert`: a recipe from Axolotl's or LLaMA-Factory's YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pronghorn.cli.console import Console
from pronghorn.cli.options import tell_next, write_new
from pronghorn.text import counted

OTHERWISE = "name another file: --output OTHER.yaml"


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of Axolotl or LLaMA-Factory.")],
    output: Annotated[
        Path, typer.Option("--output", metavar="RECIPE", help="File to write. A file that exists is never replaced.")
    ] = Path("recipe.yaml"),
) -> None:
    """Convert a configuration of Axolotl or LLaMA-Factory into a recipe.

    Each line names the key that it comes from. Keys without an equivalent are listed in the terminal and at the
    recipe's end, with what to do instead. Data sets of LLaMA-Factory are looked up in its dataset_info.json.

    [bold]Examples[/]

      pronghorn convert qlora.yml

      pronghorn convert llama3_lora_sft.yaml --output mine.yaml
    """
    console = Console(highlight=False, soft_wrap=True)
    from pronghorn.recipes.convert import convert as convert_file

    tool, draft = convert_file(file)
    write_new(
        output,
        draft.text([f"Made of {file.name} ({tool}) by `pronghorn convert`. Keys: pronghorn docs recipe"]),
        OTHERWISE,
    )
    for name, why in draft.lost.items():
        console.print(f"no equivalent  {name}: {why}", markup=False)
    lost = f"{counted(len(draft.lost), 'key', 'have')} no equivalent"
    console.print(f"{output} is written; {lost}.", markup=False)
    tell_next(console, output)
