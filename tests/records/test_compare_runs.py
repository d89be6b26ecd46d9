"""The page that compares runs, and the one that is written while a run trains."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.errors import ConfigError
from pronghorn.records.compare import write_comparison
from pronghorn.records.live import LivePage
from pronghorn.records.record import RunRecord
from pronghorn.records.report import is_final, write_report
from pronghorn.train.run import run
from support.run_records import HOSTILE, Page, record
from support.runs import QUIET, Make


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    record(**changes).write(folder)
    return folder


def test_a_comparison_has_figures_curves_and_the_settings_that_differ(tmp_path: Path) -> None:
    first = write(tmp_path / "a", recipe={"model": {"name": "m"}, "train": {"seed": 1, "output": "a"}})
    second = write(
        tmp_path / "b",
        recipe={"model": {"name": "m"}, "train": {"seed": 2, "output": "b"}, "data": {"train": HOSTILE}},
        heldout={"before": 3.0, "after": 1.25, "rows": 4},
    )
    result = CliRunner().invoke(app, ["report", str(first), str(second), "--html", str(tmp_path / "both.html")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "both.html").read_text()
    page = Page(text)
    for figure in ("2.3456", "1.2500", "4,000", "3.0 GiB", "3 min 05 s", "train.seed", "data.train"):
        assert figure in page.text
    assert "train.output" not in page.text and "model.name" not in page.text
    assert not {"script", "img", "link"} & {tag for tag, _ in page.tags}
    assert "http" not in text.replace("http-equiv", "")
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and "var(--run-1)" in text and "var(--run-2)" in text
    assert "#0101" not in text, "a placeholder of a colour"


def test_another_page_for_one_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(write(tmp_path / "a")), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 1 and "--html with one run" in result.output
    assert not (tmp_path / "page.html").exists()


def test_a_comparison_of_equal_recipes_and_of_too_many(tmp_path: Path) -> None:
    runs = [write(tmp_path / str(number)) for number in range(7)]
    page = write_comparison(runs[:2], tmp_path / "page.html").read_text()
    assert "Every setting is the same." in page
    with pytest.raises(ConfigError, match="7 runs to compare: give at most 6"):
        write_comparison(runs, tmp_path / "page.html")


@pytest.fixture
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 40 seconds pass between two looks at the clock."""
    clock = SimpleNamespace(monotonic=count(0.0, 40.0).__next__)
    monkeypatch.setattr("pronghorn.records.live.time", clock)


@pytest.mark.usefixtures("quick_clock")
def test_the_live_page_reloads_and_the_last_one_does_not(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[str] = []
    on_log = LivePage.on_log

    def watched(self: LivePage, *args: Any, **kwargs: Any) -> None:
        on_log(self, *args, **kwargs)
        if (tmp_path / "run/report.html").exists():
            seen.append((tmp_path / "run/report.html").read_text())

    monkeypatch.setattr(LivePage, "on_log", watched)
    recipe = make(
        "run",
        train={"max_steps": 3, "logging_steps": 1, "save_steps": None},
        report={"html": True, "sample_prompts": ["Hi"], "sample_tokens": 2},
    )
    run(recipe, QUIET)
    assert seen and all('<meta http-equiv="refresh" content="30">' in page for page in seen)
    assert "training, reloads every 30 s" in Page(seen[0]).text
    assert is_final(tmp_path / "run/report.html")
    assert len(RunRecord.read(tmp_path / "run").steps) == 3


@pytest.mark.usefixtures("quick_clock")
def test_a_live_page_that_can_not_be_written_is_told_once(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "file").write_text("")
    page = LivePage(lambda state: record(), tmp_path / "file", notes.append)
    state = SimpleNamespace(is_world_process_zero=True)
    for _ in range(3):
        page.on_log(None, state, None, {"loss": 1.0})
    assert len(notes) == 1 and notes[0].startswith("no live page: ")


def test_no_page_is_drawn_at_the_first_log(tmp_path: Path) -> None:
    page = LivePage(lambda state: record(), tmp_path, print)
    page.on_log(None, SimpleNamespace(is_world_process_zero=True), None, {"loss": 1.0})
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("quick_clock")
def test_pages_are_drawn_at_most_every_so_often(tmp_path: Path) -> None:
    page = LivePage(lambda state: record(), tmp_path, print)
    state = SimpleNamespace(is_world_process_zero=True)
    page.on_log(None, state, None, {"loss": 1.0})
    assert (tmp_path / "report.html").exists() and not is_final(tmp_path / "report.html")
    write_report(record(), tmp_path)
    page.on_log(None, state, None, {"loss": 1.0})
    assert is_final(tmp_path / "report.html")
