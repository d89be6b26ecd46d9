"""Make a recipe of another tool's YAML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pronghorn.config.errors import tool_of
from pronghorn.config.recipe import read_table
from pronghorn.config.yaml_text import parse
from pronghorn.errors import ConfigError, PronghornError
from pronghorn.recipes import axolotl, llama_factory
from pronghorn.recipes.draft import Draft

TOOLS = {"Axolotl": axolotl.convert, "LLaMA-Factory": llama_factory.convert}


def _unquoted(value: Any) -> Any:
    """Return the number that a text is, which both tools read as one; else the value."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", value)
    return parse(value, "") if is_number else value


def convert(path: Path) -> tuple[str, Draft]:
    """Return whose configuration a file is, and the recipe that says the same.

    Raises:
        ConfigError: no YAML table, another tool's, or a task that recipes don't have (DPO, rewards).
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist", f"give the YAML file of {' or '.join(TOOLS)}")
    if path.suffix == ".sh":
        remedy = "write its options into a YAML file, a line for each (--stage sft: `stage: sft`), and convert that"
        raise ConfigError(f"{path} is a script", remedy)
    table = read_table(path)
    if "train_dataset" in table:
        remedy = "write model_name_or_path, stage and dataset instead, or make a recipe by pronghorn init"
        raise ConfigError(f"{path} has the keys of LLaMA-Factory's v1 (train_dataset), which aren't read", remedy)
    tool = tool_of(table)
    if tool is None and isinstance(table.get("model"), dict):
        raise ConfigError(f"{path} is a recipe already", f"pronghorn train {path}")
    if tool not in TOOLS:
        problem = f"{path} is {'a configuration of ' + tool if tool else 'no known configuration'}"
        raise ConfigError(problem, f"give the YAML file of {' or '.join(TOOLS)}; pronghorn init writes a recipe anew")
    draft = Draft({str(key): _unquoted(value) for key, value in table.items() if value not in (None, "")}, path.parent)
    try:
        TOOLS[tool](draft)
    except PronghornError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a text where that tool has a list, and so on
        raise ConfigError(
            f"{path}: a value is not of the kind that {tool} documents ({type(error).__name__}: {error})",
            "fix it, or leave the key out and write it into the recipe",
        ) from error
    draft.check()
    if draft.recipe["data"].get("eval") is None:
        for key in ("eval_steps", "patience"):
            if draft.recipe["train"].pop(key, None) is not None:
                draft.lost[draft.comments.get(f"train.{key}", key)] = f"train.{key} needs data.eval"
    elif draft.recipe["train"].get("eval_steps") is None and draft.recipe["train"].pop("patience", None):
        draft.lost["early_stopping_patience"] = "train.patience counts evaluations: set train.eval_steps, too"
    return tool, draft
