"""The sections of a recipe and their keys: types, limits, defaults, and what each means. recipe.py joins them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pronghorn.compute_names import ComputeName
from pronghorn.config.values import (
    ALL_LINEAR,
    File,
    FileOrName,
    HeldOut,
    Names,
    Seed,
    Texts,
    data_or_share,
    dtype_name,
    listed_table,
    modules,
    on_or_off,
    share,
    tools,
)
from pronghorn.errors import ConfigError
from pronghorn.optimizers import OptimizerName
from pronghorn.text import does

INIT = "gaussian|orthogonal|olora|pissa|pissa_niter_[0-9]{1,4}"
CHANGES_BASE = ("pissa", "olora")
"""Ways to begin that take the adapter's first product out of the base's weights."""
Scheduler = Literal[
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "reduce_lr_on_plateau",
    "greedy",
]
ON_LOSS = ("reduce_lr_on_plateau", "greedy")
"""Schedules that go by the held-out loss."""


class Section(BaseModel):
    """A section of the recipe: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Model(Section):
    """The model to train."""

    name: FileOrName = Field(min_length=1, description="a local folder, a saved adapter, a .gguf file or a hub name")
    max_seq_length: int = Field(gt=0, description="tokens of a packed row; no document may be longer")
    load_in_4bit: bool = Field(
        False, description="store base weights, experts too, in NF4 through bitsandbytes (QLoRA)"
    )
    experts_in_16bit: bool = Field(False, description="with load_in_4bit, leave experts in 16 bits")
    dropout: bool = Field(
        True,
        description="drop in training what the checkpoint's configuration says (attention_dropout, residual_dropout), "
        "by transformers' own layers; false: drop nothing there. Most configurations drop nothing",
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the checkpoint")
    plugins: Names = Field([], description="Python modules to import before the model loads; they register families")


class Adapter(Section):
    """What is trained: adapters or every weight."""

    method: Literal["lora", "full"] = Field("lora", description="LoRA adapters, or every weight")
    r: int = Field(16, ge=1, description="LoRA rank")
    lora_alpha: int = Field(16, ge=1, description="LoRA's scale is lora_alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' inputs")
    target_modules: Annotated[list[str], BeforeValidator(modules)] = Field(
        [ALL_LINEAR],
        min_length=1,
        description="linears that get adapters, e.g. [q_proj, v_proj]; all-linear: the defaults of the model's family",
    )
    target_parameters: Names = Field(
        [], description="experts' weights that get adapters: mlp.experts.gate_up_proj, mlp.experts.down_proj"
    )
    bias: Literal["none", "all", "lora_only"] = Field("none", description="biases to train")
    use_rslora: bool = Field(False, description="scale by lora_alpha / sqrt(r)")
    random_state: Seed = Field(3407, description="seed of the adapters' initialisation")
    rank_pattern: dict[str, int] = Field({}, description="another rank for modules by name, e.g. {down_proj: 32}")
    alpha_pattern: dict[str, int] = Field({}, description="another lora_alpha for modules by name")
    use_dora: bool = Field(
        False, description="use DoRA, which trains magnitudes apart from directions; PEFT computes it, slower"
    )
    init_lora_weights: bool | Annotated[str, Field(pattern=f"^({INIT})$")] = Field(
        True,
        description="how adapters begin: true (Kaiming), gaussian, orthogonal, olora, pissa or pissa_niter_16 (faster, "
        "approximate). olora and pissa are saved as plain LoRA of twice the rank",
    )
    modules_to_save: Names = Field([], description="modules to train whole and save with the adapter, e.g. lm_head")
    new_tokens: Texts = Field([], description="tokens to add, e.g. <think>; their embeddings are trained")


DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]


class Source(Section):
    """One part of a mixture."""

    path: File = Field(description="file, folder or hub name")
    weight: float | None = Field(None, gt=0, description="share of the rows, relative to the other sources")
    split: str = Field("train", min_length=1, description="split of a hub set, also a slice like train[:10%]")
    config: str | None = Field(None, description="configuration of a hub set that has several, e.g. main")
    revision: str | None = Field(None, description="branch, tag or commit of a hub set")
    max_samples: int | None = Field(None, gt=0, description="as data.max_samples, for this source")
    format: Format = Field("auto", description="as data.format, for this source")
    columns: dict[str, str] = Field({}, description="as data.columns, for this source")

    @property
    def is_hub_name(self) -> bool:
        """Tell whether the path, if it does not exist, can be the name of a data set on the hub: "owner/name"."""
        return (
            bool(re.fullmatch(r"[\w.-]+/[\w.-]+", self.path.as_posix())) and self.path.suffix.lower() not in DATA_FILES
        )


Sources = Annotated[list[Source], Field(min_length=1)]


