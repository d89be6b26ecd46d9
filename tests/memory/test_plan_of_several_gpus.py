"""`pronghorn plan --gpus`: strategies side by side, or an error with what would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import ROOT
from pronghorn.cli.main import app


def planned(model: Path, folder: Path, *arguments: str) -> Any:
    (folder / "rows.jsonl").write_text('{"prompt": "a b", "completion": "c d e"}\n' * 40)
    sections = {
        "model": {"name": str(model), "max_seq_length": 64},
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"output": str(folder / "run"), "gradient_accumulation_steps": 8},
    }
    (folder / "recipe.yaml").write_text(json.dumps(sections))
    return CliRunner().invoke(app, ["plan", str(folder / "recipe.yaml"), *arguments], env={"COLUMNS": "200"})


def test_strategies_are_shown_side_by_side(stories: Path, tmp_path: Path) -> None:
    done = planned(stories, tmp_path, "--gpus", "4", "--device", "h100")
    assert done.exit_code == 0, done.output
    for said in ("4 GPUs", "copies", "sharded", "chosen", "338 GB/s", "75% of the datasheet's NVLink", "not measured"):
        assert said in done.stdout, said


def test_the_steps_asked_for_are_counted_on_all_gpus(stories: Path, tmp_path: Path) -> None:
    arguments = "--gpus", "4", "--device", "h100", "--json"
    report = json.loads(planned(stories, tmp_path, "train.max_steps=5", *arguments).stdout)
    assert report["data"]["micro_batches"] == 5 * 8
    assert report["seconds"] == pytest.approx(5 * report["gpus"]["chosen"]["step_ms"] / 1e3)


def test_json_holds_the_choice_and_every_field_is_documented(stories: Path, tmp_path: Path) -> None:
    several = "--gpus", "4", "--device", "h100", "--link", "200", "--strategy", "sharded", "--json"
    report = json.loads(planned(stories, tmp_path, *several).stdout)
    choice = report["gpus"]
    assert choice["chosen"]["strategy"] == "sharded" and choice["link"] == 200e9 and choice["micro_batches"] == 2
    assert report["plan"] == choice["chosen"]["plan"] and report["work"]["processes"] == 4
    step = report["tokens_per_s"] * choice["chosen"]["step_ms"] / 1e3
    assert step == pytest.approx(4 * 2 * report["work"]["tokens"])
    page = (ROOT / "docs/plan.md").read_text()
    fields = {*choice, *choice["chosen"], "gpus", "processes", "link", "link_source"}
    assert not [name for name in fields if f"`{name}`" not in page[page.index("## As JSON") :]]


@pytest.mark.parametrize(("asked", "chosen"), [([], "sharded"), (["--strategy", "auto"], "copies")])
def test_a_recipes_strategy_is_planned(stories: Path, tmp_path: Path, asked: list[str], chosen: str) -> None:
    several = "launch.strategy=sharded", "--gpus", "4", "--device", "h100", "--json"
    report = json.loads(planned(stories, tmp_path, *several, *asked).stdout)
    assert report["gpus"]["chosen"]["strategy"] == chosen
    one = planned(stories, tmp_path, "launch.strategy=sharded", "--device", "h100")
    assert one.exit_code == 0 and "40 documents" in one.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "fsdp", "--gpus", "2"], "use one of auto, copies, sharded"),
        (["--link", "0", "--gpus", "2"], "give GB/s between two GPUs"),
        (["--strategy", "sharded"], "add --gpus 2 or more"),
        (["--gpus", "2", "--device", "gb10"], "give it, e.g. --link 12"),
        (["--gpus", "0"], "a number, at least 1"),
        (["--gpus", "3"], "set train.gradient_accumulation_steps: 9"),
    ],
)
def test_bad_input_ends_with_a_remedy(stories: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    device = [] if "--device" in arguments else ["--device", "h100"]
    done = planned(stories, tmp_path, *arguments, *device)
    assert done.exit_code != 0 and said in done.output, done.output
