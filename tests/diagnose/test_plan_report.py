"""`pronghorn plan --json` has a schema of its own, and its fields are documented."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import ROOT
from pronghorn.cli.main import app

FREE_KEYS = ("ranks", "predicted")
"""Tables whose keys are the model's linears and the kinds of memory."""


def names(value: Any, inside: str = "") -> Iterator[str]:
    """List the names of all fields, in lists and tables too."""
    if isinstance(value, dict):
        for name, part in value.items():
            if inside not in FREE_KEYS:
                yield name
            yield from names(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from names(part, inside)


def planned(model: Path, folder: Path, *arguments: str) -> Any:
    """Run `pronghorn plan` for a model, of which the tokenizer and the configuration are read."""
    (folder / "rows.jsonl").write_text('{"prompt": "a b", "completion": "c d e"}\n' * 4)
    sections = {
        "model": {"name": str(model), "max_seq_length": 64},
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"output": str(folder / "run")},
    }
    (folder / "recipe.yaml").write_text(json.dumps(sections))
    return CliRunner().invoke(app, ["plan", str(folder / "recipe.yaml"), *arguments])


@pytest.fixture
def report(stories: Path, tmp_path: Path) -> Any:
    done = planned(stories, tmp_path, "--device", "rtx4090", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_times_of_each_layer_came_with_schema_2(report: Any) -> None:
    assert report["schema"] == 2 and len(report["times_ms"]["layers"]) == len(report["plan"]["policies"]) > 1


def test_every_field_is_documented(report: Any) -> None:
    page = (ROOT / "docs/plan.md").read_text()
    documented = page[page.index("## As JSON") :]
    assert not [name for name in set(names(report)) if f"`{name}`" not in documented]


def test_products_in_8_bits_are_planned_for_a_card_that_has_them(stories: Path, tmp_path: Path) -> None:
    """On a machine without a GPU, too: the plan is for the card that is named."""
    model = tmp_path / "model"
    shutil.copytree(stories, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    weights = {}
    for compute in ("dtype", "fp8", "int8"):
        done = planned(model, tmp_path, f"precision.compute={compute}", "--device", "h200", "--json")
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        weights[compute] = told["plan"]["predicted"]["weights"]
        assert (told["work"]["fp8"], told["work"]["int8"]) == (compute != "dtype", compute == "int8")
    assert weights["int8"] > weights["fp8"] > weights["dtype"]
    done = planned(model, tmp_path, "precision.compute=fp8", "--device", "rtx3090")
    assert done.exit_code == 1 and "needs Ada, Hopper or Blackwell; rtx3090 is older" in done.stderr
    assert "set it to int8" in done.stderr
    done = planned(model, tmp_path, "precision.compute=int8", "--device", "rtx3090")
    assert done.exit_code == 0, done.output
    done = planned(model, tmp_path, "precision.compute=int8", "--device", "t4")
    assert done.exit_code == 1 and "needs Ampere or newer; t4 is older" in done.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("adapter.lora_dropout=0.1", "LoRA dropout"),
        ("adapter.use_dora=true", "an adapter that is not plain LoRA"),
        ("packing.enabled=false train.neftune_noise_alpha=5", "padded batches"),
        ("packing.enabled=false", None),
        ("adapter.r=4", None),
    ],
)
def test_layers_that_are_not_fused_are_told(stories: Path, tmp_path: Path, change: str, reason: str | None) -> None:
    """With DoRA or dropout nothing multiplies in 8 bits, whatever precision.compute says."""
    done = planned(stories, tmp_path, *change.split(), "--device", "h200", "--json")
    report = json.loads(done.stdout)
    assert report["unfused"] == reason and report["work"]["fused"] == (reason is None)
    text = " ".join(planned(stories, tmp_path, *change.split(), "--device", "h200").stdout.split())
    assert (f"planned as layers of transformers and PEFT, in the model's dtype: {reason}" in text) == bool(reason)


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ("packing.attention=tiled", "h100", "head_dim 8 is not one of 16, 32, 64, 128"),
        ("packing.attention=flash", "t4", "t4 is older than Ampere"),
        ("packing.attention=flash precision.dtype=float32", "h100", "flash varlen has no float32"),
        ("packing.attention=flash", "24GiB", None),
        ("packing.attention=per_document", "t4", None),
    ],
)
def test_attention_that_a_card_can_t_serve_is_refused_as_in_training(
    stories: Path, tmp_path: Path, change: str, device: str, reason: str | None
) -> None:
    done = planned(stories, tmp_path, *change.split(), "--device", device)
    assert done.exit_code == (reason is not None) and (reason or "") in " ".join(done.stderr.split())
