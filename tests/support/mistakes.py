"""Mistakes of users in a folder with a model, data and a recipe, and what the answer to each must look like."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.errors import PronghornError

RECIPE: dict[str, Any] = {
    "model": {"name": "model", "max_seq_length": 128},
    "data": {"train": "train.jsonl"},
    "train": {"output": "out", "max_steps": 1},
}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}
GOOD = '{"prompt": "One day", "completion": " a cat sat."}\n'


@dataclass(frozen=True)
class Mistake:
    """What is done wrong, and what the answer must say: in its problem, and in its remedy."""

    problem: str
    remedy: str
    override: str = ""
    recipe: str | None = None
    command: tuple[str, ...] = ("train", "recipe.yaml")
    prepare: Callable[[Path], Any] = lambda folder: None
    files: dict[str, str | bytes] = field(default_factory=dict)


def key(section: str, name: str, value: Any, problem: str, remedy: str) -> Mistake:
    """A key that is set wrongly."""
    return Mistake(problem, remedy, f"{section}.{name}={json.dumps(value)}")


def text(recipe: str, problem: str, remedy: str) -> Mistake:
    """A recipe's whole text."""
    return Mistake(problem, remedy, recipe=recipe)


def data(name: str, content: str | bytes, problem: str, remedy: str) -> Mistake:
    """A file of data that is not what it seems."""
    return Mistake(problem, remedy, f"data.train={name}", files={name: content})


def row(value: Any, problem: str, remedy: str) -> Mistake:
    """A row of data in a file that is else right."""
    return data("rows.jsonl", json.dumps(value) + "\n", problem, remedy)


def chat(messages: Any, problem: str, remedy: str) -> Mistake:
    """A conversation, under a template."""
    files: dict[str, str | bytes] = {"rows.jsonl": json.dumps({"messages": messages}), "t.jinja": TEMPLATE}
    recipe = {**RECIPE, "data": {"train": "rows.jsonl", "chat_template": "t.jinja"}}
    return Mistake(problem, remedy, recipe=yaml.safe_dump(recipe), files=files)


def call(problem: str, remedy: str, *command: str, **files: str) -> Mistake:
    """Another command, or other options."""
    return Mistake(
        problem, remedy, command=command, files={name.replace("_", "."): content for name, content in files.items()}
    )


def answered(mistake: Mistake, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the mistake, and assert that the answer names it and leads on: in at most eight lines, before training."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    shutil.copytree(model, "model", copy_function=shutil.copyfile)
    Path("train.jsonl").write_text(GOOD)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE) if mistake.recipe is None else mistake.recipe)
    for name, content in mistake.files.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    mistake.prepare(folder)
    overrides = [mistake.override] if mistake.override else []
    environment = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, [*mistake.command, *overrides], env=environment)
    assert result.exit_code in (1, 2), repr(result.exception) + result.output
    said = result.stderr if "remedy: " in result.stderr else " ".join(re.sub("[│╭╰─╮╯]", " ", result.stderr).split())
    problem, _, remedy = said.partition("remedy: ")
    assert mistake.problem in problem and mistake.remedy in (remedy or problem), repr(result.exception) + result.output
    assert sum(math.ceil(len(line) / 100) for line in result.stderr.splitlines()) <= 8
    assert " object at 0x" not in said and "Traceback" not in said
    assert not Path("out/adapter").exists()


def check_script(
    script: tuple[Callable[[Path], Any], str, str], model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a script's mistake in a folder: (what it does with a model, in the problem, in the remedy)."""
    monkeypatch.chdir(folder)
    run, problem, remedy = script
    with pytest.raises(PronghornError) as error:
        run(model)
    assert problem in error.value.problem and remedy in error.value.remedy, str(error.value)
    assert len(str(error.value)) < 700
