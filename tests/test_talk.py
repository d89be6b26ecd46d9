"""Talking to base and adapter of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pronghorn.cli.chat import converse
from pronghorn.cli.main import app
from pronghorn.config import Recipe
from pronghorn.train.run import run
from pronghorn.train.talk import load_talk

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def recipe(folder: Path, stories: Path, **changes: Any) -> Recipe:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat sat on a mat."}]
    (folder / "train.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 40))
    (folder / "t.jinja").write_text(TEMPLATE)
    return Recipe.model_validate(
        {
            "model": {"name": str(stories), "max_seq_length": 256},
            "adapter": {"r": 8, **changes.get("adapter", {})},
            "data": {"train": folder / "train.jsonl", "chat_template": str(folder / "t.jinja")},
            "train": {"output": folder / "run", "max_steps": 30, "learning_rate": 2e-2, "warmup_steps": 0},
            "report": {"html": False},
        }
    )


@pytest.fixture(params=["lora", "full"])
def trained(request: pytest.FixtureRequest, stories: Path, tmp_path: Path) -> Path:
    run(recipe(tmp_path, stories, adapter={"method": request.param}), Console(quiet=True))
    return tmp_path / "run"


def ask(folder: Path, text: str, *options: str) -> Any:
    runner = CliRunner()
    return runner.invoke(app, ["chat", str(folder), *options], input=text, env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_both_sides_answer_from_a_pipe(trained: Path) -> None:
    result = ask(trained, "Who?\n\n/reset\n/help\nWho?\n", "--max-new-tokens", "24")
    assert result.exit_code == 0, result.output
    first, again = result.stdout.split("Forgotten.\n/help is no command: /reset, /quit\n")
    base, trained_ = first.split("trained: ")
    assert trained_.startswith("A cat sat on a mat.") and base.startswith("base: ") and "A cat sat on a mat" not in base
    assert again.strip() == first.strip()


def test_each_side_remembers_its_own_words(stories: Path, tmp_path: Path) -> None:
    run(recipe(tmp_path, stories), Console(quiet=True))
    talk = load_talk(tmp_path / "run", max_new_tokens=8, system="Be kind.")
    first = dict(talk.answers("Who?"))
    assert dict(talk.answers("And then?")).keys() == {"base", "trained"}
    for side, answer in first.items():
        history = talk.histories[side]
        assert [turn["role"] for turn in history] == ["user", "assistant"] * 2 and history[1]["content"] == answer
    assert talk.tokenizer.chat_template == TEMPLATE


def test_two_columns_on_a_wide_terminal(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe(tmp_path, stories), Console(quiet=True))
    talk = load_talk(tmp_path / "run", max_new_tokens=24)
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    asked = iter(["Who?", "/quit"])
    monkeypatch.setattr(console, "input", lambda _: next(asked))
    converse(talk, console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert any("base" in line and "trained" in line for line in output.splitlines())
    assert "A cat sat on a mat." in output


def test_folders_that_are_no_finished_run(tmp_path: Path) -> None:
    (tmp_path / "journal.json").write_text("{}")
    for folder, message in ((tmp_path / "none", "is no folder"), (tmp_path, "is not finished")):
        result = ask(folder, "")
        assert result.exit_code == 1 and message in result.stderr and "remedy: " in result.stderr
    (tmp_path / "journal.json").unlink()
    assert "run.json does not exist" in ask(tmp_path, "").stderr
