"""Mistakes that a stranger made with malice, of whom the answer was once wrong, silent or a traceback; see also
test_more_mistakes.py. What was silent and is allowed is told: test_a_warning_tells.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from trl import SFTConfig
from typer.testing import CliRunner

import pronghorn
from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.chat_templates import get_chat_template, standardize_sharegpt
from pronghorn.cli.main import app
from pronghorn.errors import PronghornError
from pronghorn.recipe_checks import SCHEDULES
from support.mistakes import (
    ASSISTANT,
    GOOD,
    RECIPE,
    TEMPLATE,
    USER,
    Mistake,
    answered,
    call,
    chat,
    data,
    key,
    row,
    text,
)

SECTION = "train: {output: out}\ndata: {train: train.jsonl}\n"
AXOLOTL = "base_model: a/b\nadapter: lora\ndatasets:\n  - {path: train.jsonl, type: alpaca}\n"
LLAMA_FACTORY = "model_name_or_path: a/b\nfinetuning_type: lora\n"


def override(value: str, problem: str, remedy: str) -> Mistake:
    return Mistake(problem, remedy, value)


def command(line: str, problem: str, remedy: str) -> Mistake:
    return call(problem, remedy, *line.split())


def prepared(problem: str, remedy: str, prepare: Callable[[Path], Any], change: str = "") -> Mistake:
    return Mistake(problem, remedy, change, prepare=prepare)


def splits_in_a_folder(folder: Path) -> None:
    (folder / "rows").mkdir()
    for name in ("train-0", "test-0"):
        (folder / f"rows/{name}.jsonl").write_text(GOOD)


def saved_dict(folder: Path) -> None:
    DatasetDict(valid=Dataset.from_list([{"prompt": "a", "completion": "b"}])).save_to_disk(folder / "saved")


def an_adapter_without_weights(folder: Path) -> None:
    (folder / "ad").mkdir()
    (folder / "ad/adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "model"}')


MISTAKES = {
    # the command line
    "help": command("help", "No such command 'help'", "pronghorn --help?"),
    "version": command("version", "No such command 'version'", "pronghorn --version?"),
    "to push": command("push out", "No such command 'push'", "pronghorn export RUN --push"),
    "to resume": command("resume out", "No such command 'resume'", "pronghorn train?"),
    "DPO": command("dpo recipe.yaml", "No such command 'dpo'", "docs/preference-training.md"),
    "--seed": command("train recipe.yaml --seed 3", "--seed", "train.seed=3"),
    "--load_in_4bit": command("train recipe.yaml --load_in_4bit", "--load_in_4bit", "model.load_in_4bit=true"),
    "--force": command("train recipe.yaml --force", "--force", "--overwrite"),
    "--dry-run": command("train recipe.yaml --dry-run", "--dry-run", "pronghorn plan"),
    "--verbose": command("train recipe.yaml --verbose", "--verbose", "--paths"),
    "--push_to_hub": command("train recipe.yaml --push_to_hub", "--push_to_hub", "pronghorn export RUN --push"),
    "a recipe into no folder": command("init no/a.yaml", "no/a.yaml can't be written", "a folder that is there"),
    "a GGUF's quantisation of another format": command(
        "export model --quantization q8_0", "--quantization with --to merged", "--to gguf"
    ),
    "a quantisation's half": command("export model --to gguf --quantization q5", "'q5' is not written", "q5_1"),
    "a run's record": call("a.json is the record of a run", "YAML file", "train", "a.json", a_json='{"schema": "x"}'),
    "a merge of LLaMA-Factory": call(
        "configuration exports", "pronghorn export", "convert", "a.yml", a_yml=LLAMA_FACTORY + "export_dir: m\n"
    ),
    "a chat of LLaMA-Factory": call("names no dataset", "pronghorn chat", "convert", "a.yml", a_yml=LLAMA_FACTORY),
    # the recipe
    "no max_seq_length": text(
        SECTION + "model: {name: model}\n", "max_seq_length is missing", "tokens of a packed row"
    ),
    "null": key("train", "seed", None, "train.seed = null: a value is needed", "train.seed"),
    "no linears": key("adapter", "target_modules", [], "an empty list", "adapter.target_modules"),
    "no sources": key("data", "train", [], "an empty list", "data.train"),
    "yes in quotes": key("model", "load_in_4bit", "yes", "'yes': a text", "write model.load_in_4bit: true, without"),
    "true in quotes": key("memory", "gradient_checkpointing", "true", "a text", "checkpointing: true, without quotes"),
    "GPUs in quotes": key("launch", "gpus", "2", "a number in quotes", "write launch.gpus: 2"),
    "a weight in quotes": override(
        "data.train=[{path: train.jsonl, weight: '3'}]", "a number in quotes", "write data.train.0.weight: 3"
    ),
    "a weight below 0": override("data.train=[{path: train.jsonl, weight: -1}]", "0.weight = -1", "share of the rows"),
    "a source's file": override("data.train=[{file: train.jsonl}]", "unknown key data.train.0.file", "path, weight"),
    "PiSSA misspelt": key("adapter", "init_lora_weights", "pisa", "'pisa': no choice", "pissa_niter_16"),
    "no memory": key("memory", "budget", "0GiB", "no amount of memory", "16GiB"),
    "all held out": key("data", "eval", 1.0, "to hold out nothing, or all", "a share (5%)"),
    "fewer than nothing held out": key("data", "eval", -5, "to hold out nothing", "a share (5%)"),
    "to hold out": key("data", "eval", True, "to hold out nothing, or all", "a share (5%)"),
    "a bucket": key("train", "output", "s3://a/b", "an address", "folder of the run"),
    "an adapter's type": key("adapter", "type", "lora", "unknown key adapter.type", "adapter.method?"),
    "PEFT's section": key("lora", "r", 8, "unknown key lora", "did you mean adapter?"),
    "rank": key("adapter", "rank", 8, "unknown key adapter.rank", "did you mean adapter.r?"),
    "a revision": key("model", "revision", "main", "unknown key model.revision", "hf download"),
    "DeepSpeed": key("train", "deepspeed", "a.json", "unknown key train.deepspeed", "launch.strategy?"),
    "Adam's betas": key("train", "adam_beta2", 0.95, "unknown key train.adam_beta2", "leave it out"),
    "to resume by a key": key("train", "resume_from_checkpoint", True, "unknown key", "the same command goes on"),
    "wandb's section": key("wandb", "project", "a", "unknown key wandb", "train.report_to?"),
    "what cosine takes": override(
        "train.lr_scheduler_kwargs={min_lr: 0.1}", "of linear: unknown key min_lr", "takes none"
    ),
    "what a schedule takes, misspelt": text(
        yaml.safe_dump(
            RECIPE
            | {
                "train": {
                    "output": "out",
                    "lr_scheduler": "cosine_with_min_lr",
                    "lr_scheduler_kwargs": {"min_lr_ratio": 1},
                }
            }
        ),
        "unknown key min_lr_ratio",
        "min_lr_rate",
    ),
    "what a schedule needs": key(
        "train", "lr_scheduler", "cosine_with_min_lr", "min_lr_rate or min_lr is missing", "{min_lr_rate: 0.1}"
    ),
    "how long it decays": key(
        "train", "lr_scheduler", "warmup_stable_decay", "num_decay_steps is missing", "{num_decay_steps: 100}"
    ),
    "two warm-ups": text(
        yaml.safe_dump(RECIPE | {"train": {"output": "out", "warmup_steps": 5, "warmup_ratio": 0.1}}),
        "train.warmup_steps and train.warmup_ratio",
        "leave one of them out",
    ),
    # models
    "the weights' file": key("model", "name", "model/model.safetensors", "is a file", "give the folder"),
    "data as a model": key("model", "name", "train.jsonl", "train.jsonl is a file", "give the folder"),
    "no configuration": prepared(
        "model holds no config.json", "copy its", lambda f: (f / "model/config.json").unlink()
    ),
    "no weights": prepared("no weights at all", "copy or download", lambda f: (f / "model/model.safetensors").unlink()),
    "an adapter without weights": prepared(
        "no weights at all", "copy or download", an_adapter_without_weights, "model.name=ad"
    ),
    "Ollama's name": key("model", "name", "llama3:8b", "model llama3:8b is neither", "owner/model"),
    "a norm": key("adapter", "target_modules", ["input_layernorm"], "'input_layernorm' is no linear", "q_proj"),
    # files of data
    "gzip": data("a.jsonl.gz", b"\x1f\x8b", "unknown file type .gz", "unpack it"),
    "zip": data("a.zip", b"PK", "unknown file type .zip", "unpack it"),
    "tabs": data("a.tsv", "prompt\tcompletion\n", "unknown file type .tsv", "commas between the values"),
    "ndjson": data("a.ndjson", GOOD, "unknown file type .ndjson", "name it .jsonl"),
    "no header": data("a.csv", "Who is it?,a cat\nwhat?,a dog\n", "no known format", "first line names its columns"),
    "a pattern": key("data", "train", "*.jsonl", "*.jsonl does not exist", "a list: [a.jsonl"),
    "two files in a text": key("data", "train", "a.jsonl,b.jsonl", "does not exist", "a list: [a.jsonl"),
    "a hub name without owner": key("data", "train", "gsm8k", "gsm8k does not exist", "owner/name"),
    "train and test in a folder": prepared(
        "files of several splits (test, train)", "[rows/train-0.jsonl]", splits_in_a_folder, "data.train=rows"
    ),
    "a split that was not saved": prepared("no split `train` in it", "of valid", saved_dict, "data.train=saved"),
    # rows
    "a conversation by another name": row(
        {"conversation": [{"from": "human", "value": "a"}]}, "no known format", "{conversations: conversation}"
    ),
    "a chat by another name": row({"chat": [USER, ASSISTANT]}, "no known format", "{messages: chat}"),
    "a key too many in a turn": chat([{**USER, "time": 3}, ASSISTANT], "message 1: keys 'time'", "delete them"),
    "calls as a text": chat(
        [USER, {"role": "assistant", "content": None, "tool_calls": "[]"}], "tool_calls is '[]'", "json.loads"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_stranger_s_mistake_is_answered(
    mistake: Mistake, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(mistake, tmp_path, stories, monkeypatch)


def train(folder: Path, stories: Path, *overrides: str) -> Any:
    (folder / "train.jsonl").write_text(GOOD)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    name = f"model.name={stories}"
    return CliRunner().invoke(app, ["train", "recipe.yaml", name, "report.html=false", *overrides], env=environment)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.eval=train.jsonl", "train.jsonl is trained, too"),
        ("train.warmup_steps=1000", "the learning rate never reaches 0.0002"),
        ("data.train=saved", "saved: 4 rows"),  # what save_to_disk wrote is read
        (" train.max_steps = 1", "limited by max_steps"),
    ],
)
def test_what_may_be_meant_runs_and_is_told(
    change: str, says: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Dataset.from_list([{"prompt": "One day", "completion": " a cat sat."}] * 4).save_to_disk("saved")
    result = train(tmp_path, stories, change)
    assert result.exit_code == 0 and says in result.output, result.output


def test_schedules_take_what_transformers_functions_take() -> None:
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "warmup_type", "decay_type", "kwargs"}
    for name, function in TYPE_TO_SCHEDULER_FUNCTION.items():
        takes, _ = SCHEDULES.get(name.value, ((), 0))
        assert set(inspect.signature(function).parameters) - ours == set(takes)


@pytest.mark.parametrize(
    "remedy",
    [
        "train={lr_scheduler: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}}",
        "train={lr_scheduler: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 100}}",
        "data={train: columns.jsonl, columns: {messages: chat}}",
    ],
)
def test_a_remedy_helps(remedy: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("columns.jsonl").write_text(json.dumps({"chat": [USER, ASSISTANT]}))
    Path("t.jinja").write_text(TEMPLATE)
    section, _, keys = remedy.partition("=")
    settings = [f"{section}.{name}={json.dumps(value)}" for name, value in yaml.safe_load(keys).items()]
    result = train(tmp_path, stories, *settings, *(["data.chat_template=t.jinja"] if section == "data" else []))
    assert result.exit_code == 0, result.output


ROWS = Dataset.from_list([{"prompt": "One day", "completion": " a cat sat."}] * 8)
ALPACA = Dataset.from_list([{"instruction": "Say it", "input": "now", "output": "a cat."}] * 8)


def load(model: Path, **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(model), max_seq_length=128, **options)


def lora(model: Path, **options: Any) -> Any:
    return FastLanguageModel.get_peft_model(load(model)[0], **{"r": 4, **options})


def trainer(model: Any, rows: Any = ROWS, config: dict[str, Any] | None = None, **options: Any) -> Any:
    args = {"packing": True, "max_length": 128, "max_steps": 1, "bf16": False, "report_to": "none"}
    return SFTTrainer(
        model=model, train_dataset=rows, args=SFTConfig(**{"output_dir": "out", **args, **(config or {})}), **options
    )


def adapters_late(model: Path) -> None:
    base, tokenizer = load(model)
    late = trainer(base, processing_class=tokenizer)
    FastLanguageModel.get_peft_model(base, r=4)
    late.train()


SCRIPTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "an argument misspelt": (lambda m: load(m, max_seq_len=64), "max_seq_len", "did you mean max_seq_length?"),
    "no name": (lambda m: FastLanguageModel.from_pretrained(None), "model_name None", "a hub name"),  # type: ignore[arg-type]
    "a rank in quotes": (lambda m: lora(m, r="16"), "r = '16' is no number", "r=16"),
    "dropout of everything": (lambda m: lora(m, lora_dropout=1.0), "lora_dropout = 1.0", "0.05"),
    "a bias unknown": (lambda m: lora(m, bias="some"), "bias = 'some'", "'lora_only'"),
    "LLaMA-Factory's name for it": (lambda m: lora(m, lora_rank=8), "lora_rank", "as r"),
    "a norm": (lambda m: lora(m, target_modules=["norm"]), "'norm' is no linear", "q_proj"),
    "without the MLPs": (lambda m: lora(m, finetune_mlp_modules=False), "finetune_mlp_modules", "target_modules"),
    "both of from_pretrained's": (
        lambda m: FastLanguageModel.get_peft_model(load(m)),
        "got a tuple, no model",
        "model, tokenizer =",
    ),
    "both for inference": (lambda m: FastLanguageModel.for_inference(load(m)), "got a tuple", "model, tokenizer ="),
    "adapters after the trainer": (adapters_late, "after the trainer was made", "before SFTTrainer"),
    "after a merge": (lambda m: trainer(lora(m).merge_and_unload()), "no weight of the model", "get_peft_model"),
    "adapters and peft_config": (lambda m: trainer(lora(m), peft_config=object()), "peft_config", "leave peft_config"),
    "a rate in quotes": (lambda m: trainer(lora(m), config={"learning_rate": "2e-4"}), "'2e-4'", "as a number"),
    "a tensor of data": (lambda m: trainer(lora(m), torch.ones(4, 4)), "is a Tensor", "load_dataset("),
    "a null": (
        lambda m: trainer(lora(m), Dataset.from_list([{"text": "a"}, {"text": None}])),
        "row 2: text",
        "filter(",
    ),
    "pairs": (
        lambda m: trainer(lora(m), Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])),
        "preference pairs",
        "docs/preference-training.md",
    ),
    "Alpaca's columns": (lambda m: trainer(lora(m), ALPACA), "no known format", "+ row['input']"),
    "a function for batches": (
        lambda m: trainer(lora(m), ALPACA, formatting_func=lambda rows: [rows["instruction"]]),
        "returns a list",
        "batched=True",
    ),
    "responses of a model": (
        lambda m: pronghorn.train_on_responses_only(load(m)[0], "a", "b"),
        "got a LlamaForCausalLM",
        "SFTTrainer",
    ),
    "a template of one's own": (
        lambda m: get_chat_template(load(m)[1], ("{{ x }}", "</s>")),  # type: ignore[arg-type]
        "tuple",
        "tokenizer.chat_template = TEXT",
    ),
    "turns of a customer": (
        lambda m: standardize_sharegpt(Dataset.from_list([{"conversations": [{"from": "customer", "value": "a"}]}])),
        "from 'customer'",
        "aliases_for_user",
    ),
    "every split": (lambda m: standardize_sharegpt(DatasetDict(train=ROWS)), "a DatasetDict", 'split="train"'),
    "Unsloth's GGUF": (
        lambda m: load(m)[0].save_pretrained_gguf("g", load(m)[1], quantization_method="fast_quantized"),
        "'fast_quantized'",
        "q8_0",
    ),
    "a GGUF to the hub": (lambda m: load(m)[0].push_to_hub_gguf("a/b"), "push_to_hub_gguf", "hf upload"),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_stranger_s_script_is_answered(
    script: tuple[Callable[[Path], Any], str, str], tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, problem, remedy = script
    with pytest.raises(PronghornError) as error:
        run(stories)
    assert problem in error.value.problem and remedy in error.value.remedy, str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FastLlamaModel", "FastLanguageModel"),
        ("SFTConfig", "from trl import"),
        ("LoraConfig", "from peft import"),
        ("DataCollatorForCompletionOnlyLM", "leave it out"),
        ("get_chat_template", "pronghorn.chat_templates"),
    ],
)
def test_names_of_others_are_answered(name: str, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        getattr(pronghorn, name)


def test_remedies_for_scripts_help(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories)
    again = FastLanguageModel.get_peft_model(FastLanguageModel.get_peft_model(model, r=4).merge_and_unload(), r=4)
    joined = ALPACA.map(lambda row: {"prompt": row["instruction"] + "\n" + row["input"], "completion": row["output"]})
    config = {"output_dir": str(tmp_path), "logging_steps": 1}
    done = trainer(again, joined, config, processing_class=tokenizer)
    done.train()
    assert done.state.log_history[0]["loss"] > 0
    turns = [{"from": "customer", "value": "Who?"}, {"from": "gpt", "value": "A cat."}]
    rows = standardize_sharegpt(Dataset.from_list([{"conversations": turns}]), aliases_for_user=["customer"])
    assert [turn["role"] for turn in rows[0]["conversations"]] == ["user", "assistant"]
