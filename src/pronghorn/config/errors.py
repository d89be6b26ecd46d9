"""What is wrong with a recipe, in our form of error, with the key that was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pronghorn.config.habits import ALIASES, IN_SECTION, INSTEAD, NO_KEYS
from pronghorn.errors import ConfigError
from pronghorn.text import clip, short

_REMOVED = {
    "packing.metadata": "attach(model, experimental={'packing_metadata': ...})",
    "packing.moe_routing": "attach(model, experimental={'moe_routing': ...})",
    "memory.offload_buffers": "attach(model, Plan.offload(buffers=...))",
}
"""Keys of earlier releases that only measurements need, and what a script writes for them."""
_OF_TEXTS = ("literal_error", "value_error", "string_pattern_mismatch")
"""What pydantic calls what is wrong with a text where one may stand."""
_TRUTH = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_PLAIN = {
    "instance of <class 'pathlib.Path'>": "path",
    " for <class 'pathlib.Path'>": "",
    "dictionary or instance of Source": "table like {path: …}",
}
"""What pydantic calls the types of values, and we."""
_OTHERS = {
    "Axolotl": {"base_model", "sequence_len", "micro_batch_size", "lora_target_linear"},
    "LLaMA-Factory": {"finetuning_type", "stage", "cutoff_len", "dataset_dir", "template", "lora_rank"},
    "TRL": {"model_name_or_path", "dataset_name", "per_device_train_batch_size"},
}
"""Top-level keys that tell whose file it is; of several the first tool that has one."""
_SHARED = "leave it out: pronghorn train uses all GPUs, and launch.strategy: sharded shares the weights among them"
_NO_RECIPES = {
    ("compute_environment", "distributed_type"): ("a configuration of accelerate", _SHARED),
    ("zero_optimization",): ("a configuration of DeepSpeed", _SHARED),
    ("_component_",): ("a configuration of torchtune", "pronghorn init writes a recipe"),
    ("architectures", "model_type"): ("a model's configuration", "name the model's folder in a recipe: model.name"),
}
"""Keys that tell what else a file is, at its top or in a section, and what to do."""
CONVERTED = ("Axolotl", "LLaMA-Factory")
"""Tools whose files `pronghorn convert` reads."""


def tool_of(table: Mapping[Any, Any]) -> str | None:
    """Return whose configuration a YAML table is, None for a recipe or nothing known."""
    keys = set(table)
    if any(isinstance(table.get(section), dict) for section in ("model", "data", "train")):
        return None  # a recipe, if perhaps with a foreign key
    return next((tool for tool, own in _OTHERS.items() if own & keys), None)


def refuse_others(path: Path, table: dict[Any, Any]) -> None:
    """Refuse another tool's configuration, and tell how a recipe comes of it."""
    for keys, (what, remedy) in _NO_RECIPES.items():
        if set(keys) <= {*table, *(name for value in table.values() if isinstance(value, dict) for name in value)}:
            raise ConfigError(f"{path} is {what}, not a recipe", remedy)
    tool = tool_of(table)
    if "schema" in table:
        raise ConfigError(f"{path} is the record of a run, not a recipe", "give the YAML file that the run was made of")
    if tool in CONVERTED:
        raise ConfigError(f"{path} is a configuration of {tool}, not a recipe", f"pronghorn convert {path}")
    if tool is not None:
        names = [f"{name} is {ALIASES[name]}" for name in table if name in ALIASES]
        remedy = "; ".join(["pronghorn init writes a recipe", ", ".join(names[:6])] if names else ["pronghorn init"])
        raise ConfigError(f"{path} is a configuration of {tool}, not a recipe", remedy)


def without_removed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of an earlier version's run without the keys that recipes no longer have."""
    return {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in _REMOVED}
        for section, keys in recipe.items()
    }


