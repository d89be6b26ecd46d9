"""Further mistakes of people who know TRL, Unsloth, Axolotl or LLaMA-Factory: on the command line, in recipes, in data
files and in scripts. The answer names the mistake and leads on; tests/project/test_first_hour.py has the first ones.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from trl import SFTConfig
from typer.testing import CliRunner

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.chat_templates import get_chat_template, standardize_sharegpt
from pronghorn.cli.main import app
from pronghorn.errors import DataError
from support.mistakes import (
    ASSISTANT,
    GOOD,
    RECIPE,
    USER,
    Mistake,
    answered,
    call,
    chat,
    check_script,
    data,
    key,
    row,
    text,
)
from support.templates import with_template


def an_adapter_of_another_base(folder: Path) -> None:
    """An adapter whose matrices fit a model of another width."""
    from safetensors.torch import save_file

    config = {"peft_type": "LORA", "base_model_name_or_path": "model", "r": 4, "target_modules": ["q_proj"]}
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{name}.lora_A.weight": torch.ones(4, 96), f"{name}.lora_B.weight": torch.ones(96, 4)}
    save_file(weights, folder / "adapter/adapter_model.safetensors")


def gguf_in_a_folder(folder: Path) -> None:
    (folder / "gguf").mkdir()
    (folder / "gguf/model-q4_k_m.gguf").write_bytes(b"GGUF")


def quantised(folder: Path) -> None:
    config = json.loads((folder / "model/config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (folder / "model/config.json").write_text(json.dumps(config))


def pickled(folder: Path) -> None:
    (folder / "model/model.safetensors").rename(folder / "model/pytorch_model.bin")


MISTAKES = {
    # the command line
    "another tool's command": call("No such command 'sft'", "pronghorn train?", "sft", "recipe.yaml"),
    "to merge": call("No such command 'merge-lora'", "pronghorn export?", "merge-lora", "out"),
    "a command misspelt": call("No such command 'tarin'", "pronghorn train?", "tarin", "recipe.yaml"),
    "data without inspect": call("No such command 'recipe.yaml'", "inspect", "data", "recipe.yaml"),
    "--set": call("No such option: --set", "train.max_steps=3", "train", "recipe.yaml", "--set", "train.max_steps=3"),
    "--config": call("No such option: --config", "pronghorn train my.yaml", "train", "--config", "recipe.yaml"),
    "to resume": call("No such option", "the same command goes on", "train", "recipe.yaml", "--resume_from_checkpoint"),
    "TRL's option": call("No such option", "model.name=gpt2", "train", "recipe.yaml", "--model_name_or_path", "gpt2"),
    "data as a recipe": call("train.jsonl is data, not a recipe", "init --data train.jsonl", "train", "train.jsonl"),
    "a script as a recipe": call("a recipe is a table", "begin with model", "train", "a.py", a_py="print('hi')\n"),
    "a first recipe over another": call("recipe.yaml already exists", "give another name", "init", "recipe.yaml"),
    "data that init can't find": call(
        "--data no.jsonl does not exist", ".jsonl", "init", "a.yaml", "--data", "no.jsonl"
    ),
    "a K-quant": call(
        "q4_k_m is made by llama.cpp's llama-quantize",
        "install llama.cpp",
        "export",
        "model",
        "--to",
        "gguf",
        "--quantization",
        "q4_k_m",
    ),
    "an export's format": call(
        "'safetensors' is not a format", "merged, adapter", "export", "model", "--to", "safetensors"
    ),
    "a report of nothing": call("out does not exist", "a finished run", "report", "out"),
    "a recipe to convert": call("recipe.yaml is a recipe already", "pronghorn train", "convert", "recipe.yaml"),
    # the recipe
    "a section that is a name": text(
        "model: model\ndata: {train: train.jsonl}\n", "a section is a table", "model: {name:"
    ),
    "a recipe without sections": text("name: model\ntrain_file: a\n", "unknown key name", "did you mean model.name?"),
    "learning rate 2e4": key("train", "learning_rate", 2e4, "less than or equal to 10", "2e-4 for LoRA"),
    "lora_alpha 0": key("adapter", "lora_alpha", 0, "adapter.lora_alpha = 0", "scale is lora_alpha / r"),
    "a rank beyond the width": key("adapter", "r", 100_000, "r = 100000 is above", "from 1 to 256"),
    "max_seq_length 0": key("model", "max_seq_length", 0, "model.max_seq_length = 0", "tokens of a packed row"),
    "max_steps -1": key("train", "max_steps", -1, "train.max_steps = -1", "null trains for `epochs`"),
    "warmup_ratio in steps": key("train", "warmup_ratio", 10, "less than 1", "share of all steps"),
    "save_steps as a share": key("train", "save_steps", 0.5, "a valid integer", "checkpoint every so many steps"),
    "all held out": key("data", "eval", "100%", "to hold out nothing, or all", "a share (5%)"),
    "half a row held out": key("data", "eval", 0.1, "10% of 1 conversation leaves nothing", "another share"),
    "AdamW": key("train", "optimizer", "AdamW", "train.optimizer = 'AdamW'", "did you mean adamw_torch_fused?"),
    "Muon": key("train", "optimizer", "muon", "no Muon by name", "use adamw_torch_fused"),
    "a schedule misspelt": key("train", "lr_scheduler", "cosin", "'cosin'", "did you mean cosine?"),
    "LoftQ": key("adapter", "init_lora_weights", "loftq", "only the quantised weights", "use pissa"),
    "DoRA as a method": key("adapter", "method", "dora", "adapter.method = 'dora'", "adapter.use_dora: true"),
    "a budget without a unit": key("memory", "budget", 16, "no amount of memory", "memory.budget: 16GiB"),
    "8 bits": key("model", "load_in_8bit", True, "unknown key model.load_in_8bit", "model.load_in_4bit?"),
    "attention of transformers": key(
        "packing", "attention", "flash_attention_2", "'flash_attention_2'", "did you mean flash?"
    ),
    "fp8 without a GPU": key("precision", "compute", "fp8", "without a CUDA device", "leave precision.compute out"),
    "more GPUs than there are": key("launch", "gpus", 4, "this process sees no GPU", "leave it out"),
    "no GPUs": key("launch", "gpus", 0, "greater than or equal to 1", "GPUs of this machine"),
    "GPT-2's linears": key("adapter", "target_modules", "c_attn", "'c_attn' is not in the model", "q_proj"),
    "a folder of something": key("train", "output", "model", "model is not empty", "choose another train.output"),
    "an address of the hub": key("model", "name", "https://huggingface.co/a/b", "an address", "hub name"),
    "data by an address": key(
        "data", "train", "https://huggingface.co/datasets/a/b", "hub's name (here perhaps a/b)", "hub name"
    ),
    "a hub set offline": key("data", "train", "some/set", "some/set: no such file or folder here", "give its folder"),
    "a hub model offline": key("model", "name", "some/model", "neither a folder here nor", "owner/model"),
    "a placeholder left": key("model", "name", "<your model>", "neither a folder here nor", "check the name"),
    # models
    "a GGUF file that is not there": key("model", "name", "model.gguf", "model.gguf does not exist", "check the path"),
    "a folder of GGUF files": Mistake("GGUF files", "by its own path", "model.name=gguf", prepare=gguf_in_a_folder),
    "pickled weights": Mistake("pytorch_model.bin", "convert them to safetensors", prepare=pickled),
    "GPTQ weights": Mistake("quantised by 'gptq'", "use the 16-bit checkpoint", prepare=quantised),
    "an adapter of another base": Mistake(
        "matrices of other shapes", "base_model_name_or_path", "model.name=adapter", prepare=an_adapter_of_another_base
    ),
    # files of data
    "a JSON list called .jsonl": data(
        "a.jsonl", f"[{GOOD.strip()}]", "list instead of an object", "name the file .json"
    ),
    "a JSON list on several lines": data("a.jsonl", f"[\n{GOOD}]", "line 1: not valid JSON", "name the file .json"),
    "a list of rows that is cut off": data("a.json", f"[{GOOD.strip()},", "column ", "download it anew"),
    "JSON lines called .json": data("a.json", GOOD * 2, "not valid JSON", "name the file .jsonl"),
    "Python's quotes": data("a.jsonl", "{'text': 'a'}\n", "not valid JSON", "json.dumps"),
    "a comma after each line": data("a.jsonl", GOOD.strip() + ",\n", "not valid JSON", "leave the comma"),
    "a pointer of Git LFS": data(
        "a.jsonl", "version https://git-lfs.github.com/spec/v1\n", "not valid JSON", "git lfs pull"
    ),
    "a web page": data("a.jsonl", "<!DOCTYPE html>\n", "not valid JSON", "a web page"),
    "UTF-16": data("a.jsonl", GOOD.encode("utf-16"), "is not UTF-8", "save the file as UTF-8"),
    "semicolons": data("a.csv", "prompt;completion\na;b\n", "delimited by ';'", "commas between the values"),
    "a header alone": data("a.csv", "prompt,completion\n", "no rows in it", "at least one row"),
    "a table of a spreadsheet": data("a.xlsx", b"PK", "unknown file type .xlsx", ".csv"),
    # rows
    "question and answer": row(
        {"question": "a", "answer": "b"}, "no known format", "{prompt: question, completion: answer}"
    ),
    "tokens": row({"input_ids": [1], "labels": [1]}, "keys 'input_ids', 'labels'", "write each row as"),
    "messages as a text": row({"messages": json.dumps([USER, ASSISTANT])}, "messages is '[", "json.loads"),
    "a column that is not there": Mistake(
        "no 'question' among its keys", "data.columns", "data.columns={prompt: question}"
    ),
    "a role in capitals": chat(
        [{"role": "User", "content": "a"}, ASSISTANT], "message 1: role 'User'", "one of system, user"
    ),
    "a role of another tool": chat([USER, {"role": "bot", "content": "a"}], "message 2: role 'bot'", "assistant"),
    "an answer that is null": chat(
        [USER, {"role": "assistant", "content": None}], "content is null", "content as a string"
    ),
    "an image": chat(
        [{"role": "user", "content": [{"type": "image_url"}]}, ASSISTANT], "training is text only", "leave out"
    ),
    "system in the middle": chat([USER, ASSISTANT, {"role": "system", "content": "a"}], "message 3", "to the front"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_further_mistake_is_answered(
    mistake: Mistake, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(mistake, tmp_path, stories, monkeypatch)


@pytest.mark.parametrize(
    "override",
    ["data.train=[train.jsonl, train.jsonl]", "train.report_to=none", "adapter.target_modules=all_linear"],
)
def test_what_can_only_mean_one_thing_is_taken(
    override: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an override that is given twice the last one counts, as in every shell's options."""
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text(GOOD)
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "model": {**RECIPE["model"], "name": str(stories)}}))
    command = ["train", "recipe.yaml", override, "report.html=false", "train.max_steps=9", "train.max_steps=1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(Path("out/run.json").read_text())["recipe"]["train"]["max_steps"] == 1


@pytest.mark.parametrize(
    ("form", "turns"),
    [
        ("conversations", [USER, ASSISTANT]),
        ("messages", [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A cat."}]),
    ],
)
def test_turns_are_read_by_their_own_keys_whatever_their_list_is_called(form: str, turns: Any, tmp_path: Path) -> None:
    from support.data_files import read_rows

    (tmp_path / "a.jsonl").write_text(json.dumps({form: turns}))
    [conversation] = read_rows(tmp_path / "a.jsonl")
    assert [message.role for message in conversation.messages] == ["user", "assistant"]  # type: ignore[union-attr]


ROWS = Dataset.from_list([{"prompt": "One day", "completion": " a cat sat."}] * 4)
SHAREGPT = Dataset.from_list([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}])


def load(folder: Path, **arguments: Any) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), **{"max_seq_length": 128, **arguments})