class Data(Section):
    """What the model learns from."""

    train: Annotated[File | Sources, BeforeValidator(listed_table)] = Field(
        description="a file (.jsonl, .json, .parquet, .csv, .txt), folder or hub name, or a list of {path, weight, "
        "format, columns, max_samples}; for a hub set also split, config, revision"
    )
    eval: Annotated[File | Sources | HeldOut | None, BeforeValidator(data_or_share)] = Field(
        None,
        description="held-out data, named like data.train; or a share (5%) or count (200) of data.train's "
        "conversations, which are then not trained",
    )
    max_samples: int | None = Field(None, gt=0, description="read only this many rows of each source, from its start")
    seed: Seed | None = Field(
        None, description="seed of the held-out share, mixtures, packing and order; null uses train.seed"
    )
    format: Format = Field("auto", description="what a row is; auto recognises it by its keys")
    columns: dict[str, str] = Field(
        {}, description="your names for our columns, e.g. {prompt: question, completion: answer}"
    )
    bad_rows: Literal["error", "drop"] = Field(
        "error", description="rows that can't be trained on: stop, or drop and count them"
    )
    chat_template: FileOrName | None = Field(
        None,
        description="chatml, llama-3, llama-3.1, qwen-2.5, qwen-3, gemma, mistral, gpt-oss, phi-4 or a .jinja file; "
        "null uses the tokenizer's own",
    )
    system_prompt: str | None = Field(None, min_length=1, description="system message for conversations that have none")
    control_tokens: Literal["escape", "error", "allow"] = Field(
        "escape",
        description="control tokens like <|im_end|> in text that isn't the assistant's: make them ordinary text, "
        "refuse the row, or let them end turns",
    )
    loss_on: Literal["completion", "last", "all"] = Field(
        "completion", description="train every turn of the assistant, only its last one, or all tokens"
    )
    overflow: Literal["error", "drop", "truncate", "split"] = Field(
        "error", description="documents longer than max_seq_length; split cuts them into pieces and keeps every label"
    )
    eval_rows: int | None = Field(None, gt=0, description="evaluate at most this many packed rows")
    cache: File | None = Field(None, description="folder for tokenised data; null uses `pronghorn` in HF_HOME")
    workers: int | None = Field(None, gt=0, description="processes that tokenise large sets; null uses one a core")

    @property
    def held_out(self) -> str | None:
        """Return the share (5%) or count (200) of `train` that is held out, if that is what `eval` says."""
        return self.eval if isinstance(self.eval, str) else None

    def sources(self, split: Literal["train", "eval"]) -> list[Source]:
        """Return the sources of `train` or `eval`, each with its own settings or else the section's; where a share of
        `train` is held out, both have the same.

        Raises ConfigError for a mixture where some sources have a weight and others none.
        """
        named = self.train if split == "train" or self.held_out is not None else self.eval
        assert not isinstance(named, str)
        sources = named if isinstance(named, list) else [Source(path=named)] if named is not None else []
        weighted = sum(source.weight is not None for source in sources)
        if 0 < weighted < len(sources):
            raise ConfigError(
                f"data.{split}: {weighted} of {len(sources)} sources {does(weighted, 'have')} a weight",
                "give every source one, or none",
            )
        return [
            source.model_copy(
                update={
                    "format": self.format if source.format == "auto" else source.format,
                    "columns": source.columns or self.columns,
                    "max_samples": source.max_samples or self.max_samples,
                }
            )
            for source in sources
        ]


class Packing(Section):
    """How documents share rows."""

    enabled: bool = Field(
        True,
        description="pack documents; false: a micro-batch has rows_per_step documents, end to end without padding if "
        "the model allows it (see pronghorn docs finetune)",
    )
    rows_per_step: int = Field(1, ge=1, description="rows (or documents, unpacked) of a micro-batch")
    attention: Literal["auto", "tiled", "flash", "per_document"] = Field("auto", description="attention backend")
    look_ahead: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="regroup the rows of this many steps so that rows of a step take about the same time on several "
        "GPUs; auto: 16 if their times differ, otherwise 1",
    )
    graph: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = Field(
        "auto", description="launch layers as one CUDA graph; auto: if the first steps show that it pays"
    )


