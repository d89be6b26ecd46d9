"""A small recipe that several processes train, and the comparison of what two runs left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

Make = Callable[..., tuple[str, Path]]
"""Writes a recipe; returns its file and the run's folder. See `recipes`."""


def recipes(stories: Path, shared: Path, folder: Path, documents: int = 30) -> Make:
    """Return what writes recipes of one data set into a folder: `make(name, launch, **train)`."""
    rows = sorted((shared / "data/gsm8k/test.jsonl").read_text().splitlines(), key=len)  # short ones are cheap
    (folder / "train.jsonl").write_text("\n".join(rows[:documents]))
    (folder / "eval.jsonl").write_text("\n".join(rows[60:66]))

    def make(name: str, launch: dict[str, Any] | None = None, **train: Any) -> tuple[str, Path]:
        table = {
            "model": {"name": str(stories), "max_seq_length": 256},
            "adapter": {"r": 4},
            "precision": {"dtype": "float32"},
            "data": {
                "train": str(folder / "train.jsonl"),
                "eval": str(folder / "eval.jsonl"),
                "columns": {"prompt": "question", "completion": "answer"},
                "overflow": "drop",
                "eval_rows": 1,
            },
            "train": {
                "output": str(folder / name),
                "max_steps": 10,  # over the end of an epoch, whose last step has fewer rows than processes
                "learning_rate": 1e-2,
                "warmup_steps": 1,
                "gradient_accumulation_steps": 4,
                "logging_steps": 1,
            }
            | train,
            "memory": {"gradient_checkpointing": False},
            "launch": launch or {},
            "report": {"html": False},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(table))
        return str(folder / f"{name}.yaml"), folder / name

    return make


def stopped_at(step: int, run: Path, copy: Path) -> None:
    """Make of a finished run's folder one that was stopped when it had saved this step."""
    shutil.copytree(run, copy)
    for path in copy.iterdir():
        if path.name in ("adapter", "model") or int(path.name.partition("checkpoint-")[2] or 0) > step:
            shutil.rmtree(path)
    (copy / "run.json").unlink()


def steps(run: Path) -> list[tuple[float, int, int]]:
    """Return loss, tokens and supervised tokens of each step."""
    return [
        (step["loss"], step["tokens"], step["labelled"]) for step in json.loads((run / "run.json").read_text())["steps"]
    ]


def weights_of(run: Path) -> dict[str, Any]:
    """Return the adapter, or the whole model, that a run left."""
    files = [run / "adapter" / "adapter_model.safetensors", run / "model" / "model.safetensors"]
    return load_file(next(file for file in files if file.exists()))


def same(run: Path, other: Path) -> None:
    """Losses, tokens, and the adapter or the whole model agree to the rounding of float32."""
    for (loss, *counts), (expected, *their_counts) in zip(steps(run), steps(other), strict=True):
        assert loss == pytest.approx(expected, rel=2e-5) and counts == their_counts
    weights, expected_weights = weights_of(run), weights_of(other)
    assert weights.keys() == expected_weights.keys()
    for name, expected in expected_weights.items():
        assert (weights[name] - expected).norm() <= 1e-3 * expected.norm(), name


def same_bits(run: Path, other: Path) -> None:
    """Losses, tokens, and the adapter or the whole model are equal."""
    assert steps(run) == steps(other)
    weights, expected = weights_of(run), weights_of(other)
    assert weights.keys() == expected.keys()
    assert [name for name, value in expected.items() if not weights[name].equal(value)] == []
