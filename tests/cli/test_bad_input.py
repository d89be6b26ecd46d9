"""Everything people get wrong, through the command line: exit code 1, a problem that names file, line and value, and a
remedy; and nothing is trained.

One table: what to put in the folder, what to change in a recipe that works, and what the error must say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.records.record import FILE_NAME as RECORD
from support.packed_checkpoints import change

TURN = "{{ '[' + m['role'] + ']' + m['content'] + '</s>' }}"
TEMPLATE = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
USER, ASSISTANT = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
GOOD = '{"prompt": "One day", "completion": " a cat sat."}'


@dataclass(frozen=True)
class Case:
    """Files by name (text, bytes, or rows for a .jsonl), changes to the recipe by section, what stderr must say."""

    says: tuple[str, ...]
    files: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    prepare: Callable[[Path], Any] | None = None


def rows(content: Any, *says: str, **data: Any) -> Case:
    """A case of bad training rows in train.jsonl."""
    return Case(says, {"train.jsonl": content}, {"data": data} if data else {})


def chat(messages: Any, *says: str, template: str = TEMPLATE, **data: Any) -> Case:
    """A case of one conversation under a template."""
    files = {"train.jsonl": [{"messages": messages}], "t.jinja": template}
    return Case(says, files, {"data": {"chat_template": "t.jinja", **data}})


def setting(section: str, key: str, value: Any, *says: str) -> Case:
    return Case(says, recipe={section: {key: value}})


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a b c"] * 100}), path)


def model(spoil: Callable[[Path], Any], *says: str) -> Case:
    """A case of a model's folder that `spoil` damages."""
    return Case(says, recipe={"model": {"name": "model"}}, prepare=lambda folder: spoil(folder / "model"))


def configure(folder: Path, **changes: Any) -> None:
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    table = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(table))


