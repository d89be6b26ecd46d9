"""What a command is given to work on: a finished run's folder, or a model's own."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from pronghorn.config.errors import without_removed
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, DataError
from pronghorn.records.record import RunRecord


def is_export(path: Path) -> bool:
    """Tell whether a path is a model's by itself, rather than a run's folder."""
    return path.suffix == ".gguf" or any((path / name).is_file() for name in ("config.json", "adapter_config.json"))


def recipe_of(folder: Path) -> Recipe:
    """Return the recipe of the finished run in `folder`."""
    if not folder.is_dir():
        remedy = "give the output folder of a finished run (train.output), or a merged folder"
        raise ConfigError(f"{folder} is not a folder", remedy)
    if not (folder / "run.json").exists() and (file := next(iter(sorted(folder.glob("*.gguf"))), None)):
        raise ConfigError(f"{folder} is not a run's folder, but an export's", f"give the GGUF file in it, e.g. {file}")
    if not (folder / "run.json").exists() and (folder / "journal.json").exists():
        raise ConfigError(
            f"the run in {folder} is not finished", "run its `pronghorn train` command again to finish it"
        )
    try:
        return Recipe.model_validate(without_removed(RunRecord.read(folder).recipe))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{folder / 'run.json'}: {key} of its recipe is not of this version ({error.errors()[0]['msg']})",
            "use the version that trained it",
        ) from error


def check_finished(path: Path) -> None:
    """Refuse what is neither, before libraries are loaded that take seconds."""
    if not is_export(path):
        recipe_of(path)