def trainer(folder: Path, rows: Any, **arguments: Any) -> SFTTrainer:
    model, tokenizer = load(folder)
    args = SFTConfig("out", packing=True, bf16=False, report_to="none", **{"max_length": 128, **arguments})
    return SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=args)


SCRIPTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a length in quotes": (lambda m: load(m, max_seq_length="2048"), "max_seq_length '2048'", "a packed row"),
    "a length beyond the model": (lambda m: load(m, max_seq_length=100_000), "100000 > 512", "<= 512"),
    "8 bits": (lambda m: load(m, load_in_8bit=True), "load_in_8bit", "load_in_4bit=True"),
    "an integer dtype": (lambda m: load(m, dtype="int8"), "dtype 'int8'", "bfloat16"),
    "4 bits and every weight": (lambda m: load(m, load_in_4bit=True, full_finetuning=True), "4-bit", "choose one"),
    "rank 0": (lambda m: FastLanguageModel.get_peft_model(load(m)[0], r=0), "r = 0", "from 1 to 256"),
    "Axolotl's name for it": (lambda m: FastLanguageModel.get_peft_model(load(m)[0], lora_r=8), "lora_r", "as r"),
    "LoftQ": (
        lambda m: FastLanguageModel.get_peft_model(load(m)[0], loftq_config={"loftq_bits": 4}),
        "loftq_config",
        "leave it out",
    ),
    "adapters twice": (
        lambda m: FastLanguageModel.get_peft_model(FastLanguageModel.get_peft_model(load(m)[0])),
        "already has an adapter",
        "train that adapter on",
    ),
    "a path as data": (lambda m: trainer(m, "train.jsonl"), "train_dataset is a str", "load_dataset("),
    "a list as data": (lambda m: trainer(m, [{"text": "a"}]), "train_dataset is a list", "load_dataset("),
    "no split chosen": (lambda m: trainer(m, DatasetDict(train=ROWS)), "is a DatasetDict", 'split="train"'),
    "columns of no format": (
        lambda m: trainer(m, ROWS.rename_columns({"prompt": "question", "completion": "answer"})),
        "columns question, answer are no known format",
        "dataset.rename_columns({'question': 'prompt', 'answer': 'completion'})",
    ),
    "no chat template": (lambda m: trainer(m, SHAREGPT), "no chat template", "get_chat_template(tokenizer"),
    "rows longer than the model's": (
        lambda m: trainer(m, ROWS, max_length=4096),
        "max_length 4096 > 128",
        "lower max_length",
    ),
    "every row filtered away": (lambda m: trainer(m, ROWS.select([])), "train_dataset is empty", "filters"),
    "a template misspelt": (lambda m: get_chat_template(load(m)[1], "lama"), "'lama'", "llama-3"),
    "ShareGPT that is none": (
        lambda m: standardize_sharegpt(ROWS),
        "no conversations",
        "leave standardize_sharegpt out",
    ),
    "an image in a packed batch": (
        lambda m: load(m)[0](input_ids=torch.ones(1, 4, dtype=torch.long), pixel_values=torch.ones(1)),
        "pixel_values: training is text only",
        "leave out",
    ),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_s_mistake_is_answered(
    script: tuple[Callable[[Path], Any], str, str], tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_script(script, stories, tmp_path, monkeypatch)


WHO = {"role": "user", "content": "Who?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look_up"}}]}


