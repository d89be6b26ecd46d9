"""The run record and its page."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pronghorn.cli.train import summary
from pronghorn.errors import ConfigError, DataError
from pronghorn.records.charts import loss_chart, losses_chart
from pronghorn.records.record import RunRecord
from pronghorn.records.report import warnings, write_report
from pronghorn.train.progress import ProgressCallback, duration, track
from support.run_records import HOSTILE, Page, record


def page(run: RunRecord, folder: Path) -> Page:
    return Page(write_report(run, folder).read_text(encoding="utf-8"))


def test_one_is_counted_as_one(tmp_path: Path) -> None:
    run = record(steps=1, heldout={"before": 3.0, "after": 2.0, "rows": 1})
    assert "over 1 row, nats" in page(run, tmp_path).text and "1 step, limited by" in page(run, tmp_path).text


def test_record_survives_its_file(tmp_path: Path) -> None:
    written = record()
    path = written.write(tmp_path / "new" / "folder")
    assert RunRecord.read(path) == RunRecord.read(path.parent) == written
    assert json.loads(path.read_text())["tokens_per_second"] == 4000
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "not valid JSON"), ("[]", "not 'pronghorn-run-v1'"), (None, "exist")]
)
def test_record_refuses_what_is_none(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match=problem):
        RunRecord.read(tmp_path / "run.json")


@pytest.mark.parametrize(("steps", "rate"), [(0, None), (1, 400), (2, 4000), (9, 4000)])
def test_speed_leaves_the_first_step_out_if_there_are_others(steps: int, rate: float | None) -> None:
    assert record(steps).tokens_per_second == rate


def test_page_holds_the_figures(tmp_path: Path) -> None:
    text = page(record(), tmp_path).text
    for figure in ("3.4567 → 2.3456", "−32.1%", "4,000 tokens/s", "96.7%", "97.1%", "3 min 05 s", "3.0 GiB"):
        assert figure in text
    for figure in ("1.2M parameters", "1,234", "99,000", "packed attention", "flash", "2.13.0", "train: x.jsonl"):
        assert figure in text
    assert "held-out before 3.457" in text and "held-out after 2.346" in text
    assert "Learning rate" in text and "Gradient norm" in text and "Peak memory · GiB so far" not in text


def test_the_page_of_a_run_that_trains_says_what_is_so_far(tmp_path: Path) -> None:
    """No loss after training is not no held-out data, and an answer that was not asked for yet is not an empty one."""
    before = {**record().heldout, "after": None}
    run = record(heldout=before, evaluations=[], samples=[{"prompt": "Who?", "before": "A cat.", "after": ""}])
    text = Page(write_report(run, tmp_path, refresh=30).read_text(encoding="utf-8")).text
    assert "the held-out loss was 3.4567 before" in text and "no held-out data" not in text
    assert "80 steps so far" in text and "limited by" not in text and "(not yet)" in text and "(nothing)" not in text
    text = page(record(heldout=before, evaluations=[{"step": 40, "loss": 2.5}]), tmp_path).text
    assert "3.4567 → 2.5000" in text


def test_a_run_without_packing_says_so(tmp_path: Path) -> None:
    text = page(record(recipe={"packing": {"enabled": False}}), tmp_path).text
    assert "packed rows would be 96.7% text" in text and "Rows filled, if packed" in text
    assert "of the rows is text" not in text and "of the rows is text" in page(record(), tmp_path).text


def test_page_warns_of_dropped_documents_and_draws_memory(tmp_path: Path) -> None:
    many = {**record().packing, "dropped_share": 0.02, "cut_share": 0.0}
    steps = [{**step, "peak_memory_gib": 1.5} for step in record().steps]
    measured = record(packing=many)
    measured.steps = steps
    text = page(measured, tmp_path).text
    assert "7 documents dropped (2.0%), 0 truncated (0.0%): see data.overflow" in text
    assert "Peak memory · GiB so far" in text
    assert "dropped (" not in page(record(packing={**many, "dropped_share": 0.01}), tmp_path).text


@pytest.mark.parametrize(("after", "rose"), [(3.5, True), (math.nan, True), (3.46, False), (2.0, False), (None, False)])
def test_a_held_out_loss_that_rose_is_told(after: float | None, rose: bool, tmp_path: Path) -> None:
    """And not one that stayed where it was, within a hundredth."""
    run = record(heldout={"before": 3.4567, "after": after, "rows": 16})
    assert [each.startswith("The held-out loss rose from 3.4567 to ") for each in warnings(run)] == [True] * rose
    assert ("The held-out loss rose" in page(run, tmp_path).text) is rose
    shown = io.StringIO()
    Console(file=shown, width=300).print(summary(run, tmp_path))
    assert ("The held-out loss rose" in shown.getvalue()) is rose


def test_page_renders_text_of_the_model_inert(tmp_path: Path) -> None:
    shown = page(record(model=HOSTILE, recipe={"a": HOSTILE}), tmp_path)
    assert shown.text.count(HOSTILE) >= 3
    assert not {"script", "img", "iframe", "object", "link"} & {tag for tag, _ in shown.tags}
    assert not [name for _, attrs in shown.tags for name in attrs if name.startswith("on")]


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    shown = page(record(), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "://" not in text and "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    for _, attrs in shown.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#")


def test_ids_of_the_page_are_unique_and_its_references_resolve(tmp_path: Path) -> None:
    shown = page(record(), tmp_path)
    ids = [attrs["id"] for _, attrs in shown.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    references = re.findall(r"(?:url\(|href=\")#([\w-]+)", (tmp_path / "report.html").read_text())
    assert references and set(references) <= set(ids)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("steps", [0, 1, 5, 400])
@pytest.mark.parametrize("heldout", [(None, None), (math.nan, 2.0), (2.0, 2.5)])
def test_page_of_any_run(tmp_path: Path, steps: int, heldout: tuple[float | None, float | None]) -> None:
    before, after = heldout
    held = {"before": before, "after": after, "rows": 1}
    write_report(record(steps, heldout=held, peak_memory_bytes=None, samples=[], paths=[]), tmp_path)


def test_summary_names_the_figures(tmp_path: Path) -> None:
    write_report(record(), tmp_path)
    console = Console(file=io.StringIO(), width=200)
    console.print(summary(record(), tmp_path))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for figure in ("3.4567 → 2.3456", "4,000 tokens/s", "96.7%", "3.0 GiB", "report.html", "packed attention: flash"):
        assert figure in text
    assert "Warning" not in text


def test_summary_has_one_line_of_paths_unless_asked(tmp_path: Path) -> None:
    paths = [{"part": f"part {n}", "path": "p", "why": "w"} for n in range(7)]
    packing = {**record().packing, "dropped_share": 0.5}

    def told(asked: bool) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(summary(record(paths=paths, packing=packing), tmp_path, asked))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert told(False).count("Path taken") == 1 and "part 0: p (and 6 more: --paths" in told(False)
    assert told(True).count("Path taken") == 7 and "part 6: p (w)" in told(True)
    assert "Warning" in told(False) and "7 documents dropped (50.0%)" in told(False)


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (59.97, "1 min 00 s"), (3599.6, "1 h 00 min")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("logging_steps", "lines"), [(1, 10), (7, 9), (50, 2)])
def test_progress_without_a_terminal_prints_some_ten_lines(logging_steps: int, lines: int) -> None:
    console = Console(file=io.StringIO(), width=200)
    callback = ProgressCallback(console)
    state = SimpleNamespace(is_world_process_zero=True, max_steps=100, global_step=0, log_history=[])
    callback.on_train_begin(None, state, None)
    for state.global_step in range(1, 101):
        if state.global_step % logging_steps == 0:
            callback.on_log(None, state, None, logs={"loss": 1.5, "tokens_per_second": 1234.0})
        callback.on_step_end(None, state, None)
    callback.on_train_end(None, state, None)
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(printed) == lines
    assert "100/100 · loss 1.5000 · 1,234 tokens/s" in printed[-1] or logging_steps == 7


def test_a_log_between_two_prints_no_line_twice() -> None:
    """An evaluation logs at 10, between 9 and 12: the tenth of the run is told once."""
    console = Console(file=io.StringIO(), width=200)
    callback = ProgressCallback(console)
    state = SimpleNamespace(is_world_process_zero=True, max_steps=100, global_step=0, log_history=[])
    callback.on_train_begin(None, state, None)
    for state.global_step in (3, 6, 9, 10, 12, 15, 18, 20, 21):
        callback.on_log(None, state, None, logs={"loss": 1.5})
    assert [line.split()[1] for line in console.file.getvalue().splitlines()] == ["10/100", "20/100"]  # type: ignore[attr-defined]


def test_progress_on_a_terminal_leaves_a_bar_and_the_cursor() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    callback = ProgressCallback(console)
    state = SimpleNamespace(is_world_process_zero=True, max_steps=3, global_step=0, log_history=[])
    callback.on_train_begin(None, state, None)
    state.global_step = 3
    callback.on_log(None, state, None, logs={"loss": 0.25})
    callback.close()
    callback.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/3" in text and "loss 0.2500" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_slow_steps_have_a_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich alone forgets steps that are older than half a minute."""
    callback = ProgressCallback(Console(file=io.StringIO(), width=120, force_terminal=True))
    state = SimpleNamespace(is_world_process_zero=True, max_steps=10, global_step=0, log_history=[])
    callback.on_train_begin(None, state, None)
    bar, now = callback._progress, 0.0
    assert bar is not None
    monkeypatch.setattr(bar, "get_time", lambda: now)
    for state.global_step in (1, 2, 3):
        now += 120.0
        callback.on_step_end(None, state, None)
    callback.close()
    assert bar.tasks[0].time_remaining == 7 * 120