def explain(error: ValidationError, source: str, about: dict[str, str]) -> ConfigError:
    """Return the first of pydantic's errors in our form, with the nearest known key for an unknown one.

    Args:
        about: what every known key means, by its name with dots; those of sources as `data.train.path`.
    """
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")  # `trian` before no `train`
    # of a path or a mixture pydantic tells what is wrong with it as either: what lies deepest is what was meant
    first = max(
        (each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]),
        key=lambda each: (
            len(each["loc"]),
            each["type"] == "extra_forbidden",
            (each["type"] in _OF_TEXTS) == isinstance(each["input"], str),
        ),
    )
    kinds = {each["type"] for each in errors if each["loc"][:2] == first["loc"][:2]}
    # `list[Source]`, `constrained-int` and the types that a value may have are pydantic's, no keys
    path = [part for part in map(str, first["loc"]) if not re.search(r"\[|^constrained-|^(bool|int|float|str)$", part)]
    key, value = ".".join(path), first.get("input")
    if key in _REMOVED:
        return ConfigError(
            f"{source}: {key} is not a key of a recipe any more", f"leave it out; to measure with it: {_REMOVED[key]}"
        )
    if key == "packing.attention" and value == "masked":
        remedy = "leave it out; to measure with it: attach(model, experimental={'masked_attention': True})"
        return ConfigError(f"{source}: packing.attention = 'masked' is no choice of a recipe any more", remedy)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{source}: unknown key {key}", _meant(path, about))
    if first["type"] == "missing":
        return ConfigError(f"{source}: {key} is missing", f"it has no default: set it{_described(path, about)}")
    message = first["msg"].removeprefix("Value error, ")
    for pydantic_name, plain in _PLAIN.items():
        message = message.replace(pydantic_name, plain)
    setting = ".".join(path[:2])
    remedy = f"set {_plain(path) if _plain(path) in about else setting}{_described(path, about) or ' (a section)'}"
    if value is None or first["type"] == "too_short":
        message = "an empty list" if value == [] else "a value is needed"
    quoted = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", value)
    if kinds & {"int_type", "float_type"} and quoted:
        message, remedy = "a number in quotes is a text", f"write {key}: {value}"
    elif "bool_type" in kinds and str(value).lower() in _TRUTH:
        message, remedy = "a text", f"write {key}: {_TRUTH[value.lower()]}, without quotes"
    elif first["type"] == "list_type":
        remedy += ", as a list: […]"
    elif first["type"] == "string_type" and isinstance(value, bool | int | float):  # a column called yes, or 0
        message = f"{'a truth value' if isinstance(value, bool) else 'a number'} in YAML, where a text is needed"
        remedy = "write it in quotes, as it is spelt"
    if len(path) == 1 and value is not None:
        message, remedy = "a section is a table of keys", f"write e.g. {key}: {{{_first_key(key, about)}: …}}"
        if re.search(r"\w:\S", str(value)):
            remedy += ", with a space after each colon"
    elif first["type"] == "string_pattern_mismatch":
        message = "no choice of this key"
    elif first["type"] == "literal_error" and message != "a number in quotes is a text":
        choices = re.findall("'([^']+)'", first["ctx"]["expected"])
        if near := _nearest(str(value).lower(), choices):
            remedy = f"did you mean {near}?"
        if len(choices) > 8:
            message, remedy = "no choice of this key", f"{remedy if near else 'the choices:'} {', '.join(choices)}"
    if setting == "memory.budget":
        message, remedy = "no amount of memory", f"write e.g. {setting}: 16GiB"
    if isinstance(value, str) and (setting, value) in INSTEAD:
        problem, remedy = INSTEAD[setting, value]
        message = problem or message
    shown = "null" if value is None else short(value)
    return ConfigError(f"{source}: {key} = {shown}: {message[0].lower()}{message[1:]}", remedy)


def _plain(path: list[str]) -> str:
    """Return a key without the places of sources in their list."""
    return ".".join(part for part in path if not part.isdigit())


def _described(path: list[str], about: dict[str, str]) -> str:
    """Return what a key, or the one that it belongs to, means, in brackets."""
    meaning = about.get(_plain(path)) or about.get(".".join(path[:2]))
    return f" ({meaning})" if meaning else ""


def _nearest(value: str, choices: list[str]) -> str | None:
    """Return the choice that begins like the value, or else resembles it."""
    alike = (choice for choice in choices if choice.startswith(value) or value.startswith(choice))
    return next(alike, None) or next(iter(difflib.get_close_matches(value, choices, n=1, cutoff=0.65)), None)


def _first_key(section: str, about: dict[str, str]) -> str:
    """Return the first key of a section."""
    return next((name.split(".")[1] for name in about if name.startswith(f"{section}.")), "key")


def without_section(key: str, value: str, about: Mapping[str, str]) -> str | None:
    """Return what to write instead of an override whose key names no section, or None where nobody knows."""
    if key in NO_KEYS:
        return NO_KEYS[key]
    own = next((name for name in about if name.count(".") == 1 and name.endswith(f".{key}")), None)
    meant = ALIASES.get(key) or own
    if meant is None:
        return None
    return (
        f"did you mean {meant}={clip(value.strip(), 60)}?"
        if "." in meant
        else f"the section is {meant}: write {meant}.KEY=…"
    )


def _meant(path: list[str], about: dict[str, str]) -> str:
    """Return what to write instead of an unknown key."""
    *outer, key = (part for part in path if not part.isdigit())
    if not outer and (whole := next((name for name in about if name.lower() == key.lower()), None)):
        section, _, name = whole.partition(".")
        return f"write {section}: {{{name}: …}}"
    if not outer and any(name.startswith(f"{key.lower()}.") for name in about):
        return f"did you mean {key.lower()}?"
    prefix = "".join(f"{part}." for part in outer)
    known = list(dict.fromkeys(name.removeprefix(prefix).split(".")[0] for name in about if name.startswith(prefix)))
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    everywhere = [name for name in about if name.endswith(f".{key}")]
    first, _, inner = key.partition(".")
    if inner and first in known:  # of an override
        return f"write {prefix}{first}: {{{inner}: …}}"
    if prefix.startswith("data.") and re.search(r"[./]", key):
        return f"write {{path: {key}, weight: …}}"
    if (meant := IN_SECTION.get(".".join([*outer, key]))) is not None:
        return meant
    if key in NO_KEYS:
        return NO_KEYS[key]
    if key in ALIASES:
        return f"did you mean {ALIASES[key]}?"
    if everywhere:
        return f"did you mean {everywhere[0]}?"
    return f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"known here: {', '.join(known)}"
