"""`pronghorn plan --json` has a schema of its own, and its fields are documented."""

from __future__ import annotations

import json
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


@pytest.fixture
def report(stories: Path, tmp_path: Path) -> Any:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a b", "completion": "c d e"}\n' * 4)
    sections = {
        "model": {"name": str(stories), "max_seq_length": 64},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "train": {"output": str(tmp_path / "run")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(sections))
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "recipe.yaml"), "--device", "rtx4090", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_times_of_each_layer_came_with_schema_2(report: Any) -> None:
    assert report["schema"] == 2 and len(report["times_ms"]["layers"]) == len(report["plan"]["policies"]) > 1


def test_every_field_is_documented(report: Any) -> None:
    page = (ROOT / "docs/plan.md").read_text()
    documented = page[page.index("## As JSON") :]
    assert not [name for name in set(names(report)) if f"`{name}`" not in documented]
