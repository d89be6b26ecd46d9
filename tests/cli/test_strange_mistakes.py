"""Mistakes that a stranger made with malice, of whom the answer was once wrong, silent or a traceback; see also
test_more_mistakes.py, and test_strange_scripts.py.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset, DatasetDict
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.checks import SCHEDULES
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


def an_unfinished_run(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out/journal.json").write_text("{}")


def an_adapter_without_weights(folder: Path) -> None:
    (folder / "ad").mkdir()
    (folder / "ad/adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "model"}')


MISTAKES = {
    # the command line
    "help": command("help", "No such command 'help'", "pronghorn --help?"),
    "version": command("version", "No such command 'version'", "pronghorn --version?"),
    "to push": command("push out", "No such command 'push'", "pronghorn export RUN --push"),
    "to estimate": command("estimate recipe.yaml", "No such command 'estimate'", "pronghorn plan?"),
    "a run to go on with": Mistake(
        "out is a run, no recipe",
        "YAML file that it was begun with",
        command=("train", "out"),
        prepare=an_unfinished_run,
    ),
    "to resume": command("resume out", "No such command 'resume'", "pronghorn train?"),
    "DPO": command("dpo recipe.yaml", "No such command 'dpo'", "pronghorn docs preference-training"),
    "--seed": command("train recipe.yaml --seed 3", "--seed", "train.seed=3"),
    "--load_in_4bit": command("train recipe.yaml --load_in_4bit", "--load_in_4bit", "model.load_in_4bit=true"),
    "--force": command("train recipe.yaml --force", "--force", "--overwrite"),
    "--dry-run": command("train recipe.yaml --dry-run", "--dry-run", "pronghorn plan"),
    "--verbose": command("train recipe.yaml --verbose", "--verbose", "--paths"),
    "--push_to_hub": command("train recipe.yaml --push_to_hub", "--push_to_hub", "pronghorn export RUN --push"),
    "a model that init can't find": command("init a.yaml --model ./no", "--model ./no does not exist", "hub name"),
    "a recipe into no folder": command("init no/a.yaml", "no/a.yaml can't be written", "a folder that is there"),
    "a GGUF's quantisation of another format": command(
        "export model --quantization q8_0", "--quantization with --to merged", "--to gguf"
    ),
    "a quantisation's half": command("export model --to gguf --quantization q5", "'q5' is unknown", "q5_1"),
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
    "PiSSA and biases": text(
        yaml.safe_dump(RECIPE | {"adapter": {"init_lora_weights": "pissa", "bias": "all"}}),
        "with bias",
        "leave one of them out",
    ),
    "orthogonal experts": text(
        yaml.safe_dump(RECIPE | {"adapter": {"init_lora_weights": "orthogonal", "target_parameters": ["mlp.experts"]}}),
        "orthogonal with target_parameters",
        "leave one of them out",
    ),
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
    "full training of some linears": text(
        yaml.safe_dump(RECIPE | {"adapter": {"method": "full", "target_modules": ["q_proj"]}}),
        "adapter.method: full trains every weight: target_modules",
        "set adapter.method: lora",
    ),
    "full training of some biases": text(
        yaml.safe_dump(RECIPE | {"adapter": {"method": "full", "bias": "lora_only"}}),
        "adapter.method: full trains every weight",
        "set adapter.method: lora",
    ),
    "an odd rank": text(
        yaml.safe_dump(RECIPE | {"adapter": {"init_lora_weights": "orthogonal", "rank_pattern": {"q_proj": 3}}}),
        "orthogonal with an odd rank",
        "use even ranks",
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
    "a norm": key("adapter", "target_modules", ["input_layernorm"], "'input_layernorm' is not a linear", "q_proj"),
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
    "an object on several lines": data("a.jsonl", '{\n "text": "a"\n}\n', "not valid JSON", "object in one line"),
    "a null for a row": data("a.jsonl", GOOD + "null\n", "line 2: null instead", "write each row as"),
    "a pointer for a configuration": prepared(
        "config.json is not valid JSON",
        "git lfs pull",
        lambda folder: (folder / "model/config.json").write_text("version https://git-lfs.github.com/spec/v1"),
    ),
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
        (
            "train.lr_scheduler=constant; train.warmup_steps=3",
            "train.warmup_steps 3 is not used: constant has no warm-up (constant_with_warmup has one)",
        ),
        (
            "train.lr_scheduler=constant; train.warmup_ratio=0.1",
            "train.warmup_ratio 0.1 is not used",
        ),
        (
            "train.lr_scheduler=warmup_stable_decay; train.lr_scheduler_kwargs={num_decay_steps: 3}",
            "num_decay_steps 3 of train.lr_scheduler_kwargs, with 5 steps of warm-up, is more than the run's 1",
        ),
        (
            "adapter.method=full; adapter.r=4; adapter.lora_dropout=0.1",
            "adapter.r, adapter.lora_dropout are not used: adapter.method: full trains every weight",
        ),
        ("launch.strategy=sharded", "launch.strategy: sharded is not used: one process"),
        ("memory.gradient_checkpointing=offload", "moves inputs to host memory, where they are already"),
        (
            "data.eval=train.jsonl; train.eval_steps=9",
            "train.eval_steps 9 is more than the run's 1: the held-out loss is measured before and after it alone",
        ),
        ("train.learning_rate=0.5", "train.learning_rate 0.5 is high: LoRA takes about 2e-4"),
        (
            "train.learning_rate=0.5; adapter.method=full",
            "train.learning_rate 0.5 is high: full fine-tuning takes about 1e-5",
        ),
        ("data.train=saved", "saved: 4 rows"),  # what save_to_disk wrote is read
        (" train.max_steps = 1", "limited by max_steps"),
    ],
)
def test_what_may_be_meant_runs_and_is_told(
    change: str, says: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Dataset.from_list([{"prompt": "One day", "completion": " a cat sat."}] * 4).save_to_disk("saved")
    result = train(tmp_path, stories, *change.split("; "))
    assert result.exit_code == 0 and says in result.output, result.output


def test_a_warm_up_that_ends_is_not_complained_of(
    tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes what is left of an epoch is a whole one: three here, not two."""
    monkeypatch.chdir(tmp_path)
    steps = ("train.max_steps=null", "train.epochs=3", "train.gradient_accumulation_steps=2", "train.warmup_steps=2")
    result = train(tmp_path, stories, *steps, "train.logging_steps=1")
    assert result.exit_code == 0 and "never reaches" not in result.output, result.output
    rates = [step["learning_rate"] for step in json.loads(Path("out/run.json").read_text())["steps"]]
    assert rates == [0, 1e-4, 2e-4]


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")])
def test_what_a_distributed_run_left_behind_is_told(
    name: str, value: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    result = train(tmp_path, stories)
    assert result.exit_code == 1 and f"{name}={value} of a distributed run" in result.stderr
    assert f"unset {name}" in result.stderr


def test_numbers_in_quotes_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text(LLAMA_FACTORY + "dataset: a\nlora_rank: '8'\nlearning_rate: '1.0e-4'\noutput_dir: o\n")
    result = CliRunner().invoke(app, ["convert", "a.yml"])
    written = yaml.safe_load(Path("recipe.yaml").read_text())
    assert result.exit_code == 0 and written["train"]["learning_rate"] == 1e-4
    assert written["adapter"] == {"method": "lora", "r": 8, "lora_alpha": 16}


def test_schedules_take_what_transformers_functions_take() -> None:
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "warmup_type", "decay_type", "kwargs"}
    on_loss = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}
    no_numbers = {"mode", "threshold_mode", "verbose", "smooth", "window_size"}  # the last needs `smooth`
    for name, function in TYPE_TO_SCHEDULER_FUNCTION.items():
        takes, _ = SCHEDULES.get(name.value, ((), 0))
        known = inspect.signature(on_loss.get(name.value, function)).parameters
        assert set(known) - ours - no_numbers == set(takes)