class Train(Section):
    """How long, how fast, and where the result goes."""

    output: File = Field(description="folder of the run: new, empty, or the same run's if it is unfinished")
    max_steps: int | None = Field(None, gt=0, description="optimiser steps; null trains for `epochs`")
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    max_minutes: float | None = Field(None, gt=0, description="stop after this many minutes, whatever the steps")
    optimizer: OptimizerName = Field(
        "adamw_torch_fused",
        description="optimiser of torch, bitsandbytes (8bit, paged, lion, ademamix), torchao (torch_8bit, torch_4bit) "
        "or transformers (adafactor); see pronghorn docs precision",
    )
    learning_rate: float = Field(
        2e-4, gt=0, le=10, description="the highest learning rate, e.g. 2e-4 for LoRA, 2e-5 for every weight"
    )
    warmup_steps: int = Field(5, ge=0, description="steps of linear warm-up")
    warmup_ratio: Annotated[float | None, BeforeValidator(share)] = Field(
        None, ge=0, lt=1, description="share of all steps (0.1 or 10%), instead of warmup_steps"
    )
    lr_scheduler: Scheduler = Field("linear", description="schedule after the warm-up, by transformers' names")
    lr_scheduler_kwargs: dict[str, float] = Field(
        {}, description="arguments of the schedule, e.g. {min_lr_rate: 0.1} for cosine_with_min_lr"
    )
    neftune_noise_alpha: float | None = Field(
        None,
        gt=0,
        description="NEFTune's noise on embeddings; it is divided by the square root of a row's tokens times width",
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    max_grad_norm: float = Field(1.0, ge=0, description="clip the global gradient norm to this; 0 doesn't clip")
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-batches of an optimiser step, over all GPUs")
    save_steps: int | None = Field(None, gt=0, description="checkpoint every so many steps")
    save_minutes: float | None = Field(10, gt=0, description="checkpoint when the last one is this many minutes old")
    keep_checkpoints: int = Field(2, ge=1, description="keep this many of the newest checkpoints, and the best")
    eval_steps: int | None = Field(None, gt=0, description="evaluate held-out rows every so many steps")
    patience: int | None = Field(None, gt=0, description="stop after this many evaluations without a lower loss")
    load_best: bool = Field(True, description="with eval_steps, the result is the checkpoint of the lowest loss")
    logging_steps: Annotated[
        Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)], BeforeValidator(share)
    ] = Field(
        0.01,
        description="log every so many steps (a number below 1, or 1%: each such share of the run), and every half a "
        "minute; a step that logs waits for the GPU",
    )
    seed: Seed = Field(3407, description="seed of data order, packing and dropout")
    deterministic: bool = Field(False, description="the same bits in every run; slower")
    min_improvement: float | None = Field(None, description="fail unless the held-out loss falls by this much")
    report_to: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(tools)] = Field(
        [], description="trackers to log to as well"
    )


class Memory(Section):
    """What layers keep for the backward pass."""

    gradient_checkpointing: bool | Literal["auto", "offload", "unsloth"] = Field(
        "auto",
        description="true: recompute layers in the backward pass; offload or unsloth: also keep their inputs in host "
        "memory; auto: on CUDA keep what fits into memory, elsewhere true",
    )
    feed_forward: Literal["auto", "tiled"] = Field(
        "auto",
        description="tiled: compute MLPs in tiles of 16,384 rows, forward and backward, for the longest packed rows "
        "(no experts); auto: only if gradient_checkpointing is auto, too, and nothing else fits",
    )
    budget: str | None = Field(
        None,
        pattern=r"^(\d+\.)?0*[1-9]\d*(\.\d+)?\s*(GiB|GB|MiB|MB)$",
        description="GPU memory that this process may take, e.g. 16GiB or 16GB; null: what is free",
    )


class Precision(Section):
    """The numbers to compute in."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(dtype_name)] = Field(
        "auto",
        description="dtype of the model (also fp32, bf16, fp16); auto: bfloat16 on a GPU, float16 before Ampere, "
        "float32 on the CPU",
    )
    adapter_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(dtype_name)] = Field(
        "auto",
        description="dtype of LoRA's matrices, their gradients and torch's optimiser states; auto: float32",
    )
    tf32: bool = Field(
        False, description="round float32 products to tf32 on Ampere and newer: faster, with ten bits instead of 23"
    )
    compute: ComputeName = Field(
        "dtype",
        description="numbers that frozen linears and experts multiply in: dtype, or 8 bits by rows (Ada and newer, "
        "int8 on Ampere, too; packed rows, LoRA). fp8: input gradients in e4m3; int8: the forward, too, but for that "
        "of queries, keys and values, in integers; fp8_both: all of both in e4m3; fp8_exact: the same, summed exactly. "
        "See pronghorn docs precision",
    )


class Launch(Section):
    """Where it runs."""

    gpus: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="GPUs of this machine; auto: all, if they can share the rows of a step"
    )
    nodes: int = Field(1, ge=1, description="machines, started by Slurm or torchrun")
    strategy: Literal["auto", "copies", "sharded"] = Field(
        "auto",
        description="what each GPU holds: the whole model (copies), or a part of each layer's weights (sharded); "
        "auto: copies if they fit",
    )
    timeout_minutes: float = Field(
        30, gt=0, description="minutes that a process waits for the others before it gives up"
    )


class Report(Section):
    """What a run shows afterwards."""

    html: bool = Field(True, description="write report.html")
    sample_prompts: Texts = Field([], description="prompts that the model answers before and after training")
    sample_tokens: int = Field(64, gt=0, description="tokens of each answer")
