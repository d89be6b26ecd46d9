"""The recipe: one typed table that says a whole run; unknown keys and impossible values are refused by name.

A recipe is a YAML file of the sections below; `key.sub=value` pairs on the command line override it. docs/recipe.md is
this table for people, made from these classes (tests/test_config.py keeps them equal).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pronghorn.errors import ConfigError


class Section(BaseModel):
    """A section of the recipe: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Model(Section):
    """What is trained."""

    name: str = Field(description="local folder, saved adapter, .gguf file or hub name")
    max_seq_length: int = Field(gt=0, description="tokens of a packed row, and the most a document may have")
    load_in_4bit: bool = Field(False, description="NF4 base weights through bitsandbytes (QLoRA)")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the checkpoint")


class Adapter(Section):
    """How it is trained."""

    method: Literal["lora", "full"] = Field("lora", description="LoRA adapters, or every weight")
    r: int = Field(16, ge=1, description="LoRA rank")
    lora_alpha: int = Field(16, ge=1, description="LoRA's scale is lora_alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapters")
    target_modules: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="the linears that get adapters",
    )
    bias: Literal["none", "all", "lora_only"] = Field("none", description="which biases are trained")
    use_rslora: bool = Field(False, description="scale by lora_alpha / sqrt(r)")
    random_state: int = Field(3407, description="seeds the adapters' initialisation")


class Data(Section):
    """What it learns from."""

    train: Path = Field(description=".jsonl or .json file of messages, prompt and completion, or text")
    eval: Path | None = Field(None, description="held-out data in the same form")
    columns: dict[str, str] = Field({}, description="renames, e.g. {prompt: question, completion: answer}")
    loss_on: Literal["completion", "all"] = Field(
        "completion", description="train the assistant's turns, or all tokens"
    )
    overflow: Literal["error", "drop", "truncate"] = Field("error", description="documents over max_seq_length")
    eval_rows: int | None = Field(None, gt=0, description="evaluate at most this many packed rows")


class Packing(Section):
    """How documents share rows."""

    enabled: bool = Field(True, description="false pads batches to their longest document instead")
    rows_per_step: int = Field(1, ge=1, description="rows (or documents, unpacked) of a micro-batch")
    metadata: Literal["once", "per_layer", "per_layer_mask"] = Field(
        "once", description="once per batch; the others are ablations"
    )
    attention: Literal["auto", "flash", "per_document", "masked"] = Field("auto", description="attention backend")


class Train(Section):
    """How long, how fast, and where the result goes."""

    output: Path = Field(description="folder of the run; must be new or empty")
    max_steps: int | None = Field(None, gt=0, description="optimiser steps; null trains for `epochs`")
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    max_minutes: float | None = Field(None, gt=0, description="stop after this long, whatever the steps")
    learning_rate: float = Field(2e-4, gt=0, description="the highest learning rate")
    warmup_steps: int = Field(5, ge=0, description="steps of linear warm-up")
    lr_scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        "linear", description="decay after the warm-up"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    max_grad_norm: float = Field(1.0, ge=0, description="clip the global gradient norm; 0 doesn't")
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-batches of an optimiser step")
    save_steps: int | None = Field(None, gt=0, description="checkpoint every so many steps")
    logging_steps: int = Field(1, ge=1, description="log every so many steps")
    seed: int = Field(3407, ge=0, description="seeds data order, packing and dropout")
    deterministic: bool = Field(False, description="bit-equal repeats, slower")
    min_improvement: float | None = Field(None, description="fail unless the held-out loss falls by this much")


class Memory(Section):
    """What is kept for the backward pass."""

    gradient_checkpointing: bool | Literal["auto", "unsloth"] = Field(
        "auto", description="recompute layers in the backward pass; auto and unsloth mean true for now"
    )


