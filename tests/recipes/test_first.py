"""`pronghorn init` writes a recipe that trains as it stands, for the machine, the model and the data that there are."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import transformers
import yaml
from typer.testing import CliRunner

from pronghorn.cli.init import Rows
from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.data.formats import FORMATS
from pronghorn.diagnose.plan_report import report_plan as plan_report
from pronghorn.memory.planner import PlanDoesNotFit

ROWS = [{"question": f"How many cats are {n}?", "answer": " ".join(["cat"] * (n + 1))} for n in range(40)]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with questions and answers under names of no known format."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_a_recipe_for_one_s_own_data_trains_as_it_stands(place: Path, stories: Path) -> None:
    result = invoke("init", "mine.yaml", "--model", str(stories), "--data", "rows.jsonl")
    assert result.exit_code == 0, result.output
    assert "rows.jsonl: 40 rows tokenised in" in result.stdout
    text = (place / "mine.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert recipe["model"]["max_seq_length"] == 512 and recipe["data"]["train"] == "rows.jsonl"
    assert recipe["data"]["columns"] == {"prompt": "question", "completion": "answer"}
    assert "40 rows (prompt_completion)" in text and re.search(r"40 documents of \d+ tokens in the median", text)
    assert "A recipe for a CPU" in text and "pronghorn train mine.yaml" in result.output
    trained = invoke("train", "mine.yaml", "train.max_steps=1", "report.html=false")
    assert trained.exit_code == 0, trained.output
    assert (place / "runs/rows/adapter/adapter_model.safetensors").is_file()


def test_what_belongs_to_a_question_is_trained_with_it(place: Path, stories: Path) -> None:
    row = {"question": "How many?", "context": "CREATE TABLE cats", "answer": "SELECT", "Complex_CoT": "Hm."}
    (place / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (place / "model").mkdir()
    for file in stories.iterdir():
        (place / "model" / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (place / "model/chat_template.jinja").write_text(template)
    assert invoke("init", "mine.yaml", "--model", "model", "--data", "rows.jsonl").exit_code == 0
    text = (place / "mine.yaml").read_text()
    columns = {"instruction": "question", "output": "answer", "input": "context"}
    assert yaml.safe_load(text)["data"]["columns"] == columns and "not read: Complex_CoT" in text


CHATS = [
    {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"Up to {n}."}]}
    for n in range(9)
]


def test_conversations_for_a_model_without_a_template_get_one(place: Path, stories: Path) -> None:
    """ChatML, with its tokens, which are trained: such a recipe trains as it stands, too."""
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    result = invoke("init", "mine.yaml", "--model", str(stories), "--data", "rows.jsonl")
    assert result.exit_code == 0, result.output
    text = (place / "mine.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert recipe["data"]["chat_template"] == "chatml"
    assert recipe["adapter"]["new_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert "the model has none; or name the model's instruct version: --model" in text and "9 rows (messages)" in text
    trained = invoke("train", "mine.yaml", "train.max_steps=1", "report.html=false")
    assert trained.exit_code == 0, trained.output


@pytest.mark.parametrize(
    ("key", "turns", "columns"),
    [
        ("chat log", CHATS[0]["messages"], {"messages": "chat log"}),
        ("dialog", [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], {"conversations": "dialog"}),
    ],
)
def test_turns_under_another_name_are_found(key: str, turns: Any, columns: Any, place: Path, stories: Path) -> None:
    (place / "rows.jsonl").write_text(json.dumps({"id": 1, "lang": "en", key: turns}) + "\n")
    result = invoke("init", "mine.yaml", "--model", str(stories), "--data", "rows.jsonl")
    assert result.exit_code == 0, result.output
    text = (place / "mine.yaml").read_text()
    assert yaml.safe_load(text)["data"]["columns"] == columns and "not read: lang" in text


def test_prompts_and_completions_of_turns_are_no_conversations(place: Path, stories: Path) -> None:
    question, answer = CHATS[0]["messages"]
    (place / "rows.jsonl").write_text(json.dumps({"prompt": [question], "completion": [answer]}) + "\n")
    assert invoke("init", "mine.yaml", "--model", str(stories), "--data", "rows.jsonl").exit_code == 0
    assert "columns" not in yaml.safe_load((place / "mine.yaml").read_text())["data"]


def test_a_template_whose_tokens_the_model_has_is_preferred(place: Path, stories: Path) -> None:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(stories)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    shutil.copytree(stories, place / "model")
    tokenizer.save_pretrained(place / "model")
    assert invoke("init", "mine.yaml", "--model", "model", "--data", "rows.jsonl", "--method", "full").exit_code == 0
    recipe = yaml.safe_load((place / "mine.yaml").read_text())
    assert recipe["data"]["chat_template"] == "gemma" and "new_tokens" not in recipe["adapter"]


def test_a_template_whose_tokens_can_t_be_added_is_not_written(place: Path, stories: Path) -> None:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    result = invoke("init", "--model", str(stories), "--data", "rows.jsonl", "--method", "full")
    assert result.exit_code == 1 and "a conversation, but the tokenizer has no chat template" in result.stderr
    assert "name the model's instruct version (--model), or leave --method full out" in result.stderr
    assert not (place / "recipe.yaml").exists()


def test_without_anything_named_the_recipe_is_whole(place: Path) -> None:
    assert invoke("init").exit_code == 0
    (place / "my-data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    recipe = Recipe.load("recipe.yaml")
    assert recipe.adapter.method == "lora" and recipe.data.train == Path("my-data.jsonl")
    again = invoke("init")
    assert again.exit_code == 1 and "recipe.yaml already exists" in again.stderr


def test_what_comes_next_takes_a_path_with_spaces(place: Path) -> None:
    result = invoke("init", "my own.yaml", "--recipe", "texts")
    assert result.stdout.endswith("data inspect 'my own.yaml', then pronghorn train 'my own.yaml'\n")


def test_documents_longer_than_a_row_are_split(place: Path, stories: Path) -> None:
    with (place / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"question": "Say it.", "answer": "cat " * 2000}) + "\n")
    assert invoke("init", "--model", str(stories), "--data", "rows.jsonl").exit_code == 0
    text = (place / "recipe.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert recipe["model"]["max_seq_length"] == 512 and recipe["data"]["overflow"] == "split"
    assert "2.4% are longer than a row" in text and "more than 512" in text


def test_a_recipe_for_another_gpu_has_its_plan(place: Path, stories: Path) -> None:
    result = invoke("init", "--model", str(stories), "--data", "rows.jsonl", "--device", "rtx4090")
    assert result.exit_code == 0, result.output
    assert re.search(r"planned: \d+\.\d of \d+\.\d GiB", (place / "recipe.yaml").read_text())


def test_what_does_not_fit_gets_4_bit_weights_then_shorter_rows(
    place: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronghorn.recipes.first.SHORTEST", 128)
    asked = []

    def report_plan(recipe: Recipe, device: str | None, *others: Any) -> Any:
        asked.append((recipe.model.load_in_4bit, recipe.model.max_seq_length))
        if len(asked) < 3:
            raise PlanDoesNotFit("too large", "less")
        return plan_report(recipe, device, *others)

    monkeypatch.setattr("pronghorn.recipes.first.report_plan", report_plan)
    with (place / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"question": "Say it.", "answer": "cat " * 100}) + "\n")
    result = invoke("init", "--model", str(stories), "--data", "rows.jsonl", "--device", "h100")
    assert result.exit_code == 0, result.output
    (first, row), *others = asked
    assert (first, others) == (False, [(True, row), (True, row // 2)])
    assert yaml.safe_load((place / "recipe.yaml").read_text())["data"]["overflow"] == "split"


@pytest.mark.parametrize(("gib", "size"), [("6GiB", "0.6B"), ("15GiB", "4B"), ("80GiB", "8B")])
def test_the_model_is_one_for_the_gpu(gib: str, size: str, place: Path) -> None:
    assert invoke("init", "--device", gib).exit_code == 0
    assert Recipe.model_validate(yaml.safe_load((place / "recipe.yaml").read_text())).model.name.endswith(size)


def test_data_that_can_t_be_trained_on_are_told_at_once(place: Path, stories: Path) -> None:
    (place / "rows.jsonl").write_text('{"frage": "a", "antwort": "b"}\n')
    result = invoke("init", "--model", str(stories), "--data", "rows.jsonl")
    assert result.exit_code == 1 and "rows.jsonl line 1" in result.stderr and not (place / "recipe.yaml").exists()


def test_rows_with_keys_that_change_nothing_are_read_by_their_format(place: Path, stories: Path) -> None:
    (place / "rows.jsonl").write_text('{"prompt": "a", "completion": "b", "score": 3}\n')
    result = invoke("init", "--model", str(stories), "--data", "rows.jsonl")
    told = " ".join(result.stderr.split())
    assert result.exit_code == 1 and "to ignore every other key (pronghorn init --format)" in told
    result = invoke("init", "--model", str(stories), "--data", "rows.jsonl", "--format", "prompt_completion")
    assert result.exit_code == 0, result.output
    assert yaml.safe_load((place / "recipe.yaml").read_text())["data"]["format"] == "prompt_completion"
    result = invoke("init", "other.yaml", "--model", str(stories), "--data", "rows.jsonl", "--format", "messages")
    assert result.exit_code == 1 and "no 'messages' among its keys" in result.stderr
    assert "(pronghorn init --format)" not in result.stderr
    assert set(get_args(Rows)) == set(FORMATS)


def test_preferences_lead_to_their_page(place: Path) -> None:
    result = invoke("init", "--task", "dpo")
    assert result.exit_code == 1 and "pronghorn docs preference-training" in result.stderr
