"""The recipe: one typed table that says a whole run; unknown keys and impossible values are refused by name.

A recipe is a YAML file of the sections below; `key.sub=value` pairs on the command line override it. docs/recipe.md is
this table for people, made from these classes (tests/test_config.py keeps them equal).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pronghorn.errors import ConfigError
from pronghorn.optimizers import OptimizerName
from pronghorn.recipe_errors import explain, refuse_others
from pronghorn.recipe_values import (
    ALL_LINEAR,
    File,
    FileOrName,
    Seed,
    Texts,
    dtype_name,
    listed,
    modules,
    on_or_off,
)
from pronghorn.recipe_yaml import LARGEST_FILE, override_key, parse
from pronghorn.text import short


class Section(BaseModel):
    """A section of the recipe: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Model(Section):
    """What is trained."""

    name: FileOrName = Field(min_length=1, description="local folder, saved adapter, .gguf file or hub name")
    max_seq_length: int = Field(gt=0, description="tokens of a packed row, and the most a document may have")
    load_in_4bit: bool = Field(False, description="NF4 base weights, experts too, through bitsandbytes (QLoRA)")
    experts_in_16bit: bool = Field(False, description="with load_in_4bit, leave experts in 16 bits")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the checkpoint")
    plugins: Texts = Field([], description="Python modules to import before the model loads; they register families")


class Adapter(Section):
    """How it is trained."""

    method: Literal["lora", "full"] = Field("lora", description="LoRA adapters, or every weight")
    r: int = Field(16, ge=1, description="LoRA rank")
    lora_alpha: int = Field(16, ge=1, description="LoRA's scale is lora_alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapters")
    target_modules: Annotated[list[str], BeforeValidator(modules)] = Field(
        [ALL_LINEAR],
        min_length=1,
        description="the linears that get adapters, e.g. [q_proj, v_proj]; all-linear: those of the model's family",
    )
    target_parameters: Texts = Field(
        [], description="weights of experts that get adapters: mlp.experts.gate_up_proj, mlp.experts.down_proj"
    )
    bias: Literal["none", "all", "lora_only"] = Field("none", description="which biases are trained")
    use_rslora: bool = Field(False, description="scale by lora_alpha / sqrt(r)")
    random_state: Seed = Field(3407, description="seeds the adapters' initialisation")
    modules_to_save: Texts = Field([], description="modules trained whole and saved with the adapter, e.g. lm_head")
    new_tokens: Texts = Field([], description="tokens to add, e.g. <think>; their embeddings are trained")


DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference"]


class Source(Section):
    """One part of a mixture."""

    path: File = Field(description="file, folder or hub name")
    weight: float | None = Field(None, gt=0, description="share of the rows, relative to the others")
    format: Format = Field("auto", description="as data.format, for this source")
    columns: dict[str, str] = Field({}, description="as data.columns, for this source")

    @property
    def is_hub_name(self) -> bool:
        """Tell whether the path, if it does not exist, can be the name of a data set on the hub: "owner/name"."""
        return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", self.path.as_posix())) and self.path.suffix not in DATA_FILES


class Data(Section):
    """What it learns from."""

    train: File | Annotated[list[Source], Field(min_length=1)] = Field(
        description="file (.jsonl, .json, .parquet, .csv, .txt), folder, hub name, or list of {path, weight, "
        "format, columns}"
    )
    eval: File | Annotated[list[Source], Field(min_length=1)] | None = Field(
        None, description="held-out data, named in the same way"
    )
    format: Format = Field("auto", description="what a row is; auto goes by its keys")
    columns: dict[str, str] = Field({}, description="renames, e.g. {prompt: question, completion: answer}")
    bad_rows: Literal["error", "drop"] = Field(
        "error", description="rows that can't be trained on: stop, or count them"
    )
    chat_template: FileOrName | None = Field(
        None,
        description="chatml, llama-3, qwen-2.5, gemma, mistral or a .jinja file; null is the tokenizer's own",
    )
    system_prompt: str | None = Field(None, min_length=1, description="begins conversations without a system message")
    control_tokens: Literal["escape", "error", "allow"] = Field(
        "escape",
        description="control tokens like <|im_end|> in what others than the assistant say: make them ordinary text, "
        "refuse the row, or let them end turns",
    )
    loss_on: Literal["completion", "last", "all"] = Field(
        "completion", description="train the assistant's turns, only the last of them, or all tokens"
    )
    overflow: Literal["error", "drop", "truncate", "split"] = Field(
        "error", description="documents over max_seq_length; split keeps every label, in pieces"
    )
    eval_rows: int | None = Field(None, gt=0, description="evaluate at most this many packed rows")
    cache: File | None = Field(None, description="folder of tokenised data; null is `pronghorn` in HF_HOME")
    workers: int | None = Field(None, gt=0, description="processes that tokenise large sets; null is one a core")

    def sources(self, split: Literal["train", "eval"]) -> list[Source]:
        """Return the sources of `train` or `eval`, each with its own settings or else the section's.

        Raises ConfigError for a mixture where some sources have a weight and others none.
        """
        named = self.train if split == "train" else self.eval
        sources = named if isinstance(named, list) else [Source(path=named)] if named is not None else []
        weighted = sum(source.weight is not None for source in sources)
        if 0 < weighted < len(sources):
            raise ConfigError(
                f"data.{split}: {weighted} of {len(sources)} sources have a weight", "give every source one, or none"
            )
        return [
            source.model_copy(
                update={
                    "format": self.format if source.format == "auto" else source.format,
                    "columns": source.columns or self.columns,
                }
            )
            for source in sources
        ]


