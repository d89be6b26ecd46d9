"""What is wrong with a recipe, in our form of error, with the key that was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pronghorn.errors import ConfigError
from pronghorn.text import short

ALIASES = {
    "model": "model.name",
    "data": "data.train",
    "output": "train.output",
    "lr": "train.learning_rate",
    "batch_size": "packing.rows_per_step",
    "micro_batch_size": "packing.rows_per_step",
    "per_device_train_batch_size": "packing.rows_per_step",
    "base_model": "model.name",
    "model_name_or_path": "model.name",
    "max_length": "model.max_seq_length",
    "sequence_len": "model.max_seq_length",
    "cutoff_len": "model.max_seq_length",
    "quantization_bit": "model.load_in_4bit",
    "datasets": "data.train",
    "dataset": "data.train",
    "template": "data.chat_template",
    "truncation": "data.overflow",
    "sample_packing": "packing.enabled",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "output_dir": "train.output",
    "lr_scheduler_type": "train.lr_scheduler",
    "optim": "train.optimizer",
    "optimiser": "train.optimizer",
    "gradient_checkpointing": "memory.gradient_checkpointing",
    "load_in_4bit": "model.load_in_4bit",
    "max_seq_len": "model.max_seq_length",
    "steps": "train.max_steps",
    "val_size": "data.eval",
    "val_set_size": "data.eval",
    "test_size": "data.eval",
    "eval_dataset": "data.eval",
    "train_dataset": "data.train",
    "train_on_inputs": "data.loss_on",
    "finetuning_type": "adapter.method",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_target": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "use_gradient_checkpointing": "memory.gradient_checkpointing",
    "bf16": "precision.dtype",
    "fp16": "precision.dtype",
    "torch_dtype": "precision.dtype",
    "bits": "model.load_in_4bit",
    "seed": "train.seed",
    "lora": "adapter",
    "peft": "adapter",
    "rank": "adapter.r",
    "attn_implementation": "packing.attention",
    "flash_attention": "packing.attention",
    "save_total_limit": "train.keep_checkpoints",
    "packing_strategy": "packing.enabled",
    "field_messages": "data.columns",
    "weights": "data.train.weight",
    "train_batch_size": "packing.rows_per_step",
    "deepspeed": "launch.strategy",
    "fsdp": "launch.strategy",
    "wandb": "train.report_to",
}
"""What other libraries call a key."""
_PUSHED = "pronghorn export RUN --push OWNER/NAME pushes what a run trained"
_NO_KEYS = {
    "adam_beta1": "leave it out: the optimiser's own is used",
    "adam_beta2": "leave it out: the optimiser's own is used",
    "dataloader_num_workers": "leave it out: rows are tokenised before training",
    "dataset_num_proc": "did you mean data.workers?",
    "device_map": "leave it out: launch.gpus and launch.strategy say what goes where",
    "group_by_length": "leave it out: packing fills rows whatever the lengths",
    "hub_model_id": _PUSHED,
    "load_in_16bit": "leave it out: weights are in 16 bits unless load_in_4bit is set",
    "logging_dir": "leave it out: figures for train.report_to go into train.output",
    "loraplus_lr_ratio": "leave it out: both of an adapter's matrices learn at train.learning_rate",
    "per_device_eval_batch_size": "leave it out: held-out rows are packed, too",
    "push_to_hub": _PUSHED,
    "resume_from_checkpoint": "leave it out: the same command goes on with an unfinished run",
    "revision": "hf download OWNER/NAME --revision REVISION --local-dir FOLDER, and give the folder as model.name",
    "rope_scaling": "set it in the model's config.json",
    "shuffle": "leave it out: rows are shuffled by data.seed",
    "streaming": "leave it out: JSON lines and Parquet are read piece by piece, and need not fit into memory",
    "run_name": "leave it out: a run is called as its train.output",
    "tokenizer": "leave it out: the model's own is used; data.chat_template sets another template",
    "torch_compile": "leave it out: layers are fused already",
    "use_liger_kernel": "leave it out: layers are fused already",
}
"""Keys of other libraries that no key of a recipe stands for, and what to do."""
_IN_SECTION = {
    "adapter.type": "did you mean adapter.method?",
    "adapter.enabled": "did you mean adapter.method? full trains every weight",
    "data.packing": "did you mean packing.enabled?",
    "data.train.type": "did you mean format, of the same source?",
    "data.train.name": "did you mean config, of a hub set?",
    "packing.strategy": "leave it out: rows are filled best fit first",
}
"""What keys of other libraries mean in one section."""
_QUANTISED = (
    "its adapters fit only the quantised weights that LoftQ makes itself, which neither a server nor a merge has",
    "with load_in_4bit leave it out (adapters of all linears make up for what NF4 loses); without, use pissa",
)
_INSTEAD = {
    ("adapter.method", "qlora"): ("", "set adapter.method: lora and model.load_in_4bit: true"),
    ("adapter.method", "dora"): ("", "set adapter.method: lora and adapter.use_dora: true"),
    ("adapter.init_lora_weights", "loftq"): _QUANTISED,
    ("train.optimizer", "muon"): (
        "transformers has no Muon by name",
        "use adamw_torch_fused; a script may give SFTTrainer optimizer_cls_and_kwargs=(torch.optim.Muon, {…}), which "
        "takes 2-D weights alone, as LoRA's are",
    ),
}
"""What is wrong with values that people know from elsewhere, and what to write."""
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
            f"{source}: {key} is no key of a recipe any more", f"leave it out; to measure with it: {_REMOVED[key]}"
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
    remedy = f"set {key if _plain(path) in about else setting}{_described(path, about) or ' (a section)'}"
    if value is None or first["type"] == "too_short":
        message = "an empty list" if value == [] else "a value is needed"
    quoted = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", value)
    if kinds & {"int_type", "float_type"} and quoted:
        message, remedy = "a number in quotes is a text", f"write {key}: {value}"
    elif "bool_type" in kinds and str(value).lower() in _TRUTH:
        message, remedy = "a text", f"write {key}: {_TRUTH[value.lower()]}, without quotes"
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
    if isinstance(value, str) and (setting, value) in _INSTEAD:
        problem, remedy = _INSTEAD[setting, value]
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
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    everywhere = [name for name in about if name.endswith(f".{key}")]
    if (meant := _IN_SECTION.get(".".join([*outer, key]))) is not None:
        return meant
    if key in _NO_KEYS:
        return _NO_KEYS[key]
    if key in ALIASES:
        return f"did you mean {ALIASES[key]}?"
    if near:
        return f"did you mean {'.'.join([*path[:-1], near[0]])}?"
    return f"did you mean {everywhere[0]}?" if everywhere else f"known here: {', '.join(known)}"
