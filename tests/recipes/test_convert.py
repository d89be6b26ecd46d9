"""Configurations of Axolotl and LLaMA-Factory become recipes that validate and, on a small model, train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config import Recipe
from pronghorn.data.template import BUILT_IN
from support.foreign_recipes import AXOLOTL, DATASET_INFO, LLAMA_FACTORY

REFUSED = {"chatml-dpo", "lora_dpo"}
TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat sat."}]
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A cat sat."}]
ROWS = {
    "alpaca": {"instruction": "Who?", "input": "", "output": "A cat sat."},
    "messages": {"messages": TURNS},
    "sharegpt": {"conversations": SHAREGPT},
    "text": {"text": "One day a cat sat."},
}


def convert(text: str, folder: Path) -> tuple[Any, dict[str, Any] | None, str]:
    """Run the command in the folder; return its result, the recipe and its text."""
    (folder / "theirs.yaml").write_text(text)
    result = CliRunner().invoke(app, ["convert", "theirs.yaml"], env={"COLUMNS": "300"})
    written = (folder / "recipe.yaml").read_text() if (folder / "recipe.yaml").is_file() else ""
    return result, yaml.safe_load(written), written


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> Path:
    """Return stories260k with the special tokens of every built-in template, and ChatML as its own."""
    folder = tmp_path_factory.mktemp("chat-model")
    tokenizer, model = AutoTokenizer.from_pretrained(stories), AutoModelForCausalLM.from_pretrained(stories)
    tokens = {token for template in BUILT_IN.values() for token in template.needs} - {"</s>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(tokens)})
    tokenizer.chat_template = BUILT_IN["chatml"].text
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with LLaMA-Factory's data folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(DATASET_INFO))
    (tmp_path / "data/identity.json").write_text(json.dumps([ROWS["alpaca"]] * 8))
    (tmp_path / "data/alpaca.json").write_text(json.dumps([{"question": "Who?", "answer": "A cat."}] * 8))
    (tmp_path / "data/c4.jsonl").write_text(json.dumps(ROWS["text"]) + "\n")
    (tmp_path / "data/chats.json").write_text(json.dumps([{"turns": TURNS}] * 8))
    return tmp_path


def put_files(recipe: dict[str, Any], folder: Path) -> None:
    """Put a local file in the place of each data set of the hub, of the same format."""
    for number, source in enumerate(recipe["data"]["train"]):
        if not Path(source["path"]).exists():
            row = dict(ROWS[source["format"]])
            for ours, theirs in source.get("columns", {}).items():
                row[theirs] = row.pop(ours)
            source["path"] = f"{number}.jsonl"
            (folder / source["path"]).write_text(f"{json.dumps(row)}\n" * 8)


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    "text", [*AXOLOTL.values(), *LLAMA_FACTORY.values()], ids=[f"{n}" for n in [*AXOLOTL, *LLAMA_FACTORY]]
)
def test_an_example_becomes_a_recipe_that_trains(
    text: str, place: Path, chat_model: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    result, recipe, written = convert(text, place)
    if name in REFUSED:
        assert result.exit_code == 1 and "docs/preference-training.md" in result.output
        return
    assert result.exit_code == 0, result.output
    Recipe.model_validate(recipe)
    for line in filter(None, result.output.splitlines()):  # what is told stands in the recipe, too
        if line.startswith("no equivalent"):
            assert line.removeprefix("no equivalent  ") in written
    put_files(recipe, place)
    recipe["model"] |= {"name": str(chat_model), "max_seq_length": 128}
    recipe["train"] |= {"max_steps": 1, "output": "out"}
    recipe["report"] = {"html": False}
    if recipe["train"].get("optimizer", "").startswith(("paged", "adamw_torch_4bit")):
        del recipe["train"]["optimizer"]  # they need a GPU, or a package that may be missing
    (place / "small.yaml").write_text(yaml.safe_dump(recipe))
    trained = CliRunner().invoke(app, ["train", "small.yaml"], env={"COLUMNS": "300"})
    assert trained.exit_code == 0, trained.output
    assert list((place / "out").glob("*/*.safetensors"))


def test_each_key_of_a_file_is_taken_over_or_told(place: Path) -> None:
    """Nothing is left out silently."""
    for name, text in {**AXOLOTL, **LLAMA_FACTORY}.items():
        if name in REFUSED:
            continue
        (place / "recipe.yaml").unlink(missing_ok=True)
        _, _, written = convert(text, place)
        keys = [key for key, value in yaml.safe_load(text).items() if value is not None]
        aside = {"bf16", "stage", "dataset_dir", "lora_r", "quantization_method"}
        assert not [key for key in keys if key not in written and key not in aside], name


def test_values_are_those_of_the_file(place: Path) -> None:
    _, recipe, written = convert(AXOLOTL["llama-3.2-1b-lora"], place)
    assert recipe is not None
    assert recipe["model"] == {"name": "NousResearch/Llama-3.2-1B", "max_seq_length": 2048}
    assert recipe["adapter"]["r"] == 16 and recipe["adapter"]["lora_alpha"] == 32
    assert recipe["adapter"]["target_modules"][0] == "gate_proj"
    assert recipe["data"]["train"] == [{"path": "teknium/GPT4-LLM-Cleaned", "format": "alpaca"}]
    assert recipe["packing"] == {"rows_per_step": 2}
    assert recipe["train"]["lr_scheduler"] == "cosine" and recipe["train"]["optimizer"] == "adamw_8bit"
    assert "# sequence_len" in written and "#   loss_watchdog_threshold: " in written


def test_defaults_there_that_differ_are_written(place: Path) -> None:
    _, recipe, _ = convert(LLAMA_FACTORY["dora"], place)
    assert recipe is not None
    assert recipe["adapter"] == {"use_rslora": True, "method": "lora", "r": 8, "lora_alpha": 16}
    assert recipe["model"]["max_seq_length"] == 2048 and recipe["data"]["loss_on"] == "last"


def test_dataset_info_is_read(place: Path) -> None:
    _, recipe, _ = convert(LLAMA_FACTORY["lora_sft"], place)
    assert recipe is not None
    assert recipe["data"]["train"] == [
        {"path": "data/identity.json", "format": "alpaca"},
        {"path": "data/alpaca.json", "format": "alpaca", "columns": {"instruction": "question", "output": "answer"}},
    ]


def test_a_ratio_of_warm_up_is_counted_where_steps_are_known(place: Path) -> None:
    _, recipe, _ = convert(AXOLOTL["tiny-llama-pretrain"], place)
    assert recipe is not None and recipe["train"]["warmup_steps"] == 20
    assert recipe["data"]["train"][0]["format"] == "text"


def test_documents_of_a_batch_become_one_row_and_that_is_told(place: Path) -> None:
    result, recipe, _ = convert(AXOLOTL["instruct-lora-8b"], place)
    assert recipe is not None and recipe["packing"] == {"rows_per_step": 1}
    assert "micro_batch_size: 2 documents there; a packed row holds many" in result.output


def test_a_dataset_info_that_is_no_json_is_told(place: Path) -> None:
    (place / "data/dataset_info.json").write_text("{")
    result, _, _ = convert(LLAMA_FACTORY["lora_sft"], place)
    assert result.exit_code == 1 and "JSONDecodeError" in result.output


def test_what_is_there_is_not_written_over(place: Path) -> None:
    (place / "recipe.yaml").write_text("mine")
    result, _, written = convert(AXOLOTL["qlora"], place)
    assert result.exit_code == 1 and "recipe.yaml is there already" in result.output and written == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {name: a}\ntrain: {}\n", "no known configuration"),
        ("base_model: a\nadapter: lora\ndatasets: [{type: alpaca}]\n", "KeyError: 'path'"),
        ("base_model: a\nadapter: lora\ndatasets: [3]\n", "not of the kind that Axolotl documents"),
        ("base_model: a\nmax_steps: 5\nwarmup_ratio: some\n", "not of the kind that Axolotl documents"),
        ("model_name_or_path: a\nstage: sft\nlora_rank: x\ndataset: 3\n", "not of the kind that LLaMA-Factory"),
        ("model_name_or_path: a\ndataset_name: b\n", "a configuration of TRL"),
        ("base_model: a\nadapter: lora\ndatasets: []\n", "would lack"),
    ],
)
def test_other_files_are_refused_by_name(text: str, says: str, place: Path) -> None:
    result, _, _ = convert(text, place)
    assert result.exit_code == 1 and says in result.output
