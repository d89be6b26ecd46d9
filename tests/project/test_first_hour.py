"""What newcomers get wrong in the first hour: the answer names the mistake and leads on, in at most eight lines.

One table of a mistake a line, from a journey of a user of Unsloth, Axolotl, LLaMA-Factory and TRL.
tests/cli/test_bad_input.py has the mistakes in data, models and files, tests/cli/test_more_mistakes.py further ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.foreign_recipes import AXOLOTL, LLAMA_FACTORY
from support.mistakes import Mistake, answered, key, text


def without_tokenizer(folder: Path) -> None:
    for file in (folder / "model").glob("*token*"):
        file.unlink()


def as_run(folder: Path) -> None:
    """The model's folder becomes a run's."""
    (folder / "model").rename(folder / "weights")
    (folder / "model/adapter").mkdir(parents=True)
    (folder / "model/run.json").write_text("{}")


SECTION = "model: {name: model, max_seq_length: 128}\ndata: {train: train.jsonl}\n"
MISTAKES = {
    # the file
    "no recipe": Mistake("nofile.yaml does not exist", "pronghorn init", command=("train", "nofile.yaml")),
    "a folder": Mistake("model is a folder", "pronghorn init", command=("train", "model")),
    "empty": text("", "a recipe is a table", "model, adapter, data"),
    "a list": text("- a\n", "a recipe is a table", "model, adapter, data"),
    "a tab": text("model:\n\tname: a\n", "line 2: not YAML", "spaces, not tabs"),
    "indentation": text("model:\n  name: a\n    max_seq_length: 3\n", "line 3: not YAML", "indent a section's keys"),
    "a colon in a value": text("model:\n  name: a: b\n", "line 2: not YAML", "quote a value"),
    "a key twice": text("model: {}\nmodel: {}\n", "key 'model' is set twice", "delete one"),
    # other tools
    "Axolotl": text(AXOLOTL["qlora"], "a configuration of Axolotl", "pronghorn convert recipe.yaml"),
    "LLaMA-Factory": text(LLAMA_FACTORY["lora_sft"], "of LLaMA-Factory", "pronghorn convert recipe.yaml"),
    "TRL": text("model_name_or_path: a\ndataset_name: b\n", "of TRL", "model_name_or_path is model.name"),
    # names
    "a section": text(SECTION + "trian: {output: out}\n", "unknown key trian", "did you mean train?"),
    "a key": key("train", "max_stesp", 3, "unknown key train.max_stesp", "did you mean train.max_steps?"),
    "max_step": key("train", "max_step", 3, "unknown key train.max_step", "did you mean train.max_steps?"),
    "truncation": key("data", "truncation", True, "unknown key data.truncation", "did you mean data.overflow?"),
    "optim": key("train", "optim", "adamw_8bit", "unknown key train.optim", "did you mean train.optimizer?"),
    "batch size": key("train", "per_device_train_batch_size", 2, "unknown key", "packing.rows_per_step?"),
    "epochs": key("train", "num_train_epochs", 2, "unknown key train.num_train_epochs", "train.epochs?"),
    "in another section": key("train", "lora_alpha", 2, "unknown key train.lora_alpha", "adapter.lora_alpha?"),
    "val_set_size": key("data", "val_set_size", 0.1, "unknown key data.val_set_size", "did you mean data.eval?"),
    "an override without a section": Mistake("not section.key=value", "train.max_steps=3", "max_steps=3"),
    "an override without =": Mistake("not section.key=value", "write e.g. train.max_steps=3", "train.max_steps 3"),
    "an option": Mistake("--max_steps", "train.max_steps=3", command=("train", "recipe.yaml", "--max_steps", "3")),
    "an option of a section": Mistake(
        "--lora_alpha", "adapter.lora_alpha=8", command=("train", "recipe.yaml", "--lora_alpha=8")
    ),
    # values
    "a number in quotes": key(
        "model", "max_seq_length", "256", "a number in quotes", "write model.max_seq_length: 256"
    ),
    "a word for a number": key("train", "max_steps", "three", "train.max_steps = 'three'", "optimiser steps"),
    "method qlora": key("adapter", "method", "qlora", "adapter.method = 'qlora'", "model.load_in_4bit: true"),
    "rank 0": key("adapter", "r", 0, "adapter.r = 0", "LoRA rank"),
    "learning rate below 0": key("train", "learning_rate", -1, "greater than 0", "set train.learning_rate"),
    "dropout of 1.5": key("adapter", "lora_dropout", 1.5, "less than 1", "set adapter.lora_dropout"),
    "a budget in words": key("memory", "budget", "sixteen", "no amount of memory", "memory.budget: 16GiB"),
    "a linear misspelt": key("adapter", "target_modules", ["q_projj"], "'q_projj' is not in the model", "q_proj"),
    "a template misspelt": key("data", "chat_template", "llama3", "'llama3'", "llama-3"),
    "eval without data": key("train", "eval_steps", 5, "train.eval_steps needs held-out data", "data.eval"),
    "a format misspelt": key("data", "format", "jsonl", "data.format = 'jsonl'", "what a row is"),
    "a tracker that is missing": key("train", "report_to", "trackio", "trackio is not installed", "pip install"),
    "longer than the model": key("model", "max_seq_length", 100_000, "100000 > 512", "max_seq_length <= 512"),
    # places
    "a model that is nowhere": key("model", "name", "./nothing", "./nothing does not exist", "hub name"),
    "no tokenizer": Mistake("model has no tokenizer", "tokenizer", prepare=without_tokenizer),
    "a run as a model": Mistake("model is a run, not a model", "give model/adapter", prepare=as_run),
    "data that are nowhere": key("data", "train", "no.jsonl", "no.jsonl does not exist", "give the path"),
    "an output that can't be": key("train", "output", "/proc/x", "/proc/x", "train.output"),
    "preferences": Mistake(
        "a preference pair",
        "pronghorn docs preference-training",
        prepare=lambda folder: (folder / "train.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}'),
    ),
    "a chat without a run": Mistake("runs/none", "", command=("chat", "runs/none")),
    "a plan for a laptop": Mistake("'my laptop'", "24GiB", command=("plan", "recipe.yaml", "--device", "my laptop")),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered(
    mistake: Mistake, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(mistake, tmp_path, stories, monkeypatch)