@pytest.mark.parametrize(
    ("schedule", "given", "problem"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 5}, "min_lr_rate 5 is not from 0 to 1"),
        ("cosine_with_min_lr", {"min_lr": 0.01}, "min_lr 0.01 is not from 0 to train.learning_rate 0.0002"),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, "min_lr and min_lr_rate"),
        ("cosine_with_restarts", {"num_cycles": 0}, "num_cycles 0 is not above 0"),
        ("polynomial", {"lr_end": 1}, "lr_end 1 is not from 0 to less than train.learning_rate 0.0002"),
        ("polynomial", {"power": -1}, "power -1 is not above 0"),
        ("inverse_sqrt", {"timescale": 0}, "timescale 0 is not above 0"),
        ("warmup_stable_decay", {"num_decay_steps": -1}, "num_decay_steps -1 is not 1 or more"),
        ("warmup_stable_decay", {"num_decay_steps": 1, "num_stable_steps": -1}, "num_stable_steps -1 is not 0 or more"),
        ("warmup_stable_decay", {"num_decay_steps": 1, "min_lr_ratio": 3}, "min_lr_ratio 3 is not from 0 to 1"),
        ("reduce_lr_on_plateau", {"factor": 2}, "factor 2 is not above 0 and below 1"),
        ("reduce_lr_on_plateau", {"factr": 0.5}, "unknown key factr"),
        ("greedy", {"foo": 1}, "unknown key foo"),
        ("greedy", {"factor": 0.5}, "min_lr 0.001 (its default) is not from 0 to train.learning_rate 0.0002"),
    ],
    ids=str,
)
def test_numbers_that_make_no_schedule_are_refused_at_once(
    schedule: str, given: dict[str, float], problem: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [f"train.lr_scheduler={schedule}", f"train.lr_scheduler_kwargs={json.dumps(given)}"]
    result = train(tmp_path, stories, *settings, "train.eval_steps=1", "data.eval=50%")
    assert result.exit_code == 1 and problem in " ".join(result.stderr.split()), result.output
    assert not Path("out").exists()


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