@pytest.mark.parametrize(("minutes", "left"), [(None, "3:14:00"), (10, "0:04:00"), (1000, "3:14:00")])
def test_a_bar_shows_no_more_time_left_than_the_limit(
    minutes: float | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = ProgressCallback(Console(file=io.StringIO(), width=120, force_terminal=True), minutes)
    state = SimpleNamespace(is_world_process_zero=True, max_steps=100, global_step=0, log_history=[])
    callback.on_train_begin(None, state, None)
    bar, now = callback._progress, 0.0
    assert bar is not None
    monkeypatch.setattr(bar, "get_time", lambda: now)
    monkeypatch.setattr(bar.tasks[0], "_get_time", lambda: now)
    bar.reset(bar.tasks[0].id)
    for state.global_step in (1, 2, 3):
        now += 120.0
        callback.on_step_end(None, state, None)
    callback.close()
    assert left in callback.console.file.getvalue().splitlines()[-2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("total", [3, None])
def test_track_yields_everything(terminal: bool, total: int | None) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    assert list(track(iter("abc"), "Reading", total, console)) == ["a", "b", "c"]
    assert "Reading" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_loss_that_is_no_number_is_null_in_the_file(tmp_path: Path) -> None:
    path = record(heldout={"before": float("nan"), "after": float("inf"), "rows": 1}).write(tmp_path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["heldout"]["before"] is None


def test_a_result_that_isn_t_the_last_step_is_called_so(tmp_path: Path) -> None:
    said = "; the result is of step 30, where it was lowest"
    assert said in page(record(kept_step=30), tmp_path).text and said not in page(record(), tmp_path).text
    for draw in (loss_chart, lambda run: losses_chart([run])):
        ends = [draw(record(kept_step=step)) for step in (None, 80, 30)]
        assert ends[0] == ends[1] != ends[2]  # where the loss after training stands


def test_charts_are_drawn_whatever_the_user_s_matplotlib_is_set_to() -> None:
    import matplotlib

    plain = loss_chart(record())
    with matplotlib.rc_context({"text.usetex": True, "lines.linestyle": "--", "axes.xmargin": 0.3}):
        assert loss_chart(record()) == plain


def test_a_matplotlib_that_can_not_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(ConfigError, match=r"matplotlib, which draws reports, can't be imported \(.*report\.html=false"):
        loss_chart(record())


def test_evaluations_and_resumes_are_shown(tmp_path: Path) -> None:
    plain = page(record(), tmp_path)
    evaluations = [{"step": 20, "loss": 2.9}, {"step": 40, "loss": math.nan}, {"step": 60, "loss": 2.4}]
    shown = page(record(evaluations=evaluations, resumed_at=[30]), tmp_path)
    assert "taken up again at step 30" in shown.text and "taken up" not in plain.text
    assert len(shown.tags) > len(plain.tags)  # the points and the line in the chart


@pytest.mark.parametrize(("steps", "smoothed"), [(20, False), (80, True)])
def test_a_curve_is_called_smoothed_where_it_is(steps: int, smoothed: bool, tmp_path: Path) -> None:
    text = Page(write_report(record(steps), tmp_path).read_text()).text
    assert ("by step, smoothed, held-out marked" in text) == smoothed
    assert ("by step, held-out marked" in text) != smoothed
