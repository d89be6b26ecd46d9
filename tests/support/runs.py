"""Runs of a small recipe for tests: whole ones, stopped ones, and in a process of their own."""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pronghorn.config.recipe import Recipe
from pronghorn.errors import RunStopped
from pronghorn.train.control import RunControl
from pronghorn.train.run import run

QUIET = Console(quiet=True)
Make = Callable[..., Recipe]


@pytest.fixture
def make(stories: Path, shared: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Recipes of a run in `tmp_path / name`; every one is deterministic and has dropout. All have the same rows."""
    data = tmp_path_factory.getbasetemp() / "rows"
    if not data.exists():
        data.mkdir()
        rows = sorted((shared / "data/gsm8k/test.jsonl").read_text().splitlines(), key=len)  # short ones are cheap
        (data / "train.jsonl").write_text("\n".join(rows[:60]))
        (data / "eval.jsonl").write_text("\n".join(rows[60:90]))

    def recipe(name: str, **changes: dict[str, Any]) -> Recipe:
        table: dict[str, dict[str, Any]] = {
            "model": {"name": str(stories), "max_seq_length": 320},
            "adapter": {"r": 4, "lora_dropout": 0.1},
            "data": {
                "train": data / "train.jsonl",
                "eval": data / "eval.jsonl",
                "columns": {"prompt": "question", "completion": "answer"},
                "overflow": "drop",
                "eval_rows": 2,
            },
            "train": {
                "output": tmp_path / name,
                "max_steps": 12,
                "learning_rate": 1e-2,
                "warmup_steps": 1,
                "save_steps": 2,
                "deterministic": True,
            },
            "memory": {"gradient_checkpointing": False},
            "report": {"html": False},
        }
        return Recipe.model_validate(
            {key: {**table.get(key, {}), **changes.get(key, {})} for key in {*table, *changes}}
        )

    return recipe


@pytest.fixture
def unfinished(
    make: Make, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of a run that was stopped after step 5 of 12; a copy of one that is trained once for all tests."""
    stopped = tmp_path_factory.getbasetemp() / "stopped"
    if not stopped.exists():
        with monkeypatch.context() as patch:
            patch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 5))
            with pytest.raises(RunStopped):
                run(make("run", train={"output": stopped}), QUIET)
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def stop_at(control: RunControl, state: Any, step: int) -> None:
    if state.global_step == step - 1:
        control._asked = signal.SIGTERM


def start(recipe: Recipe) -> int:
    """Run in a forked process, which spares it the imports; its exit status is 0, or 9 after an exception."""
    process = os.fork()
    if process:
        return process
    status = 9
    try:
        run(recipe, QUIET)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def finish(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
