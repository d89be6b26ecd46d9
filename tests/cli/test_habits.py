"""Mistakes by habit: files that are something else than their name says, keys and flags of Unsloth, Axolotl,
LLaMA-Factory and TRL, and scripts that give a value of another type. Each answer names the value and leads on; see also
test_strange_mistakes.py.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from datasets import Dataset
from pyarrow import parquet
from trl import SFTConfig
from typer.testing import CliRunner

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.cli.main import app
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
    check_script,
    data,
    key,
    row,
    text,
)

ROW = {"prompt": "One day", "completion": " a cat sat."}
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n"
LLAMA_FACTORYS = json.dumps({"mine": {"file_name": "a.jsonl"}})


def command(line: str, problem: str, remedy: str, **files: str) -> Mistake:
    return call(problem, remedy, *line.split(), **files)


def prepared(problem: str, remedy: str, prepare: Callable[[Path], Any], change: str = "") -> Mistake:
    return Mistake(problem, remedy, change, prepare=prepare)


def table(problem: str, remedy: str, **columns: Any) -> Mistake:
    """A Parquet file of these columns."""

    def write(folder: Path) -> None:
        parquet.write_table(pa.table(columns), folder / "a.parquet")

    return prepared(problem, remedy, write, "data.train=a.parquet")


def source(value: str, problem: str, remedy: str) -> Mistake:
    return Mistake(problem, remedy, f"data.train=[{{path: train.jsonl, {value}}}]")


def renamed(columns: dict[str, str], problem: str, remedy: str) -> Mistake:
    recipe = {**RECIPE, "data": {"train": "rows.jsonl", "columns": columns}}
    return Mistake(problem, remedy, recipe=yaml.safe_dump(recipe), files={"rows.jsonl": '{"q": "a", "a": "b"}'})


def a_cache_of_the_hub(folder: Path) -> None:
    (folder / "models--a--b/snapshots").mkdir(parents=True)
    (folder / "model").rename(folder / "models--a--b/snapshots/1f")


def weights_called(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model/model.safetensors").rename(folder / "model" / name)


def weights_that_are(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model/model.safetensors").write_bytes(content)


def configured(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "model/config.json").read_text())
        (folder / "model/config.json").write_text(json.dumps({**config, **changes}))

    return change


def a_list_of_sets(folder: Path) -> None:
    (folder / "sets").mkdir()
    (folder / "sets/dataset_info.json").write_text(LLAMA_FACTORYS)
    (folder / "sets/a.jsonl").write_text(GOOD)


MISTAKES = {
    # files that are something else
    "gzip called .jsonl": data("a.jsonl", gzip.compress(GOOD.encode()), "compressed by gzip", "unpack it"),
    "zstd called .jsonl": data("a.jsonl", b"\x28\xb5\x2f\xfd\x00", "compressed by zstd", "unpack it"),
    "a spreadsheet called .csv": data("a.csv", b"PK\x03\x04\x14\x00", "or a spreadsheet", "save the table as .csv"),
    "Parquet called .jsonl": data("a.jsonl", b"PAR1\x15\x04", "but a Parquet file", "name it .parquet"),
    "a PDF called .txt": data("a.txt", b"%PDF-1.7\n", "but a PDF", "as .txt"),
    "a database called .csv": data("a.csv", b"SQLite format 3\x00", "but a database", "as .csv"),
    "zero bytes": data("a.jsonl", b"\x00" * 100, "but zero bytes", "copy or download it again"),
    "two objects in a line": data("a.jsonl", GOOD.strip() * 2, "not valid JSON (Extra data", "a line of its own"),
    "lines that end as on an old Mac": data(
        "a.jsonl", (GOOD * 2).replace("\n", "\r"), "Extra data", "a line of its own"
    ),
    "a table of columns": data("a.json", json.dumps({"prompt": ["a"]}), "dict instead of a list", "orient='records'"),
    "rows under a key": data("a.json", json.dumps({"data": [ROW]}), "dict instead of a list", "under 'data', alone"),
    "a list of texts": data("a.json", '["a", "b"]', "row 1: str instead of an object", "write each row as"),
    "rows that are conversations": data(
        "a.json", json.dumps([[USER, ASSISTANT]]), "row 1: list instead", "each row as"
    ),
    "LLaMA-Factory's list of sets": prepared(
        "sets/dataset_info.json: dict", "the files that it names, one by one", a_list_of_sets, "data.train=sets"
    ),
    "a folder called .jsonl": prepared(
        "a.jsonl: no data in this folder", "put .jsonl", lambda f: (f / "a.jsonl").mkdir(), "data.train=a.jsonl"
    ),
    "a file without a suffix": data("rows", GOOD, "(no suffix)", ".jsonl"),
    "a pickle": data("a.pkl", b"\x80", "unknown file type .pkl", ".jsonl"),
    "a header with a space": data(
        "a.csv", "prompt, completion\na,b\n", "keys 'prompt', ' completion'", "' completion'}"
    ),
    "a cell left empty": data("a.csv", "prompt,completion\na,\n", "row 1: an empty completion", "delete the row"),
    "messages in a cell": data(
        "a.csv", 'messages\n"[{""role"": ""user""}]"\n', "messages is '[{", "not its text (json.loads)"
    ),
    "a quote that stays open": data("a.csv", 'prompt,completion\n"a,b\nc,d\n', "never closed", "twice"),
    "a JSON value that is not a number": data("a.jsonl", '{"text": NaN}\n', "text is float nan", "as a string"),
    "rows in a struct": table("keys 'data' are no known format", "write each row as", data=[ROW]),
    "numbers in Parquet": table("text is int 1", "as a string", text=[1, 2]),
    "bytes in Parquet": table("text is bytes", "as a string", text=[b"\xff\xfe"]),
    "Parquet without rows": table("no rows in it", "at least one row", text=pa.array([], pa.string())),
    "images in Parquet": table("'image' beside 'text'", "leave out", image=[{"bytes": b"x"}], text=["a"]),
    # rows
    "keys in capitals": row({"Prompt": "a", "Completion": "b"}, "no known format", "{prompt: Prompt, completion: "),
    "a text by another name": row({"content": "a"}, "no known format", "{text: content}"),
    "turns called on": row({"on": [USER, ASSISTANT]}, "no known format", "{messages: 'on'}"),
    "turns called 0": row({"0": [USER, ASSISTANT]}, "no known format", "{messages: '0'}"),
    "turns called with quotes": row({"a's\\\"b": [USER, ASSISTANT]}, "no known format", "{messages: 'a''s\\\"b'}"),
    "a user and an assistant": row({"user": "a", "assistant": "b"}, "no known format", "{prompt: user, completion: "),
    "a message for a prompt": row({"prompt": USER, "completion": "b"}, "prompt is dict", "as a string"),
    "a list of texts for an answer": row({"prompt": "a", "completion": ["b"]}, "'b', no object", "write a message as"),
    "a turn that is a text": row({"messages": ["hi", "ho"]}, "message 1: 'hi', no object", "write a message as"),
    "a number for a content": chat([{"role": "user", "content": 5}, ASSISTANT], "content is int 5", "as a string"),
    "half a weight": chat([USER, {**ASSISTANT, "weight": 0.5}], "weight float 0.5", "1 (supervised) or 0"),
    "no turn to train": chat([USER, {**ASSISTANT, "train": False}], "of 1 row none", "not train: false"),
    "columns the wrong way round": renamed(
        {"q": "prompt", "a": "completion"}, "the file's keys stand last", "{completion: a,"
    ),
    "a column for two keys": renamed({"prompt": "q", "completion": "q"}, "reads 'q' as two keys", "for each"),
    "a slice of a file": source("split: 'train[:10%]'", "train.jsonl is here, and split is", "max_samples"),
    "a revision of a file": source("config: main, revision: x", "config and revision are of hub sets", "leave them"),
    "Axolotl's type": source("type: alpaca", "unknown key data.train.0.type", "format, of the same source"),
    "Axolotl's name": source("name: main", "unknown key data.train.0.name", "config, of a hub set"),
    # keys
    "16 bits": key("model", "load_in_16bit", True, "unknown key model.load_in_16bit", "leave it out"),
    "batches by length": key("train", "group_by_length", True, "unknown key train.group_by_length", "leave it out"),
    "workers of a loader": key("train", "dataloader_num_workers", 4, "unknown key", "tokenised before training"),
    "a folder of logs": key("train", "logging_dir", "x", "unknown key train.logging_dir", "go into train.output"),
    "LoRA+": key("adapter", "loraplus_lr_ratio", 16, "unknown key adapter.loraplus_lr_ratio", "leave it out"),
    "an adapter switched off": key("adapter", "enabled", False, "unknown key adapter.enabled", "adapter.method?"),
    "streaming": key("data", "streaming", True, "unknown key data.streaming", "piece by piece"),
    "shuffling": key("data", "shuffle", True, "unknown key data.shuffle", "data.seed"),
    "packing among data": key("data", "packing", True, "unknown key data.packing", "packing.enabled?"),
    "a key of messages": key("data", "field_messages", "x", "unknown key data.field_messages", "data.columns?"),
    "a share below 0": key("data", "eval", "-5%", "data.eval = '-5%'", "a share (5%)"),
    "the tokenizer's template": key(
        "data", "chat_template", "tokenizer_default", "neither a built-in template", "leave it out"
    ),
    "a template in the recipe": key(
        "data", "chat_template", "{{ x }}", "neither a built-in template", "into a .jinja file"
    ),
    "a template called .txt": Mistake(
        "'t.txt' is neither a built-in", "name the file t.jinja", "data.chat_template=t.txt", files={"t.txt": TEMPLATE}
    ),
    "a new token twice": key("adapter", "new_tokens", ["<a>", "<a>"], "'<a>' is named twice", "each once"),
    "a variable of the shell": key("model", "name", "${MODEL}", "don't fill in ${MODEL}", "model.name"),
    "a variable for data": key("data", "train", "$HOME_OF_DATA/a.jsonl", "don't fill in $HOME_OF_DATA", "data.train"),
    "typographic quotes": key("model", "name", "“model”", "typographic quotes", "model.name"),
    "a key with its section": text("model.name: model\n", "unknown key model.name", "write model: {name: …}"),
    "a section in capitals": text("MODEL: {name: model}\n", "unknown key MODEL", "did you mean model?"),
    "no space after a colon": text("model:\n  name:model\n", "a section is a table", "a space after each colon"),
    "spaces of a web page": text("model:\n\u00a0\u00a0name: model\n", "line 2: a space", "plain spaces"),
    "two recipes in a file": text("model: {}\n---\nmodel: {}\n", "line 2: not YAML", "one recipe a file"),
    # other files for a recipe
    "accelerate's": command("train a.yml", "a configuration of accelerate", "launch.strategy", a_yml=ACCELERATE),
    "DeepSpeed's": command(
        "train a.json", "a configuration of DeepSpeed", "launch.strategy", a_json='{"zero_optimization": {"stage": 2}}'
    ),
    "torchtune's": command(
        "train a.yml", "a configuration of torchtune", "pronghorn init", a_yml="model: {_component_: a.b}\n"
    ),
    "a model's": command("train model/config.json", "a model's configuration", "model.name"),
    "TOML": command("train a.toml", "a.toml is not YAML", "pronghorn init", a_toml="[model]\n"),
    "a notebook": command("train a.ipynb", "a.ipynb is not YAML", "pronghorn init", a_ipynb="{}"),
    # models
    "a folder of the hub's cache": prepared(
        "models--a--b holds no config.json",
        "give models--a--b/snapshots/1f",
        a_cache_of_the_hub,
        "model.name=models--a--b",
    ),
    "Mistral's own weights": prepared(
        "found: consolidated.safetensors", "Mistral's own", weights_called("consolidated.safetensors")
    ),
    "a pointer for weights": prepared(
        "not a whole safetensors file",
        "git lfs pull",
        weights_that_are(b"version https://git-lfs.github.com/spec/v1\nsize 5\n"),
    ),
    "a page for weights": prepared("not a whole safetensors file", "download it again", weights_that_are(b"<html>404")),
    "quantised, and not told how": prepared(
        "has no quant_method", "config.json", configured(quantization_config={"bits": 4})
    ),
    "AWQ": prepared("quantised by 'awq'", "16-bit checkpoint", configured(quantization_config={"quant_method": "awq"})),
    "T5": prepared("no causal language model of the model type 't5'", "give a model", configured(model_type="t5")),
    # the command line
    "all GPUs by name": command("train recipe.yaml --gpus all", "--gpus takes a number", "all are used"),
    "GPUs by their numbers": command(
        "train recipe.yaml --gpus 0,1", "--gpus takes a number", "CUDA_VISIBLE_DEVICES=0,1"
    ),
    "no GPUs to plan for": command("plan recipe.yaml --gpus 0", "--gpus takes a number", "without it it plans for one"),
    "GPUs before the command": command("--gpus 2 train recipe.yaml", "--gpus", "Options follow a command"),
    "a CPU": command("train recipe.yaml --cpu", "--cpu", "CUDA_VISIBLE_DEVICES="),
    "a folder by -o": command("train recipe.yaml -o out", "No such option: -o", "train.output=DIR"),
    "an option without its value": command("data inspect recipe.yaml --html", "'--html' requires an argument", ""),
    "the version by -V": command("-V", "No such option: -V", "--version?"),
    "to inspect": command("inspect recipe.yaml", "No such command 'inspect'", "pronghorn data inspect?"),
    "to run": command("run recipe.yaml", "No such command 'run'", "pronghorn train?"),
    "data for a first recipe's name": command(
        "init train.jsonl", "train.jsonl already exists", "comes first, then --data train.jsonl"
    ),
    "a model for a first recipe's name": command("init model", "model already exists", "then --model model"),
    "a conversion over a recipe": command(
        "convert a.yml",
        "recipe.yaml already exists",
        "--output OTHER.yaml",
        a_yml="base_model: a/b\nadapter: lora\ndatasets: [{path: x, type: alpaca}]\n",
    ),
    "DPO in capitals": command("init a.yaml --task DPO", "--task dpo", "pronghorn docs preference-training"),
    "a push without a login": Mistake(
        "no token for the hub",
        "hf auth login",
        command=("export", "model", "--push", "a/b"),
        prepare=lambda folder: (folder / "model/model.safetensors").unlink(),  # it is told before anything is read
    ),
}


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_habit_is_answered(mistake: Mistake, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(mistake, tmp_path, stories, monkeypatch)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.JSONL", GOOD.encode()),
        ("a.jsonl", b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()),
        ("a.csv", b"\xef\xbb\xbfprompt,completion\r\nOne day,a cat sat\r\n"),
        ("a.csv", b",prompt,completion\n0,One day,a cat sat\n"),  # pandas' index
        ("a.csv", b"Unnamed: 0,prompt,completion\n0,One day,a cat sat\n"),
    ],
)
def test_what_is_meant_is_read(
    name: str, content: bytes, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    recipe = {"model": {"name": str(stories), "max_seq_length": 128}, "data": {"train": name}}
    Path("recipe.yaml").write_text(yaml.safe_dump({**recipe, "train": {"output": "out"}}))
    seen = CliRunner().invoke(app, ["data", "inspect", "recipe.yaml"])
    assert seen.exit_code == 0 and "One day" in seen.output, seen.output


def test_trackers_stand_between_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.config.recipe import Train

    assert Train(output=Path("out"), report_to="tensorboard, wandb").report_to == ["tensorboard", "wandb"]  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [["-h"], ["train", "-h"], ["data", "inspect", "-h"]])
def test_help_has_its_short_name(arguments: list[str]) -> None:
    asked = CliRunner().invoke(app, arguments)
    assert asked.exit_code == 0 and "Usage:" in asked.output


ROWS = Dataset.from_list([ROW] * 4)


def load(model: Path, **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(model), **{"max_seq_length": 128, **options})


def lora(model: Path, *given: Any, **options: Any) -> Any:
    return FastLanguageModel.get_peft_model(load(model)[0], *given, **options)


def trainer(model: Path, rows: Any = ROWS, config: dict[str, Any] | None = None, **options: Any) -> Any:
    args = {"output_dir": "out", "packing": True, "max_length": 128, "bf16": False, "report_to": "none"}
    return SFTTrainer(model=lora(model, r=4), train_dataset=rows, args=SFTConfig(**args | (config or {})), **options)


def settings() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4)


SCRIPTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a model for a name": (
        lambda m: FastLanguageModel.from_pretrained(load(m)[0]),
        "model_name is a LlamaForCausalLM",
        "a hub name",
    ),
    "no in quotes": (lambda m: load(m, load_in_4bit="no"), "load_in_4bit = 'no' is a text", "without quotes"),
    "rsLoRA in quotes": (lambda m: lora(m, use_rslora="yes"), "use_rslora = 'yes'", "without quotes"),
    "transformers' dtype": (lambda m: load(m, torch_dtype="float32"), "torch_dtype", "give it as dtype"),
    "transformers' quantisation": (lambda m: load(m, quantization_config={"a": 1}), "quantization_config", "=True"),
    "a classifier": (lambda m: load(m, num_labels=2), "num_labels", "AutoModelForSequenceClassification"),
    "half a rank": (lambda m: lora(m, r=16.0), "r = 16.0 is not a whole number", "r=16"),
    "PEFT's settings for a rank": (lambda m: lora(m, settings()), "r = a LoraConfig is not a number", "r=16"),
    "PEFT's settings by name": (lambda m: lora(m, peft_config=settings()), "peft_config", "r=…, lora_alpha=…"),
    "a number for linears": (lambda m: lora(m, target_modules=7), "target_modules = 7", "target_modules=[NAME"),
    "a dtype that is a type": (lambda m: load(m, dtype=float), "is unknown", "float32, bfloat16"),
    "no length": (lambda m: load(m, max_seq_length="512"), "max_seq_length '512'", "a packed row"),
    "numbers for texts": (lambda m: trainer(m, Dataset.from_list([{"text": 3}])), "row 1: text is 3", "dataset.map"),
    "lists for texts": (lambda m: trainer(m, Dataset.from_list([{"text": ["a"]}])), "text is a list of str", "join it"),
    "a column for a function": (
        lambda m: trainer(m, formatting_func="prompt"),
        "formatting_func is a str",
        "dataset_text_field",
    ),
    "rows of no tokens": (lambda m: trainer(m, config={"max_length": 0}), "max_length 0", "max_seq_length"),
    "steps of no rows": (
        lambda m: trainer(m, config={"per_device_train_batch_size": 0}),
        "per_device_train_batch_size = 0",
        "1 is the least",
    ),
    "a rate below 0": (lambda m: trainer(m, config={"learning_rate": -1e-4}), "learning_rate = -0.0001", "2e-4"),
    "a dict for a config": (lambda m: SFTTrainer(model=lora(m, r=4), args={}), "args is a dict", "trl.SFTConfig"),
    "pandas": (lambda m: trainer(m, ROWS.to_pandas()), "train_dataset is a DataFrame", "load_dataset("),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_s_habit_is_answered(
    script: tuple[Callable[[Path], Any], str, str], tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_script(script, stories, tmp_path, monkeypatch)


def test_one_module_may_be_named_without_a_list(stories: Path) -> None:
    one, listed = (lora(stories, modules_to_save=names).peft_config["default"] for names in ("lm_head", ["lm_head"]))
    assert one.modules_to_save == listed.modules_to_save and len(one.modules_to_save) == 1
    assert len(MISTAKES) >= 90 and len(SCRIPTS) >= 20
