"""`benchmarks.report`: the page's tables by a golden file, what is refused, and that the figures are up to date.

To renew the golden file: python tests/benchmarks/test_bench_report.py
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, report
from benchmarks.record import Result, Workload, read_results, write_results
from benchmarks.report import collect, markdown, replaced
from pronghorn.errors import ConfigError, DataError
from support import programs

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "bench-report.md"
MARKED = "before\n<!-- bench:step -->\nold\n<!-- /bench:step -->\nafter\n"
DEVICE, PARAMETERS = "NVIDIA Test", {"small": 10**9, "large": 8 * 10**9}


def result(
    candidate: str = "pronghorn", step: float = 100.0, shape: str = "small", recompute: str = "off", **changes: Any
) -> Result:
    """Return a green result of benchmarks.step on a GPU; steps of `step` - 1, `step` and `step` + 1 ms."""
    paired_with = {} if candidate == "pronghorn" else {"step_ratio": [step / 100, step / 100 - 0.01, step / 100 + 0.01]}
    values: dict[str, Any] = {
        "command": "python -m benchmarks.step --model small",
        "candidate": candidate,
        "workload": Workload(shape, "lora", 8192, "lognormal", 1.0, 0),
        "gate": {"green": True, "reasons": []},
        "timings_ms": {"step": [step + 1, step - 1, step]},
        "memory_bytes": {"resting": 2**30, "peak": int(step / 10 * 2**30)},
        "ceilings": {"matmul_tflops": 790.4},
        "extra": {
            "recompute": recompute,
            "rank": 16,
            "on_cpu": False,
            "notes": [],
            "paired_with": paired_with,
            "tokens_per_s": {"real": 8192e3 / step, "supervised": 8192e3 / step},
            "mfu": {"4N": 50 / step, "6N": 75 / step, "N": PARAMETERS.get(shape, 1)},
        },
        "commit": "abc1234",
        "versions": {"torch": "2.13.0"} | ({"unsloth": "2026.10.9"} if candidate == "unsloth" else {}),
        "device": DEVICE,
        "date": "2026-11-20T10:00:00+00:00",
    }
    return Result(**values | changes)


def failed(candidate: str, reason: str, **changes: Any) -> Result:
    """A result that the gate stopped; its figures are there to show that nobody shows them."""
    return result(candidate, 66.6, gate={"green": False, "reasons": [reason], "loss": 9.9}, **changes)


def on_cpu(candidate: str, step: float) -> Result:
    extra = {"recompute": "off", "rank": 16, "on_cpu": True, "tokens_per_s": {"real": 256e3 / step}}
    return result(candidate, step, "tiny", device="CPU (x86_64)", extra=extra, memory_bytes={}, ceilings={})


def op(candidate: str, forward: float, shape: str = "8192x4096 bfloat16", **changes: Any) -> Result:
    values: dict[str, Any] = {
        "command": "python -m benchmarks.ops",
        "workload": Workload(shape, "rms_norm", 8192, "one", 1.0, 0),
        "timings_ms": {"forward": [forward], "backward": [2 * forward], "step": [3 * forward]},
        "extra": {"on_cpu": False, "share_of_ceiling": {"forward": 0.05 / forward, "backward": 0.049 / forward}},
    }
    return result(candidate, **values | changes)


def a_bit_of_everything(folder: Path) -> Path:
    """Two models of which the larger comes first by name, two ways to recompute, a failure, a CPU, ops, others."""
    folder.mkdir(exist_ok=True)
    write_results([result(shape="large", step=400.0), result("unsloth", 440.0, "large")], folder / "a.json")
    leak = "documents are not isolated: changing one changes the others' loss by 0.1, allowed is 1e-05 <!-- | -->"
    write_results([result(), result("unsloth", 121.0), failed("hf", leak)], folder / "b.json")
    write_results(
        [result(step=130.0, recompute="on"), result("unsloth", 140.0, recompute="on", commit="def5678")],
        folder / "c.json",
    )
    write_results([on_cpu("pronghorn", 12.0), on_cpu("hf", 11.0)], folder / "cpu.json")
    missing = {"green": False, "reasons": ["not installed: pip install liger-kernel"]}
    ops = [op("pronghorn", 0.0512), op("torch", 0.25), op("liger", 9.0, gate=missing, timings_ms={}, extra={})]
    write_results([*ops, op("pronghorn", 0.03, "8191x1100 bfloat16")], folder / "ops.json")
    write_results([result(command="python -m benchmarks.packing")], folder / "packing.json")
    return folder


def tables(folder: Path) -> str:
    table, _ = collect([folder])
    return "\n\n".join(markdown(table, kind) for kind in ("step", "ops")) + "\n"


def invoke(*arguments: object) -> Any:
    return programs.invoke(report, *arguments)


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(MARKED + "<!-- bench:ops -->\n<!-- /bench:ops -->\n")
    return path


# --- tables


def test_tables_are_the_golden_file(tmp_path: Path) -> None:
    assert tables(a_bit_of_everything(tmp_path / "results")) == GOLDEN.read_text(encoding="utf-8")


def test_figures_of_a_failed_candidate_are_withheld(tmp_path: Path) -> None:
    write_results([result(), failed("hf", "loss is off")], tmp_path / "a.json")
    text = markdown(collect([tmp_path])[0], "step")
    assert "| failed |" in text and "hf: failed, figures withheld: loss is off (lora small)" in text
    assert "66.6" not in text and "6.7" not in text and "100.0, 10.0 GiB" in text


def test_results_that_were_not_timed_say_so(tmp_path: Path) -> None:
    write_results(
        [result(), result("hf", timings_ms={}), result("liger", timings_ms={"step": []})], tmp_path / "a.json"
    )
    row = next(line for line in markdown(collect([tmp_path])[0], "step").splitlines() if line.startswith("| small"))
    assert row.count("not timed") == 2


def test_the_newest_of_two_results_wins_and_says_so(tmp_path: Path) -> None:
    write_results([result(step=90.0, date="2026-11-20T12:00:00+02:00")], tmp_path / "a.json")
    write_results([result(step=80.0, date="2026-11-20T11:00:00+00:00")], tmp_path / "b.json")  # an hour later
    write_results([result(step=70.0, date="2026-11-20T09:59:59+00:00")], tmp_path / "c.json")
    table, notes = collect([tmp_path])
    assert list(table["step"]) == [80.0]
    assert len(notes) == 2 and all("pronghorn: measured twice, the newer counts" in note for note in notes)
    assert "2026-11-20 11:00 in b.json, not 2026-11-20 10:00 in a.json" in notes[0]


def test_a_row_from_two_runs_says_so(tmp_path: Path) -> None:
    write_results([result(), result("unsloth", 110.0)], tmp_path / "a.json")
    write_results([result(step=90.0, date="2026-11-21")], tmp_path / "b.json")
    assert "small: from b.json and a.json; ratios are each file's own." in markdown(collect([tmp_path])[0], "step")


def test_ops_of_two_runs_have_no_ratio(tmp_path: Path) -> None:
    """Kernels by turns in one run are compared; Pronghorn's of today with another's of last week is not."""
    write_results([op("pronghorn", 0.1), op("torch", 0.4), op("liger", 0.2)], tmp_path / "a.json")
    write_results([op("pronghorn", 0.05, date="2026-11-21"), op("torch", 0.3, date="2026-11-21")], tmp_path / "b.json")
    (row,) = [line for line in markdown(collect([tmp_path])[0], "ops").splitlines() if "rms_norm" in line[:12]]
    assert "| 0.9, 6.00 ×" in row and "| 0.6 (" in row and row.count("×") == 1


@pytest.mark.parametrize(
    "change",
    [{"recompute": "on"}, {"workload": Workload("small", "full", 8192, "lognormal", 1.0, 0)},
     {"workload": Workload("small", "lora", 8192, "lognormal", 0.3, 0)}, {"device": "another"}],
)  # fmt: skip
def test_other_workloads_are_other_cases(tmp_path: Path, change: dict[str, Any]) -> None:
    write_results([result(), result(**change)], tmp_path / "a.json")
    table, notes = collect([tmp_path])
    assert table["case"].nunique() == 2 and not notes


# --- bad input


def test_bad_results(tmp_path: Path) -> None:
    file = tmp_path / "a.json"

    def refused(match: str, kind: type[Exception] = DataError) -> None:
        for path in (file, tmp_path):
            with pytest.raises(kind, match=match):
                collect([path])

    with pytest.raises(ConfigError, match=r"nowhere is neither a file nor a folder"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(DataError, match=r"no results of benchmarks\.step or \.ops"):
        collect([tmp_path])  # an empty folder
    for content in ("[]", json.dumps([asdict(result(command="python -m benchmarks.packing"))])):
        file.write_text(content)
        refused("no results of benchmarks.step or .ops")
    file.write_text("{")
    refused("is not JSON")
    file.write_text(json.dumps([asdict(result()) | {"schema": "other"}]))
    refused("has results of schema other")
    file.write_text(json.dumps([asdict(result()) | {"surprise": 1}]))
    refused("is damaged")
    file.write_text(json.dumps([{name: x for name, x in asdict(result()).items() if name != "device"}]))
    refused("is damaged .'device'.")  # it would be this machine's
    write_results([result(date="yesterday"), result(date="today")], file)
    refused("date 'yesterday' is none")


@pytest.mark.parametrize(
    "text",
    ["no markers", "<!-- bench:step -->", "<!-- /bench:step -->\n<!-- bench:step -->", MARKED + MARKED,
     MARKED.replace("old", "<!-- bench:step -->")],
)  # fmt: skip
def test_markers_that_are_missing_or_unbalanced(text: str) -> None:
    with pytest.raises(ConfigError, match=r"README.md: <!-- bench:step --> is there \d times.*: write each once"):
        replaced(text, "step", "new", Path("README.md"))


def test_text_around_the_markers_stays() -> None:
    new = replaced(MARKED, "step", "new", Path("README.md"))
    assert new == MARKED.replace("old", "new") and replaced(new, "step", "new", Path("README.md")) == new
    assert replaced(MARKED, "ops", "", Path("README.md")) == MARKED
    assert replaced(MARKED, "step", "", Path("README.md")) == MARKED.replace("old\n", "")


# --- the command


def test_write_then_check_then_out_of_date(tmp_path: Path, readme: Path) -> None:
    pytest.importorskip("matplotlib")
    results, plots = a_bit_of_everything(tmp_path / "results"), tmp_path / "docs" / "plots"
    command = (results, "--page", readme, "--plots", plots)
    done = invoke(*command, "--check")
    assert done.exit_code == 1 and f"out of date: {readme}" in done.stdout and not plots.exists()
    assert "remedy: python -m benchmarks.report" in done.stderr and readme.read_text().startswith(MARKED)

    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert "packing.json: nothing of benchmarks.step or .ops, left out" in done.stdout
    text = readme.read_text()
    linked = set(re.findall(r"docs/plots/[\w.-]+\.svg", text))
    assert linked == {f"docs/plots/{path.name}" for path in plots.iterdir()} and len(linked) == 4
    assert text.startswith("before\n<!-- bench:step -->\n**CPU (x86_64): says that it works, not how fast a GPU is**")

    figure = plots / "step-nvidia-test.svg"
    drawn = figure.read_bytes()
    assert b"<dc:date>" not in drawn
    figure.write_bytes(drawn + b" ")
    (plots / "somebody's.svg").write_text("<svg/>")
    (results / "a.json").unlink()  # the larger model
    done = invoke(*command, "--check")
    assert done.exit_code == 1 and f"out of date: {figure}" in done.stdout
    assert f"no longer made: {plots / 'memory-time-nvidia-test-large.svg'}" in done.stdout
    assert invoke(*command).exit_code == 0
    assert {path.name for path in plots.iterdir()} == {
        "step-nvidia-test.svg", "step-cpu-x86-64.svg", "memory-time-nvidia-test-small.svg", "somebody's.svg"
    }  # fmt: skip


def test_the_command_refuses_in_two_lines(tmp_path: Path, readme: Path) -> None:
    results = a_bit_of_everything(tmp_path / "results")
    readme.write_text("no markers")
    for command, problem in (
        ((tmp_path / "nowhere",), "nowhere is neither a file"),
        ((results, "--page", readme, "--plots", tmp_path / "plots"), "<!-- bench:step --> is there 0 times"),
        ((results, "--page", tmp_path / "other.md"), "other.md is not a file"),
    ):
        done = invoke(*command)
        assert done.exit_code == 1 and problem in done.stderr and "remedy:" in done.stderr
        assert "Traceback" not in done.output
    assert readme.read_text() == "no markers" and not (tmp_path / "plots").exists()


def test_a_failed_candidate_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import draw

    drawn = []
    for others in ([], [failed("hf", "loss is off")], [result("hf")]):
        write_results([result(), *others], tmp_path / "a.json")
        drawn.append(draw(collect([tmp_path])[0]))
    alone, beside_failed, beside_sound = drawn
    assert set(alone) == {"step-nvidia-test.svg", "memory-time-nvidia-test-small.svg"}
    assert alone == beside_failed
    assert all(alone[name] != beside_sound[name] for name in alone)


def test_figures_with_everything_withheld(tmp_path: Path, readme: Path) -> None:
    pytest.importorskip("matplotlib")
    write_results([failed("pronghorn", "loss is off")], tmp_path / "a.json")
    done = invoke(tmp_path / "a.json", "--page", readme, "--plots", tmp_path / "plots")
    assert done.exit_code == 0 and not (tmp_path / "plots").exists()
    assert "| failed |" in readme.read_text() and "66.6" not in readme.read_text()
    assert "\n\n\n" not in readme.read_text()


def test_this_page_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its figures only the names, unless the matplotlib is the one they were drawn by."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    done = invoke("--check")
    pinned = re.search(r"matplotlib==(\S+)", (ROOT / "constraints.txt").read_text())
    if pinned and matplotlib.__version__ == pinned.group(1):
        assert done.exit_code == 0, done.output + "\nrun: python -m benchmarks.report"
    else:
        assert "out of date: docs/benchmarks.md" not in done.stdout and "no longer made" not in done.stdout


def test_the_summary_s_figures_are_the_page_s() -> None:
    """It is written by hand: each of its figures stands once more below."""
    summary, page = (ROOT / "docs/benchmarks.md").read_text().split("Every figure is in", 1)
    figures = re.findall(r"\d+\.\d+", summary)
    assert len(figures) > 8
    assert [each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\d)", page)] == []


def test_the_figure_of_limits_is_what_the_results_say(tmp_path: Path) -> None:
    """Drawn by `memory_time.py --draw`, of the first file's workload; it isn't the report's to remove."""
    matplotlib = pytest.importorskip("matplotlib")
    from benchmarks.memory_time import draw

    ways = ("memory-time-llama-3.1-8b", "step-llama-3.1-8b", "step-llama-3.1-8b-offload", "step-llama-3.1-8b-recompute")
    files = [ROOT / f"benchmarks/results/{name}.json" for name in ways]
    red = replace(read_results(files[0])[1], gate={"green": False})
    write_results([red], tmp_path / "red.json")
    for number, others in enumerate(
        ([], [ROOT / "benchmarks/results/step-llama-3.1-8b-qlora.json", tmp_path / "red.json"])
    ):
        draw([*files, *others], tmp_path / f"{number}.svg")
    drawn = (tmp_path / "0.svg").read_bytes()
    assert drawn == (tmp_path / "1.svg").read_bytes() and plots.STAMP.encode() not in drawn
    if f"matplotlib=={matplotlib.__version__}" in (ROOT / "constraints.txt").read_text():
        assert drawn == (ROOT / "docs/plots/limits-llama-3.1-8b.svg").read_bytes()


def test_switches_of_pronghorn_are_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "_memory_time", lambda title, points, colours: drawn.append(points))
    monkeypatch.setattr(plots, "_svg", lambda *_: b"")
    pytest.importorskip("matplotlib")
    extra = {"pronghorn": "on", "pronghorn, layers=stock": "on", "pronghorn, auto": "auto"}
    extra |= {"pronghorn, auto, 8 GiB": "auto, 8 GiB", "unsloth, on": "on"}
    plots.memory_time(
        "title",
        [result(name, extra={"recompute": mode}, memory_bytes={"peak": 2**30}) for name, mode in extra.items()],
    )
    assert list(dict.fromkeys(drawn[0]["line"])) == [
        "pronghorn", "pronghorn, layers=stock", "pronghorn, limited", "unsloth"
    ]  # fmt: skip


def test_results_of_the_command_that_the_package_had_are_reported(tmp_path: Path) -> None:
    write_results([result(command="python __main__.py bench step --model small")], tmp_path / "a.json")
    assert list(collect([tmp_path])[0]["kind"]) == ["step"]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(tables(a_bit_of_everything(Path(scratch))), encoding="utf-8")