@pytest.mark.parametrize(
    ("rows", "problem", "remedy"),
    [
        ([{"messages": [WHO]}, {"messages": [WHO, CALL]}], "leaves the tool call 'look_up' out", "qwen-2.5"),
        ([{"messages": [{"from": "human", "value": "Who?"}]}], "messages of keys from, value", "standardize_sharegpt"),
        ([{"messages": "[]"}], "messages is a text", 'json.loads(row["messages"])'),
        ([{"messages": "[]", "text": "A cat."}], "messages is a text", 'dataset.remove_columns("messages")'),
        (
            [{"prompt": "Who?", "completion": [{"role": "assistant", "content": "A cat."}]}],
            "prompt is a text, and completion messages",
            "[{'role': 'user', 'content': row['prompt']}]",
        ),
        (
            [{"prompt": [WHO], "completion": "A cat."}],
            "completion is a text, and prompt messages",
            "[{'role': 'assistant', 'content': row['completion']}]",
        ),
    ],
)
def test_turns_that_would_train_nothing_or_something_else_are_refused(
    rows: list[dict[str, Any]], problem: str, remedy: str, stories: Path, tmp_path: Path
) -> None:
    model, tokenizer = load(stories)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    args = SFTConfig(str(tmp_path), packing=True, max_length=128, bf16=False, report_to="none")
    with pytest.raises(DataError, match=re.escape(problem)) as told:
        SFTTrainer(model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(rows), args=args)
    assert remedy in str(told.value)


