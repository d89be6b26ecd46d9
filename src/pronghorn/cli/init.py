"""`pronghorn init`: a first recipe, for this machine and one's own data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pronghorn.cli.console import Console
from pronghorn.cli.options import Method, tell_next, write_new
from pronghorn.cli.shipped import choose, recipes
from pronghorn.errors import ConfigError

_HUB_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?(?<!\.gguf)")


def _instead(output: Path) -> str:
    """Return what to write where the recipe's name is that of something else."""
    if (output / "config.json").is_file():
        return f"the recipe's name comes first, then --model {output}"
    if output.is_dir() or output.suffix.lower() in (".jsonl", ".json", ".parquet", ".csv", ".txt"):
        return f"the recipe's name comes first, then --data {output}"
    return "give another name"


def _copy(name: str, output: Path, given: dict[str, Any], console: Console) -> None:
    """Write a recipe that comes with the package, or list them.

    Raises:
        ConfigError: none of this name, something that a copy doesn't look at, or the file already exists.
    """
    found = recipes()
    if name == "list":
        for each, text in found.items():
            console.print(f"{each}: {text.splitlines()[0].removeprefix('# ')}", markup=False)
        return
    text = choose(found, name, "recipe that comes with Pronghorn", f"one of {', '.join(found)}")
    if others := [option for option, value in given.items() if value is not None]:
        raise ConfigError(
            f"--recipe with {', '.join(others)}: a copy looks at neither data nor machine",
            f"leave one of them out; in the copy set model.name and data.train, or write them behind {output}",
        )
    write_new(output, text, _instead(output))
    console.print(f"{output} is written: set model.name and data.train in it.", markup=False)
    tell_next(console, output)


Task = Literal["sft", "pretrain", "dpo", "kto", "orpo", "grpo"]
Rows = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]


def init(
    output: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="File to write. A file that exists is never replaced.")
    ] = Path("recipe.yaml"),
    task: Annotated[
        Task,
        typer.Option(
            case_sensitive=False, help="sft: answers to prompts; pretrain: plain texts. The others need TRL's trainers."
        ),
    ] = "sft",
    method: Method = "lora",
    model: Annotated[
        str | None, typer.Option(help="Model to train: a folder or a hub name. By default one that fits.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Your rows: a file, a folder or a hub name.")] = None,
    format: Annotated[
        Rows | None, typer.Option(help="What a row is (data.format): every other key is ignored.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="GPU|SIZE", help="GPU to write for, e.g. rtx4090. By default this machine's.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Copy a recipe that comes with Pronghorn. `list` shows them.")
    ] = None,
) -> None:
    """Write a commented recipe for this machine. `pronghorn train` runs it.

    With --data it reads your rows: their format, their columns, how long they are, and whether they fit the GPU. If
    training would refuse something, you learn it now.

    [bold]Examples[/]

      pronghorn init

      pronghorn init mine.yaml --model Qwen/Qwen3-0.6B --data my-data.jsonl

      pronghorn init --method qlora --data chats/ --device t4

      pronghorn init mine.yaml --recipe gpu-qlora
    """
    console = Console(highlight=False, soft_wrap=True)
    if recipe is not None:
        _copy(recipe, output, {"--model": model, "--data": data, "--format": format, "--device": device}, console)
        return
    from pronghorn.config.recipe import DATA_FILES

    if task not in ("sft", "pretrain"):
        raise ConfigError(
            f"--task {task}: recipes train on answers or texts",
            "train it by TRL's trainer on a Pronghorn model: pronghorn docs preference-training",
        )
    if output.exists():
        raise ConfigError(f"{output} already exists", _instead(output))
    if data is not None and (address := re.match(r"[a-z]\w+:/+", str(data))):
        hub = str(data)[address.end() :].removeprefix("huggingface.co/").removeprefix("datasets/")
        raise ConfigError(f"--data {data} is an address", f"give a path, or a hub name (here perhaps {hub})")
    if data is not None and data.suffix.lower() in DATA_FILES and not data.exists():
        raise ConfigError(f"--data {data} does not exist", f"give the path of a {', '.join(DATA_FILES)} file")
    if model is not None and not Path(model).expanduser().exists() and not _HUB_NAME.fullmatch(model):
        raise ConfigError(f"--model {model} does not exist", "give a model's folder or its hub name (owner/name)")
    from pronghorn.recipes.first import Machine, first_recipe, head
    from pronghorn.train.progress import RowsProgress

    with RowsProgress(console) as progress:
        draft = first_recipe(task, method, model, data, device, progress, format)
    write_new(output, draft.text(head(Machine.of(device), data)))
    console.print(f"{output} is written.", markup=False)
    tell_next(console, output)