def split_weights(folder: Path) -> None:
    """The weights in several files, one of which got lost."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="300KB")
    next(folder.glob("model-00002-of-*")).unlink()


CASES: dict[str, Case] = {
    # files
    "no such file": Case(("nowhere.jsonl does not exist",), recipe={"data": {"train": "nowhere.jsonl"}}),
    "an empty file": rows("", "train.jsonl: no rows in it"),
    "blank lines only": rows("\n\n \n", "train.jsonl: no rows in it"),
    "not JSON": rows(GOOD + "\nhello", "train.jsonl line 2: not valid JSON", "column 1"),
    "a line cut short": rows(GOOD[:-5], "train.jsonl line 1: not valid JSON"),
    "a line cut short before another": rows('{"prompt": "a",\n' + GOOD, "train.jsonl line 1: not valid JSON"),
    "a list in a line": rows("[1, 2]", "train.jsonl line 1: list instead of an object"),
    "not UTF-8": rows(b'{"text": "caf\xe9"}', "train.jsonl line 1: byte 0xe9 is not UTF-8"),
    "a line too long": rows('{"text": "' + "x" * 5000 + '"}', "train.jsonl line 1: a line of more than 4,000 bytes"),
    "a kind of file unknown": Case(
        ("train.xml: unknown file type .xml",), {"train.xml": "<a/>"}, {"data": {"train": "train.xml"}}
    ),
    "an empty folder": Case(("no data in this folder",), {"data/readme.md": "nothing"}, {"data": {"train": "data"}}),
    "a folder of two formats": Case(
        ("b.jsonl line 1", "a.jsonl line 1"),
        {"data/a.jsonl": GOOD, "data/b.jsonl": '{"text": "a"}'},
        {"data": {"train": "data"}},
    ),
    "JSON that is not a list": Case(("dict instead of a list",), {"t.json": GOOD}, {"data": {"train": "t.json"}}),
    "ragged CSV": Case(
        ("t.csv: not valid CSV",), {"t.csv": "prompt,completion\na,b\na,b,c\n"}, {"data": {"train": "t.csv"}}
    ),
    "nothing but brackets": Case(("t.json row 1",), {"t.json": "[" * 100_000}, {"data": {"train": "t.json"}}),
    "CSV with a column twice": Case(
        ("t.csv: the column 'prompt' twice",),
        {"t.csv": "prompt,prompt,completion\na,b,c\n"},
        {"data": {"train": "t.csv"}},
    ),
    "a Parquet file cut short": Case(
        ("t.parquet: not a whole Parquet file",),
        recipe={"data": {"train": "t.parquet"}},
        prepare=lambda folder: (parquet(folder / "t.parquet"), half(folder / "t.parquet")),
    ),
    "text called Parquet": Case(
        ("t.parquet: not a whole Parquet file",), {"t.parquet": "hello"}, {"data": {"train": "t.parquet"}}
    ),
    # rows
    "two formats in a file": rows(
        GOOD + '\n{"text": "a"}', "train.jsonl line 2: a row with 'text'", "line 1 has 'prompt', 'completion'"
    ),
    "keys of no format": rows([{"frage": "a", "antwort": "b"}], "train.jsonl line 1"),
    "a key too many": rows([{"prompt": "a", "completion": "b", "label": 1}], "train.jsonl line 1", "label"),
    "a prompt without completion": rows([{"prompt": "a"}], "train.jsonl line 1"),
    "an empty completion": rows([{"prompt": "a", "completion": ""}], "train.jsonl line 1", "completion"),
    "an empty text": rows([{"text": " "}], "train.jsonl line 1", "text"),
    "a number for a text": rows([{"text": 3}], "train.jsonl line 1", "text"),
    "a null for a text": rows([{"text": None}], "train.jsonl line 1", "text"),
    "Alpaca without output": rows([{"instruction": "a", "input": ""}], "train.jsonl line 1"),
    "a column that is not there": rows(GOOD, "question", columns={"prompt": "question"}),
    "another format than named": rows(GOOD, "train.jsonl line 1", format="alpaca"),
    "a preference pair": rows(
        [{"prompt": "a", "chosen": "b", "rejected": "c"}], "train.jsonl line 1: a preference pair"
    ),
    "a pair without a prompt": rows([{"chosen": "b", "rejected": "b"}], "train.jsonl line 1: a preference pair"),
    "the format of pairs": rows(
        [{"prompt": "a", "chosen": "b", "rejected": "c"}], "data.format", "TRL's trainers", format="preference"
    ),
    "every row dropped": rows([{"text": ""}], "each of its rows was dropped", bad_rows="drop"),
    # conversations
    "a role missing": chat([{"content": "a"}, ASSISTANT], "train.jsonl line 1 message 1", "role"),
    "a role unknown": chat([{"role": "wizard", "content": "a"}, ASSISTANT], "line 1 message 1", "wizard"),
    "no messages": chat([], "train.jsonl line 1", "messages"),
    "messages that are no list": chat("hello", "train.jsonl line 1", "messages"),
    "a message without content": chat([USER, {"role": "assistant"}], "train.jsonl line 1 message 2", "content"),
    "a list for content": chat([{"role": "user", "content": [1]}, ASSISTANT], "line 1 message 1", "content"),
    "two user turns in a row": chat([USER, USER, ASSISTANT], "train.jsonl line 1 message 2", "user"),
    "an assistant who begins": chat([ASSISTANT, USER], "train.jsonl line 1 message 1", "assistant"),
    "an empty assistant turn": chat([USER, {"role": "assistant", "content": " "}], "line 1 message 2", "empty"),
    "a system message in the middle": chat(
        [USER, {"role": "system", "content": "a"}, ASSISTANT], "message 2", "system"
    ),
    "nobody answers": chat([USER], "of 1 row none has a token to train"),
    "a control token inside": chat(
        [USER, {"role": "assistant", "content": "A </s> cat"}], "line 1", "control token '</s>'"
    ),
    "tool calls that the template leaves out": chat(
        [USER, CALL], "train.jsonl line 1 message 2", "leaves the tool call's 'look' out"
    ),
    "tool calls that the template can't write": chat(
        [USER, CALL, {"role": "tool", "content": "a cat"}, ASSISTANT],
        "train.jsonl line 1: the chat template fails on the conversation",
        'concatenate str (not "dict")',
        template="{% for c in messages[1].tool_calls %}{{ 'call ' + c.function.arguments }}{% endfor %}" + TEMPLATE,
    ),
    "tool calls without a name": chat(
        [USER, {**CALL, "tool_calls": [{"function": {}}]}], "train.jsonl line 1 message 2", "name"
    ),
    # templates
    "a conversation and no template": Case(
        ("train.jsonl line 1: a conversation, but the tokenizer has no chat template",),
        {"train.jsonl": [{"messages": [USER, ASSISTANT]}]},
    ),
    "a template unknown": setting("data", "chat_template", "lama-3", "'lama-3'", "llama-3"),
    "a template that is not there": setting("data", "chat_template", "no.jinja", "'no.jinja' does not exist"),
    "a template of nobody": setting("data", "chat_template", "~nobody-here/t.jinja", "t.jinja' does not exist"),
    "a model of nobody": setting("model", "name", "~nobody-here/model", "~nobody-here/model does not exist"),
    "a template of nothing": chat([USER, ASSISTANT], "t.jinja is empty", template=" "),
    "a template with a mistake": chat([USER, ASSISTANT], "template's line 1", template="{% for m in %}"),
    "a template of tokens not there": setting("data", "chat_template", "chatml", "<|im_start|>", "<|im_end|>"),
    "a template that can't ask for an answer": chat(
        [USER, ASSISTANT], "line 1 message 2", "add_generation_prompt", template=TEMPLATE.split("{% if")[0]
    ),
    "a template of scaffolding only": chat(
        [USER, ASSISTANT],
        "line 1",
        "the chat template leaves the assistant's text out",
        template=TEMPLATE.replace("m['content']", "''"),
        loss_on="all",
    ),
    "a template that rewrites the answer": chat(
        [USER, ASSISTANT], "line 1 message 2", "'A cat.'", template=TEMPLATE.replace("['content']", "['content']|upper")
    ),
    "a template without an end of turn": chat(
        [USER, ASSISTANT], "line 1", "no end-of-turn token", template=TEMPLATE.replace("</s>", "")
    ),
    "a system prompt and no template": setting("data", "system_prompt", "Be kind.", "data.system_prompt is set"),
    # lengths
    "a document too long": Case(
        ("train.jsonl line 1 has", "max_seq_length 8"), recipe={"model": {"max_seq_length": 8}}
    ),
    "all too long": Case(
        ("of 1 document none is left at max_seq_length 4",),
        recipe={"model": {"max_seq_length": 4}, "data": {"overflow": "drop"}},
    ),
    "rows longer than the model's positions": setting("model", "max_seq_length", 513, "513 > 512"),
    # mixtures
    "weights for some": setting(
        "data", "train", [{"path": "train.jsonl", "weight": 1}, {"path": "train.jsonl"}], "1 of 2 sources has a weight"
    ),
    "a weight below zero": setting("data", "train", [{"path": "train.jsonl", "weight": -1}], "greater than 0"),
    "a mixture of nothing": setting("data", "train", [], "data.train"),
    # the recipe
    "no recipe": Case(("missing.yaml does not exist",), arguments=("missing.yaml",)),
    "a recipe that is not a table": Case(("a recipe is a table of sections",), {"recipe.yaml": "- a\n- b\n"}),
    "a recipe that is not YAML": Case(("recipe.yaml line", "not YAML"), {"recipe.yaml": "model: [unclosed\n"}),
    "a recipe that is not UTF-8": Case(("recipe.yaml is not UTF-8",), {"recipe.yaml": b"model: \xff"}),
    "a key twice": Case(("line 2: key 'model' is set twice",), {"recipe.yaml": "model: {}\nmodel: {}\n"}),
    "a key misspelt": setting("train", "learning_rat", 1, "unknown key train.learning_rat", "train.learning_rate?"),
    "another library's key": setting("train", "num_train_epochs", 1, "did you mean train.epochs?"),
    "a section misspelt": setting("trian", "max_steps", 1, "unknown key trian", "train"),
    "a key without value": Case(("data.train is missing",), recipe={"data": {"train": ...}}),
    "a text for a number": setting("train", "max_steps", "three", "train.max_steps = 'three'"),
    "a rank of zero": setting("adapter", "r", 0, "adapter.r = 0", "greater than or equal to 1"),
    "a rate of infinity": setting("train", "learning_rate", float("inf"), "train.learning_rate = inf", "finite"),
    "dropout of everything": setting("adapter", "lora_dropout", 1.0, "adapter.lora_dropout = 1.0", "less than 1"),
    "4 bits and every weight": Case(
        ("4-bit weights can't be trained",), recipe={"adapter": {"method": "full"}, "model": {"load_in_4bit": True}}
    ),
    "improvement of what": setting("train", "min_improvement", 0.1, "train.min_improvement needs held-out data"),
    "evaluating nothing": setting("train", "eval_steps", 5, "train.eval_steps needs held-out data"),
    "an override without value": Case(("'train.max_steps' is not section.key=value",), arguments=("train.max_steps",)),
    "an override that is not YAML": Case(("train.max_steps=[", "not YAML"), arguments=("train.max_steps=[",)),
    # models and runs
    "a model that is nowhere": setting("model", "name", "./nothing", "./nothing"),
    "a folder that is not a model": Case(("empty",), {"empty/notes.txt": "hello"}, {"model": {"name": "empty"}}),
    "weights cut short": Case(
        ("model.safetensors",),
        recipe={"model": {"name": "model"}},
        prepare=lambda folder: half(folder / "model/model.safetensors"),
    ),
    "a config that is not JSON": Case(
        ("config.json",),
        recipe={"model": {"name": "model"}},
        prepare=lambda folder: half(folder / "model/config.json"),
    ),
    "a kind of model unknown": model(lambda folder: configure(folder, model_type="xyzzy"), "config.json", "xyzzy"),
    "a config without a kind": model(lambda folder: configure(folder, model_type=None), "config.json", "model_type"),
    "a config that contradicts itself": model(lambda folder: configure(folder, num_attention_heads=7), "config.json"),
    "code of its own": model(
        lambda folder: configure(folder, model_type="own", auto_map={"AutoConfig": "own.Config"}), "trust_remote_code"
    ),
    "a tokenizer that is none": model(lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer"),
    "layers without weights": model(
        lambda folder: configure(folder, num_hidden_layers=6),
        "num_hidden_layers 6, but the weights hold 5 layers",
        "configuration and weights must be of one model",
    ),
    "weights of other shapes": model(
        lambda folder: configure(folder, intermediate_size=200), "15 of the model's weights", "other shapes"
    ),
    "weights that are none of the model's": model(
        lambda folder: change(folder, "model.layers.0.mlp.extra.weight", torch.ones(2)),
        "1 tensor that has no place in the model",
        "model.layers.0.mlp.extra.weight",
    ),
    "a part of the weights missing": model(lambda folder: split_weights(folder), "model-00002-of-", "index.json"),
    "adapters on nothing": setting("adapter", "target_modules", ["qproj"], "'qproj' is not in the model", "q_proj"),
    "a file in the output's place": setting("train", "output", "train.jsonl", "is not a folder that can be written to"),
    "a file above the output": setting("train", "output", "train.jsonl/out", "is not a folder that can be written to"),
    "a finished run": Case(("give the run.json of a finished run, or restore the file",), {f"out/{RECORD}": "{}"}),
    "a folder of something else": Case(("is not empty, and no run was begun there",), {"out/thesis.txt": "mine"}),
    "a run that can't be read": Case(("journal.json: not valid JSON",), {"out/journal.json": "{"}),
    "a run of another version": Case(
        ("schema 'pronghorn-journal-v9'",), {"out/journal.json": '{"schema": "pronghorn-journal-v9"}'}
    ),
}


def place(folder: Path, case: Case, stories: Path) -> Path:
    """Make the case's folder; returns the recipe."""
    shutil.copytree(stories, folder / "model")
    table: dict[str, Any] = {
        "model": {"name": str(stories), "max_seq_length": 128},
        "data": {"train": "train.jsonl"},
        "train": {"output": "out", "max_steps": 1},
        "report": {"html": False},
    }
    for section, changes in case.recipe.items():
        merged = {**table.get(section, {}), **changes}
        table[section] = {key: value for key, value in merged.items() if value is not ...}
    files = {"train.jsonl": GOOD, "recipe.yaml": yaml.safe_dump(table), **case.files}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "\n".join(json.dumps(row) for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if case.prepare is not None:
        case.prepare(folder)
    return folder / "recipe.yaml"


def train(*arguments: str) -> Any:
    environment = {"COLUMNS": "300", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    return CliRunner().invoke(app, ["train", *arguments], env=environment)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input(case: Case, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pronghorn.data.files.LINE_LIMIT", 4000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place(tmp_path, case, stories)
    arguments = case.arguments or ("recipe.yaml",)
    result = train(*(arguments if arguments[0].endswith(".yaml") else ("recipe.yaml", *arguments)))
    assert result.exit_code == 1, result.output + repr(result.exception)
    assert "error: " in result.stderr and "remedy: " in result.stderr, repr(result.exception)
    for text in case.says:
        assert text in result.stderr
    assert not list(tmp_path.glob("out/checkpoint-*")) and not (tmp_path / "out/adapter").exists()


def test_the_recipe_that_the_cases_spoil_works(tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for case in (Case(()), chat([USER, ASSISTANT])):
        place(tmp_path, case, stories)
        result = train("recipe.yaml")
        assert result.exit_code == 0, result.output
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "model")
    assert len(CASES) >= 60