class Packing(Section):
    """How documents share rows."""

    enabled: bool = Field(True, description="false pads batches to their longest document instead")
    rows_per_step: int = Field(1, ge=1, description="rows (or documents, unpacked) of a micro-batch")
    attention: Literal["auto", "tiled", "flash", "per_document"] = Field("auto", description="attention backend")
    graph: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = Field(
        "auto", description="launch layers as one CUDA graph; auto: where that is measured to pay"
    )


class Train(Section):
    """How long, how fast, and where the result goes."""

    output: File = Field(description="folder of the run: new, empty, or that of the same run, unfinished")
    max_steps: int | None = Field(None, gt=0, description="optimiser steps; null trains for `epochs`")
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    max_minutes: float | None = Field(None, gt=0, description="stop after this long, whatever the steps")
    optimizer: OptimizerName = Field(
        "adamw_torch_fused",
        description="by name: torch's, bitsandbytes' (8bit, paged) or torchao's (torch_8bit, torch_4bit); "
        "see docs/precision.md",
    )
    learning_rate: float = Field(2e-4, gt=0, description="the highest learning rate")
    warmup_steps: int = Field(5, ge=0, description="steps of linear warm-up")
    lr_scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        "linear", description="decay after the warm-up"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    max_grad_norm: float = Field(1.0, ge=0, description="clip the global gradient norm; 0 doesn't")
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-batches of an optimiser step")
    save_steps: int | None = Field(None, gt=0, description="checkpoint every so many steps")
    save_minutes: float | None = Field(10, gt=0, description="checkpoint when the last one is this old")
    keep_checkpoints: int = Field(2, ge=1, description="keep the newest so many, and the best")
    eval_steps: int | None = Field(None, gt=0, description="evaluate held-out rows every so many steps")
    patience: int | None = Field(None, gt=0, description="stop after so many evaluations without a lower loss")
    load_best: bool = Field(True, description="with eval_steps, the result is the checkpoint of the lowest loss")
    logging_steps: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        0.01,
        description="log every so many steps, or each such share of the run, and every half a minute; a step that logs "
        "waits for the GPU",
    )
    seed: Seed = Field(3407, description="seeds data order, packing and dropout")
    deterministic: bool = Field(False, description="bit-equal repeats, slower")
    min_improvement: float | None = Field(None, description="fail unless the held-out loss falls by this much")
    report_to: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(listed)] = Field(
        [], description="where else figures go"
    )


class Memory(Section):
    """What is kept for the backward pass."""

    gradient_checkpointing: bool | Literal["auto", "offload", "unsloth"] = Field(
        "auto",
        description="recompute layers in the backward pass; offload or unsloth: keep their inputs in host memory "
        "meanwhile; auto: on CUDA keep what fits into the memory there is, elsewhere true",
    )
    budget: str | None = Field(
        None,
        pattern=r"^\d+(\.\d+)?\s*(GiB|GB|MiB|MB)$",
        description="GPU memory this process may take, e.g. 16GiB; null is what is free",
    )


