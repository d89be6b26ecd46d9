"""The recipe: one typed table that says a whole run; unknown keys and impossible values are refused by name.

A recipe is a YAML file of the sections below; `key.sub=value` pairs on the command line override it. docs/recipe.md is
this table for people, made from these classes (tests/config/test_config.py keeps them equal).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from pronghorn.config.checks import check
from pronghorn.config.errors import explain, refuse_others, without_section
from pronghorn.config.sections import (
    DATA_FILES,
    Adapter,
    Data,
    Launch,
    Memory,
    Model,
    Packing,
    Precision,
    Report,
    Section,
    Source,
    Train,
)
from pronghorn.config.yaml_text import LARGEST_FILE, override_key, parse
from pronghorn.errors import ConfigError
from pronghorn.text import clip, short


class Recipe(Section):
    """A whole run."""

    model: Model
    adapter: Adapter = Adapter()
    data: Data
    packing: Packing = Packing()
    train: Train
    memory: Memory = Memory()
    precision: Precision = Precision()
    launch: Launch = Launch()
    report: Report = Report()

    @property
    def step_rows(self) -> int:
        """Return the rows of an optimiser step, of all processes together."""
        return self.packing.rows_per_step * self.train.gradient_accumulation_steps

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a recipe and apply overrides like `train.max_steps=3` (values are YAML).

        Raises:
            ConfigError: a file that is missing or not YAML, a key set twice, an unknown key, a value out of range, an
                override without "=", data files that don't exist, settings that contradict each other.
        """
        path = Path(path)
        table = read_table(path)
        refuse_others(path, table)
        for override in overrides:
            override_key(table, override, lambda key, value: without_section(key, value, _about()))
        table = {section: {} if value is None else value for section, value in table.items()}
        try:
            recipe = cls.model_validate(table)
        except ValidationError as error:
            raise explain(error, str(path), _about()) from None
        check(recipe)
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as YAML or JSON can hold them."""
        return self.model_dump(mode="json")

    @property
    def data_seed(self) -> int:
        """Return the seed of held-out shares, mixtures, packing and order."""
        return self.train.seed if self.data.seed is None else self.data.seed


def read_table(path: Path) -> dict[Any, Any]:
    """Return what a YAML file says, a recipe or another tool's configuration.

    Raises:
        ConfigError: a file that is missing, not YAML, or no table.
    """
    if path.suffix.lower() in DATA_FILES and path.suffix != ".json" and path.is_file():
        raise ConfigError(f"{path} is data, not a recipe", f"pronghorn init --data {path} writes a recipe for it")
    if path.suffix.lower() in (".toml", ".ini", ".ipynb") and path.is_file():
        raise ConfigError(f"{path} is not YAML", "pronghorn init writes a recipe; pronghorn train takes its path")
    table = parse(_read(path), str(path))
    if not isinstance(table, dict):
        known = ", ".join(Recipe.model_fields)
        raise ConfigError(f"{path}: a recipe is a table of sections", f"begin with {known}")
    return table


def _read(path: Path) -> str:
    """Return the text of a file, which may be no recipe."""
    remedy = "give the path of a YAML file; `pronghorn init` writes one"
    try:
        if (path / "journal.json").is_file():
            raise ConfigError(f"{path} is a run, no recipe", "give the YAML file that it was begun with; train goes on")
        if path.is_dir():
            raise ConfigError(f"recipe {path} is a folder", remedy)
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"recipe {path} is a pipe or a device, not a file",
                "write it to a file: each process of a run reads it, and so does the next start",
            )
        if not path.is_file():
            is_change = "=" in path.name and "." in path.name.partition("=")[0]
            first = f"the recipe's path comes first, then {path}" if is_change else remedy
            raise ConfigError(f"recipe {clip(str(path), 300)} does not exist", first)
        with path.open(encoding="utf-8") as file:
            return file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"recipe {short(str(path))} can't be read ({error.strerror})", remedy) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason})", "save it as UTF-8 text") from None


def fields() -> Iterator[tuple[str, str, str, str]]:
    """Yield every key of the recipe as (key, type, default, description), for help texts and docs."""
    for name, section in Recipe.model_fields.items():
        for key, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            default = "required" if field.is_required() else yaml.safe_dump(field.default, default_flow_style=True)
            default = default.replace("\n...", "").strip()
            yield f"{name}.{key}", _type_name(field.annotation), default, field.description or ""


def _type_name(kind: Any) -> str:
    """Return a type as people write it: `int | null`, `lora | full`, `list[str]`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_type_name(argument) for argument in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type_name(argument) for argument in arguments)}]"
    return "null" if kind is type(None) else kind.__name__


def _about() -> dict[str, str]:
    """Return what every key means, those of sources among them."""
    about = {key: description for key, _, _, description in fields()}
    for name, field in Source.model_fields.items():
        about |= {f"data.{split}.{name}": field.description or "" for split in ("train", "eval")}
    return about
