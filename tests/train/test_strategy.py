"""What each of several processes holds: as asked for, or as the plan chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import CONTEXT_BYTES
from pronghorn.memory.planner import PlanDoesNotFit
from pronghorn.train import strategy as module
from pronghorn.train.build import build
from pronghorn.train.documents import find
from pronghorn.train.strategy import Strategy, planned, strategy

CPU = torch.device("cpu")


def recipe(stories: Path, tmp_path: Path, **launch: Any) -> Recipe:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "Once upon a time"}\n' * 4)
    table: dict[str, Any] = {
        "model": {"name": str(stories), "max_seq_length": 128},
        "data": {"train": str(rows)},
        "train": {"output": str(tmp_path / "run"), "gradient_accumulation_steps": 2},
        "launch": launch,
    }
    return Recipe.model_validate(table)


def test_what_is_asked_for_is_done_and_one_process_holds_all(stories: Path, tmp_path: Path) -> None:
    sharded = recipe(stories, tmp_path, strategy="sharded")
    assert strategy(sharded, find(sharded), 2, CPU).strategy is Strategy.SHARDED
    assert strategy(sharded, find(sharded), 1, CPU).strategy is Strategy.COPIES
    plain = recipe(stories, tmp_path)
    assert strategy(plain, find(plain), 2, CPU).strategy is Strategy.COPIES


def test_auto_is_what_the_plan_says(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = recipe(stories, tmp_path)
    assert planned(plain, find(plain), 2, device_spec("24GiB")).strategy is Strategy.COPIES
    with pytest.raises(PlanDoesNotFit, match="on 2 GPUs"):
        planned(plain, find(plain), 2, device_spec("NVIDIA H200", CONTEXT_BYTES))
    monkeypatch.setattr(module, "smallest_device", lambda device: device_spec("NVIDIA H200", CONTEXT_BYTES))
    cuda = torch.device("cuda")
    assert strategy(plain, find(plain), 2, cuda).strategy is Strategy.SHARDED, (
        "what doesn't fit is told by the loaded model"
    )
    for name in ("h200", "gb10"):  # of the latter no rate between two is known
        monkeypatch.setattr(module, "smallest_device", lambda device, name=name: device_spec(name))
        assert strategy(plain, find(plain), 2, cuda).strategy is Strategy.COPIES


def test_trained_layers_are_copied_where_there_is_room(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = recipe(stories, tmp_path, strategy="sharded")
    full = lora.model_copy(update={"adapter": lora.adapter.model_copy(update={"method": "full"})})
    cuda, size = torch.device("cuda"), 2**40
    monkeypatch.setattr(module, "smallest_device", lambda device: device_spec("NVIDIA H200", size))
    assert strategy(full, find(full), 2, cuda) == (Strategy.SHARDED, True)
    assert strategy(lora, find(lora), 2, cuda) == (Strategy.SHARDED, False), "nothing of theirs is trained"
    size = CONTEXT_BYTES
    assert strategy(full, find(full), 2, cuda) == (Strategy.SHARDED, False), "the loaded model says what would fit"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("adapter.method=full train.optimizer=adafactor", "adapter.method: full, train.optimizer: adafactor and"),
        ("adapter.method=full precision.dtype=float16", "precision.dtype: float16: weights are trained in parts by"),
    ],
)
def test_weights_that_are_not_shared_are_refused(stories: Path, tmp_path: Path, override: str, said: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(stories, tmp_path, strategy="sharded").to_dict()))
    with pytest.raises(ConfigError, match=r"launch\.strategy: sharded with") as refused:
        Recipe.load(file, override.split())
    assert said in str(refused.value) and "use launch.strategy: copies" in str(refused.value)


def test_adapters_too_large_to_travel_at_once_have_copies(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pronghorn.train import trainer

    monkeypatch.setattr(trainer, "processes", lambda: 2)
    monkeypatch.setattr(trainer, "sharded", lambda model: object())
    monkeypatch.setattr(trainer, "averages_at_once", lambda model: False)
    with pytest.raises(UnsupportedError, match=r"more than 1 GiB are trained beside layers that processes share"):
        build(recipe(stories, tmp_path), Console(quiet=True), [])