class Precision(Section):
    """In what numbers."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 on a GPU, float16 on one before Ampere, float32 on the CPU"
    )


class Report(Section):
    """What is shown afterwards."""

    html: bool = Field(True, description="write report.html")
    sample_prompts: list[str] = Field([], description="prompts answered before and after training")
    sample_tokens: int = Field(64, gt=0, description="length of those answers")


class Recipe(Section):
    """A whole run."""

    model: Model
    adapter: Adapter = Adapter()
    data: Data
    packing: Packing = Packing()
    train: Train
    memory: Memory = Memory()
    precision: Precision = Precision()
    report: Report = Report()

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a recipe and apply overrides like `train.max_steps=3` (values are YAML).

        Raises:
            ConfigError: a file that is missing or not YAML, a key set twice, an unknown key, a value out of range, an
                override without "=", data files that don't exist, settings that contradict each other.
        """
        path = Path(path)
        if not path.is_file():
            raise ConfigError(
                f"recipe {path} does not exist", "give the path of a YAML file, e.g. recipes/demo-cpu.yaml"
            )
        table = _parse(path.read_text(encoding="utf-8"), str(path))
        for override in overrides:
            _override(table, override)
        try:
            recipe = cls.model_validate(table)
        except ValidationError as error:
            raise _explain(error, str(path)) from None
        recipe._check()
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML or JSON can hold them."""
        return self.model_dump(mode="json")

    def _check(self) -> None:
        for key, file in (("data.train", self.data.train), ("data.eval", self.data.eval)):
            if file is not None and not file.is_file():
                raise ConfigError(f"{key}: {file} does not exist", "give the path of a .jsonl or .json file")
        if self.train.min_improvement is not None and self.data.eval is None:
            raise ConfigError("train.min_improvement needs held-out data", "give data.eval, or leave it out")
        if self.adapter.method == "full" and self.model.load_in_4bit:
            raise ConfigError(
                "adapter.method: full with model.load_in_4bit: 4-bit weights can't be trained",
                "set adapter.method: lora or load_in_4bit: false",
            )


def fields() -> Iterator[tuple[str, str, str, str]]:
    """Every key of the recipe as (key, type, default, description), for help texts and docs."""
    for name, section in Recipe.model_fields.items():
        for key, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            kind = getattr(field.annotation, "__name__", "") if isinstance(field.annotation, type) else ""
            kind = kind if kind and "[" not in str(field.annotation) else str(field.annotation)
            kind = kind.replace("typing.", "").replace("pathlib.", "").replace("NoneType", "None")
            kind = re.sub(r"Literal\[([^]]*)\]", lambda match: match[1].replace("'", "").replace(", ", " | "), kind)
            default = "required" if field.is_required() else yaml.safe_dump(field.default, default_flow_style=True)
            yield f"{name}.{key}", kind, default.replace("\n...", "").strip(), field.description or ""


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key set twice (the last would win silently)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise ConfigError(f"{loader.name} line {line}: key {key!r} is set twice", "delete one of the two")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(  # YAML 1.1 reads 1e-3 as text; people mean the number
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str, source: str) -> dict[str, Any]:
    loader = _Loader(text)
    loader.name = source
    try:
        table = loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{where}: not YAML ({getattr(error, 'problem', error)})", "mend that line") from None
    finally:
        loader.dispose()
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: a recipe is a table of sections", f"begin with {', '.join(Recipe.model_fields)}")
    return table


def _override(table: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    section, dot, name = key.partition(".")
    if not equals or not dot or not name:
        raise ConfigError(f"override {override!r} is not section.key=value", "write e.g. train.max_steps=3")
    if table.setdefault(section, {}) is None:
        table[section] = {}
    if not isinstance(table[section], dict):
        raise ConfigError(f"override {override!r}: {section} is no section", "write e.g. train.max_steps=3")
    table[section][name] = _Loader(value).get_single_data()


def _explain(error: ValidationError, source: str) -> ConfigError:
    """The first of pydantic's errors in our form, with the nearest known key for an unknown one."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key, value = ".".join(path), first.get("input")
    if first["type"] == "extra_forbidden":
        if len(path) == 1:
            known = list(Recipe.model_fields)
        else:
            known = list(Recipe.model_fields[path[0]].annotation.model_fields)  # type: ignore[union-attr]
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        everywhere = [name for name, *_ in fields() if name.endswith(f".{path[-1]}")]
        prefix = "" if len(path) == 1 else f"{path[0]}."
        if near:
            remedy = f"did you mean {prefix}{near[0]}?"
        elif everywhere:
            remedy = f"did you mean {everywhere[0]}?"
        else:
            remedy = f"known here: {', '.join(known)}"
        return ConfigError(f"{source}: unknown key {key}", remedy)
    if first["type"] == "missing":
        return ConfigError(f"{source}: {key} is missing", "it has no default: set it")
    message = first["msg"][0].lower() + first["msg"][1:]
    return ConfigError(f"{source}: {key} = {value!r}: {message}", f"change {'.'.join(path[:2])}")
