"""docs/migrate.md: its script runs, its configurations become the recipes that it prints, and those train.

The lines that a notebook of Unsloth's needs are tested in tests/test_unsloth_names.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.recipe import fields
from support.templates import with_template

PAGE = (Path(__file__).parents[2] / "docs/migrate.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)


def test_every_key_of_a_recipe_that_the_page_names_is_one() -> None:
    keys = {key for key, *_ in fields()}
    named = set(re.findall(r"`((?:model|adapter|data|packing|train|memory|precision)\.[a-z_0-9]+)(?:: [^`]*)?`", PAGE))
    assert len(named) > 30 and named <= keys


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with forty conversations."""
    monkeypatch.chdir(tmp_path)
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A cat sat."}]
    row = json.dumps({"conversations": turns})
    Path("chats.jsonl").write_text("\n".join(row.replace("cat sat", f"cat sat by {n} trees") for n in range(40)))
    return tmp_path


@pytest.fixture
def chat_model(stories: Path, tmp_path: Path) -> Path:
    """Return stories260k with ChatML."""
    tokenizer, model = with_template("chatml", stories), AutoModelForCausalLM.from_pretrained(stories)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("tool", ["Axolotl", "LLaMA-Factory"])
def test_a_configuration_becomes_the_recipe_beside_it_which_trains(tool: str, place: Path, chat_model: Path) -> None:
    theirs, ours = blocks(tool, "yaml")
    Path("theirs.yml").write_text(theirs)
    for info in blocks(tool, "json"):
        Path("data").mkdir()
        Path("data/dataset_info.json").write_text(info)
    converted = CliRunner().invoke(app, ["convert", "theirs.yml", "--output", "my.yaml"])
    assert converted.exit_code == 0, converted.output
    recipe: dict[str, Any] = yaml.safe_load(Path("my.yaml").read_text())
    assert recipe == yaml.safe_load(ours)
    changes = [f"model.name={chat_model}", "model.max_seq_length=128", "train.max_steps=1", "report.html=false"]
    trained = CliRunner().invoke(app, ["train", "my.yaml", *changes])
    assert trained.exit_code == 0, trained.output
    assert (Path(recipe["train"]["output"]) / "adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_script_of_trl_s_runs_as_printed(tmp_path: Path, stories: Path) -> None:
    [script] = blocks("TRL", "python")
    for printed, here in {
        '"Qwen/Qwen3-0.6B"': repr(str(stories)),
        "2048": "128, max_steps=2, bf16=False, report_to='none'",
    }.items():
        assert printed in script, printed
        script = script.replace(printed, here)
    (tmp_path / "script.py").write_text(script)
    rows = [{"prompt": "One day", "completion": f" a cat sat by {number} trees."} for number in range(8)]
    (tmp_path / "my-data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/trl/adapter/adapter_model.safetensors").is_file()