def test_sharegpt_turns_train_once_their_roles_are_the_templates(stories: Path, tmp_path: Path) -> None:
    model, _ = load(stories)
    args = SFTConfig(str(tmp_path), packing=True, max_length=128, max_steps=1, bf16=False, report_to="none")
    tokenizer = with_template("chatml", stories)
    model.resize_token_embeddings(len(tokenizer))
    with pytest.raises(DataError, match=r"standardize_sharegpt\(dataset\)\.rename_column"):
        SFTTrainer(model=model, processing_class=tokenizer, train_dataset=SHAREGPT, args=args)
    rows = standardize_sharegpt(SHAREGPT)
    with pytest.raises(DataError, match=r': dataset\.rename_column\("conversations", "messages"\)'):
        SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=args)
    human = Dataset.from_list([{"messages": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Ho"}]}])
    with pytest.raises(DataError, match="of the role 'human', which the chat template doesn't know"):
        SFTTrainer(model=model, processing_class=tokenizer, train_dataset=human, args=args)
    rows = rows.rename_column("conversations", "messages")
    SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=args).train()


def test_4_bits_without_bitsandbytes(tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    missing = key("model", "load_in_4bit", True, "4-bit loading needs bitsandbytes", "pip install 'pronghorn[nf4]'")
    answered(missing, tmp_path, stories, monkeypatch)