class Precision(Section):
    """In what numbers."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(dtype_name)] = Field(
        "auto",
        description="or fp32, bf16, fp16; auto: bfloat16 on a GPU, float16 on one before Ampere, float32 on the CPU",
    )
    adapter_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(dtype_name)] = Field(
        "auto",
        description="of LoRA's matrices, their gradients and torch's optimiser states; auto: float32",
    )
    tf32: bool = Field(
        False, description="round float32 products to tf32 on Ampere and newer: faster, ten bits instead of 23"
    )
    compute: Literal["dtype", "fp8", "fp8_exact"] = Field(
        "dtype",
        description="in what frozen linears multiply: dtype, or in 8 bits by rows (Ada and newer, packed rows, LoRA); "
        "fp8_exact sums exactly, 9 % slower a product. See docs/precision.md",
    )


class Report(Section):
    """What is shown afterwards."""

    html: bool = Field(True, description="write report.html")
    sample_prompts: Texts = Field([], description="prompts answered before and after training")
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
        table = parse(_read(path), str(path))
        if not isinstance(table, dict):
            known = ", ".join(Recipe.model_fields)
            raise ConfigError(f"{path}: a recipe is a table of sections", f"begin with {known}")
        refuse_others(path, table)
        for override in overrides:
            override_key(table, override)
        table = {section: {} if value is None else value for section, value in table.items()}
        try:
            recipe = cls.model_validate(table)
        except ValidationError as error:
            raise explain(error, str(path), _about()) from None
        recipe._check()
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as YAML or JSON can hold them."""
        return self.model_dump(mode="json")

    def _check(self) -> None:
        """Refuse settings that contradict each other, and files that don't exist."""
        if os.path.realpath(self.train.output) == os.getcwd():  # `resolve` raises at a loop of links
            raise ConfigError("train.output is the current folder", "give the run a folder of its own")
        kinds = ", ".join(DATA_FILES)
        for split in ("train", "eval"):
            for source in self.data.sources(split):
                if not os.path.exists(source.path) and not source.is_hub_name:  # of an unreadable one Path's raises
                    raise ConfigError(
                        f"data.{split}: {source.path} does not exist",
                        f"give the path of a {kinds} file or folder, or a hub name",
                    )
        if self.train.min_improvement is not None and self.data.eval is None:
            raise ConfigError("train.min_improvement needs held-out data", "give data.eval, or leave it out")
        lora_only = self.adapter.modules_to_save or self.adapter.new_tokens or self.adapter.target_parameters
        if self.adapter.method == "full" and lora_only:
            raise ConfigError(
                "adapter.method: full trains everything: modules_to_save, new_tokens and target_parameters are LoRA's",
                "leave them out; for full fine-tuning add tokens to the model's folder beforehand",
            )
        if self.train.eval_steps is not None and self.data.eval is None:
            raise ConfigError("train.eval_steps needs held-out data", "give data.eval, or leave it out")
        if self.train.patience is not None and self.train.eval_steps is None:
            raise ConfigError("train.patience counts evaluations, and there are none", "set train.eval_steps")
        for tool in self.train.report_to:
            if importlib.util.find_spec(tool) is None:
                raise ConfigError(f"train.report_to: {tool} is not installed", f"pip install {tool}")
        self._check_compute()
        self._check_adapter_dtype()
        if self.adapter.method == "full" and self.model.load_in_4bit:
            raise ConfigError(
                "adapter.method: full with model.load_in_4bit: 4-bit weights can't be trained",
                "set adapter.method: lora or load_in_4bit: false",
            )

    def _check_adapter_dtype(self) -> None:
        asked = self.precision.adapter_dtype
        if asked == "float16":
            raise ConfigError(
                "precision.adapter_dtype: float16: its gradients need loss scaling, and torch can't unscale float16",
                "use float32, or bfloat16",
            )
        if asked != "auto" and self.adapter.method == "full":
            raise ConfigError(
                f"precision.adapter_dtype: {asked} with adapter.method: full, which has no adapters",
                "leave precision.adapter_dtype out: trained weights are kept in float32",
            )

    def _check_compute(self) -> None:
        compute, remedy = self.precision.compute, "leave precision.compute out, or"
        if compute == "dtype":
            return
        if self.adapter.method == "full":
            raise ConfigError(
                f"precision.compute: {compute} with adapter.method: full: 8-bit products are for frozen weights",
                f"{remedy} set adapter.method: lora",
            )
        if not self.packing.enabled:
            raise ConfigError(
                f"precision.compute: {compute} with packing.enabled: false: padded batches go through transformers",
                f"{remedy} set packing.enabled: true",
            )
        if self.precision.dtype == "float32":
            raise ConfigError(
                f"precision.compute: {compute} with precision.dtype: float32", f"{remedy} set precision.dtype: bfloat16"
            )


def _read(path: Path) -> str:
    """Return the text of a file, which may be no recipe."""
    remedy = "give the path of a YAML file, e.g. recipes/demo-cpu.yaml"
    try:
        if path.is_dir():
            raise ConfigError(f"recipe {path} is a folder", remedy)
        if not path.is_file():
            raise ConfigError(f"recipe {path} does not exist", remedy)
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
