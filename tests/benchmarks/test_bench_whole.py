"""Programs that measure whole runs, tried on the CPU with tiny shapes: parts, ablation, end to end, records, guard."""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import ablation, end_to_end, guard, longest_row, parts, probe_cost, records, trainer_step
from benchmarks.candidates import trainers
from benchmarks.record import Result, Workload, unfinished, write_results
from pronghorn.diagnose.shapes import SHAPES, shape_of, write_checkpoint
from pronghorn.errors import ConfigError, DataError
from pronghorn.memory.plan import Plan, Policy
from support import programs


class Kept(dict[str, Any]):
    """In the place of `record.Facts`."""

    kept = 0

    def keep(self) -> None:
        self.kept += 1


def given(out: Path | None, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"out": out, "only": ["a", "b", "c"], "again": False, "limit": 60, **more})


# --- parts


def test_parts_that_were_measured_are_left_alone_and_failed_ones_tried_again(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    unfinished(out).write_text(json.dumps({"parts": {"a": {"n": 1}, "b": {"error": "cut off"}}}))
    ran: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        ran.append(name)
        return {"n": 2, "part_s": 0.0}

    facts = Kept()
    done = parts.run_parts(facts, given(out), "", measure)
    assert ran == ["b", "c"] and done["a"] == {"n": 1} and facts["parts"] is done and facts.kept == 2
    parts.run_parts(Kept(), given(out, again=True, only=["a"]), "", measure)
    assert ran[-1] == "a"


@pytest.mark.parametrize(
    ("code", "limit", "said"),
    [
        ("import sys; print('why'); sys.exit(3)", 60, "ended with code 3"),
        ("import time; time.sleep(60)", 1, "than 1 s"),
    ],
)
def test_a_part_that_fails_or_takes_too_long_tells_so_with_what_it_had(code: str, limit: int, said: str) -> None:
    def command(name: str, arguments: Path, result: Path) -> list[str]:
        assert json.loads(arguments.read_text())["only"] == ["a", "b", "c"]
        result.write_text('{"half": 1}')
        return [sys.executable, "-c", code]

    found = parts.one("a", given(None, limit=limit), command)
    assert said in found["error"] and found["half"] == 1 and found["output"] == (["why"] if limit == 60 else [])


def test_a_part_that_was_ended_gets_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "parts.json"
    out.write_text(json.dumps({"parts": {"a": {"half": 1, "error": "cut off"}}}))
    code = "import json, sys; a, b = sys.argv[1:]; json.dump({'before': json.load(open(a))['before']}, open(b, 'w'))"
    monkeypatch.setattr(parts, "command_of", lambda _, __, *files: [sys.executable, "-c", code, *map(str, files)])
    done = parts.run_parts(Kept(), given(out, only=["a", "b"]), "")
    assert done["a"]["before"] == {"half": 1, "error": "cut off"} and done["b"]["before"] == {}


def test_a_part_goes_on_where_the_whole_command_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "parts.json"
    out.write_text(json.dumps({"parts": {"a": {"half": 1, "error": "cut off"}}}))
    had: list[dict[str, Any]] = []
    ends: list[BaseException | None] = [SystemExit(143), SystemExit(143), None]

    def ran(files: list[str], **_: Any) -> SimpleNamespace:
        """In the place of the part's process; the first two times this process is ended, too."""
        had.append(json.loads(Path(files[0]).read_text())["before"])
        if len(had) == 1:  # the second ends before it has anything
            Path(files[1]).write_text('{"half": 1, "more": 2}')
        if (end := ends.pop(0)) is not None:
            raise end
        Path(files[1]).write_text('{"whole": 3}')
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(parts, "command_of", lambda _, __, *files: [str(file) for file in files])
    monkeypatch.setattr(parts.subprocess, "run", ran)
    for _ in range(2):
        with pytest.raises(SystemExit):
            parts.run_parts(Kept(), given(out, only=["a"]), "")
    done = parts.run_parts(Kept(), given(out, only=["a"]), "")
    assert had == [{"half": 1, "error": "cut off"}, *[{"half": 1, "more": 2}] * 2] and done["a"]["whole"] == 3
    assert [file.name for file in tmp_path.iterdir()] == [out.name]
    parts.part_file(out, "a").write_text('{"old": 1}')
    parts.run_parts(Kept(), given(out, only=["a"], again=True), "", lambda _: {"part_s": 0.0})
    assert not parts.part_file(out, "a").exists()


# --- ablation


def test_an_ablation_that_was_ended_goes_on_with_the_variants_it_lacks() -> None:
    now = {"shape": "x", "steps": 100, "tokens": 8192}
    before = {**now, "variants": {"none": {"losses": [1.0]}, "all": {"error": "out of memory"}}, "error": "cut off"}
    assert ablation.measured_before(before, now) == {"variants": {"none": {"losses": [1.0]}}}
    with_terms = ablation.measured_before({**before, "predicted": {"s_ms": 1.0}}, now)
    assert with_terms["predicted"] == {"s_ms": 1.0}
    assert ablation.measured_before(before, {**now, "steps": 40}) == ablation.measured_before({}, now) == {}


def test_variants_have_the_changes_that_a_case_can_have() -> None:
    def names(case: str, routed: bool = False) -> dict[str, set[str]]:
        return {name: set(changes) for name, changes in ablation.variants_of(ablation.CASES[case], routed).items()}

    once = {"metadata"}
    assert names("qwen3-0.6b") == {"none": set(), "all": once, "none, again": set(), "fused": once}
    both = {"metadata", "buffers"}
    assert names("qwen3-14b-nf4") == {
        **{"none": set(), "metadata": once, "buffers": {"buffers"}},
        **{"all": both, "none, again": set(), "fused": both},
    }
    assert names("gpt-oss-20b", routed=True)["all"] == {"metadata", "grouping"}


def test_losses_that_do_not_coincide_withhold_the_times() -> None:
    def variants(off: float) -> dict[str, Any]:
        one = {"step_ms": 10.0, "peak_bytes": 0, "changes": []}
        return {"none": {**one, "losses": [4.0, 3.0]}, "all": {**one, "losses": [4.0, 3.0 + off]}}

    assert ablation.judge(variants(0.01))["green"] and not ablation.judge(variants(0.03))["green"]
    assert not ablation.judge({"none": {"error": "out of memory"}})["green"]
    found = {"variants": variants(0.03), "gate": ablation.judge(variants(0.03))}
    assert [row["step, ms"] for row in ablation.rows_of("x", found)] == ["withheld: losses differ"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tiny", "tiny-moe"])
def test_the_ablation_runs(case: str, tmp_path: Path) -> None:
    out = tmp_path / "ablation.json"
    done = programs.invoke(ablation, "--only", case, "--tokens", 128, "--steps", 3, "--out", out)
    [found] = json.loads(out.read_text())["parts"].values()
    assert done.exit_code == 0 and found["gate"]["green"], found
    alone = "buffers" if case == "tiny" else "grouping"
    assert list(found["variants"]) == ["none", "metadata", alone, "all", "none, again", "fused"]
    assert all(len(one["losses"]) == 3 for one in found["variants"].values())
    assert found["predicted"]["metadata_ms"] == (found["layers"] - 1) * found["predicted"]["s_ms"]


# --- the trainer's step


def test_a_trainer_s_step_beside_the_bare_one(tmp_path: Path) -> None:
    out = tmp_path / "trainer-step.json"
    done = programs.invoke(trainer_step, "--only", "tiny", "--tokens", 128, "--pairs", 2, "--out", out)
    [found] = json.loads(out.read_text())["parts"].values()
    assert done.exit_code == 0 and found["gate"]["green"], found
    assert len(found["trainer_ms"]) == len(found["bare_ms"]) == 2
    ratios = [trained / bare for trained, bare in zip(found["trainer_ms"], found["bare_ms"], strict=True)]
    assert found["ratio"][1:] == pytest.approx([min(ratios), max(ratios)]) and "packed attention" in found["paths"][0]
    found["gate"]["green"] = False
    assert trainer_step.row_of("tiny", found)["trainer over bare"].startswith("withheld")


# --- records and the longest row


def test_a_record_is_met_where_it_trains_and_is_fast_enough() -> None:
    found = {"gate": {"green": True}, "least": 100, "tokens_per_s": 100.0}
    assert records.is_met(found) and records.is_met({"gate": {"green": True}, "least": 100})
    assert not records.is_met(found | {"tokens_per_s": 99.0}) and not records.is_met(found | {"gate": {"green": False}})
    assert not records.is_met(found | {"error": "took longer"})


def check_record(name: str, out: Path) -> None:
    if "nf4" in name:
        pytest.importorskip("bitsandbytes")
    done = programs.invoke(records, "--only", name, "--tokens", 128, "--out", out)
    [found] = json.loads(out.read_text())["parts"].values()
    assert done.exit_code == 0 and found["gate"]["green"] and found["gate"]["trained"] > 0, found


@pytest.mark.parametrize("name", ["tiny-nf4", "tiny-fp8"])
def test_a_record_is_made_without_a_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in this process, which spares it the imports."""
    monkeypatch.setattr(parts, "one", lambda name, given, *_: records.part(name, given) | {"part_s": 0.0})
    check_record(name, tmp_path / "records.json")


def test_a_record_that_runs_out_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trainer does it, and the result says so."""
    from pronghorn.models import auto_plan

    judge, plans = records.judge, [Plan((Policy.RECOMPUTE_LAYER,) * 2)]

    def runs_out_first(model: Any, batch: Any) -> Any:
        if plans:
            raise torch.OutOfMemoryError
        return judge(model, batch)

    monkeypatch.setattr(records, "judge", runs_out_first)
    monkeypatch.setattr(auto_plan, "smaller_plan", lambda *given, **named: plans.pop())
    found = records.part("tiny", given(None, tokens=128))
    assert found["gate"]["green"] and found["ran_out_under"] == [{}]
    assert found["policies"] == [str(Policy.RECOMPUTE_LAYER)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-nf4", "tiny-moe", "tiny-published-fp8", "tiny-published-nvfp4"])
def test_records_are_made_by_processes_of_their_own(name: str, tmp_path: Path) -> None:
    check_record(name, tmp_path / "records.json")


def test_records_are_shapes_that_exist() -> None:
    assert all(shape_of(record.shape) for record in records.RECORDS.values())
    assert all(shape_of(case.shape) for case in ablation.CASES.values())


def test_a_row_of_a_length_that_was_asked_for_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    from pronghorn.models import auto_plan
    from pronghorn.train.weightless import skeleton

    tried: list[Any] = []

    class Trains(Executor):
        """In the place of a process with a GPU."""

        def submit(self, fn: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
            tried.append(arguments[1:])
            done: Future[Any] = Future()
            done.set_result((1, 1.0))
            return done

    monkeypatch.setattr(longest_row, "ProcessPoolExecutor", lambda *_: Trains())
    fields = shape_of("Llama-3.1-8B")
    assert fields is not None
    shape = auto_plan.dims_of(skeleton(AutoConfig.for_model(**fields)))
    setting = longest_row.Setting(fields, 80 * 2**30, 8192, 2, tokens=524_288)
    found = longest_row.meet(shape, "tiled", setting)
    assert tried == [(longest_row.POLICIES["tiled"], 524_288)] and found["met"] and found["longest_tokens"] == 524_288
    assert longest_row.longest(shape, longest_row.POLICIES["tiled"], setting.budget) > 524_288
    assert longest_row.longest(shape, longest_row.POLICIES["offload"], setting.budget) > 344_064


# --- end to end


@pytest.mark.slow
def test_whole_trainings_are_timed_and_judged_and_who_is_missing_is_skipped(tmp_path: Path) -> None:
    write_checkpoint(SHAPES["tiny"], tmp_path / "model", seed=0)
    rows = [{"question": f"how many are {i}?", "answer": f"they are {i} " * 8} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ["--model", tmp_path / "model", "--train", tmp_path / "rows.jsonl", "--held-out", tmp_path / "rows.jsonl"]
    asked += ["--tokens", 256, "--held-out-rows", 2, "--only", "trl", "trl-nf4", "unsloth", "pronghorn"]
    done = programs.invoke(end_to_end, *asked, "--out", tmp_path / "out.json")
    facts = json.loads((tmp_path / "out.json").read_text())
    assert done.exit_code == 0, facts
    assert facts["skipped"] == ["unsloth: unsloth isn't installed"]
    assert list(facts["parts"]) == ["trl", "trl-nf4", "pronghorn"]
    for found in facts["parts"].values():
        marks = list(found["marks_s"].values())
        assert list(found["marks_s"]) == ["imported", "loaded", "first step", "trained", "saved"]
        assert marks[0] > 0 and marks == sorted(marks) and found["wall_s"] == marks[-1] <= found["part_s"]
        assert 0 < found["held_out_loss"] < 10 and found["steps"] >= 1
    assert "unsloth" not in done.stdout.split("held-out loss")[1]


@pytest.mark.slow
def test_pairs_are_trained_on_by_dpo(tmp_path: Path) -> None:
    write_checkpoint(SHAPES["tiny"], tmp_path / "model", seed=0)
    rows = [{"instruction": f"count to {i}", "input": "", "chosen": "one " * i, "rejected": "no"} for i in range(1, 13)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    asked = ["--model", tmp_path / "model", "--pairs", tmp_path / "pairs.json", "--tokens", 256, "--steps", 12]
    done = programs.invoke(end_to_end, *asked, "--out", tmp_path / "out.json", "--only", "dpo-trl", "dpo-pronghorn")
    facts = json.loads((tmp_path / "out.json").read_text())
    assert done.exit_code == 0, facts
    counts = [len(f"count to {i}\n") * 2 + len("one " * i) + len("no") for i in range(1, 13)]
    assert facts["mean_tokens"] == sum(counts) / len(counts), "tokens are bytes"
    plain, ours = (facts["parts"][name] for name in ("dpo-trl", "dpo-pronghorn"))
    assert plain["steps"] == ours["steps"] == 12 and "paths" in ours
    # no difference yet: log 2; then the same, as adapters begin alike
    assert plain["losses"][0] == ours["losses"][0] == pytest.approx(0.6931, abs=1e-4)
    assert plain["losses"][1] == pytest.approx(ours["losses"][1], abs=1e-5) != pytest.approx(0.6931, abs=1e-4)
    none = programs.invoke(end_to_end, *asked, "--only", "trl")
    assert none.exit_code == 1 and "--pairs" in none.stderr


def test_rows_are_read_from_questions_and_instructions(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = [{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "d", "input": "", "output": ""}]
    file.write_text(json.dumps(rows))
    assert trainers.read_rows(str(file)) == [{"prompt": "a\nb\n", "completion": "c"}]


def test_random_text_has_the_lengths_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[7, 40, 3]")
    rows = trainers.read_rows(str(end_to_end.rows_of(tmp_path / "lengths.json", tmp_path)))
    assert [len(row["prompt"] + row["completion"]) for row in rows] == [8, 41, 4]  # a line ends after the prompt
    assert trainers.targets({"targets": ["all-linear"]}) == "all-linear"
    assert trainers.targets({"targets": ["in_proj", "x_proj"]}) == ["in_proj", "x_proj"]


def test_data_that_are_missing_are_told_before_anything_runs(tmp_path: Path) -> None:
    done = programs.invoke(end_to_end, "--model", "tiny", "--train", tmp_path / "nothing.jsonl")
    assert done.exit_code == 1 and "nothing.jsonl is not there" in done.stderr


# --- the probe's cost


@pytest.mark.parametrize("most", [60.0, 0.0])
def test_probes_are_timed_and_a_slow_one_is_told(most: float, tmp_path: Path) -> None:
    done = programs.invoke(probe_cost, "--tiny", "--most", most, "--out", tmp_path / "probe.json")
    found = json.loads((tmp_path / "probe.json").read_text())
    assert done.exit_code == (most == 0.0), done.output
    assert found["clean"] and len(found["seconds"]) == 3 and min(found["seconds"]) > 0


@pytest.mark.parametrize("most", [60.0, -60.0])
def test_what_a_probe_adds_where_nothing_was_compiled(
    most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = set()

    def here(name: str, given: Any, command: Any) -> dict[str, Any]:
        folders.add(os.environ["TRITON_CACHE_DIR"])
        assert not Path(os.environ["TRITON_CACHE_DIR"]).exists()
        return probe_cost.part(name, given) | {"part_s": 0.0}

    for tool in ("TRITON", "TORCHINDUCTOR"):
        monkeypatch.setenv(f"{tool}_CACHE_DIR", "")
    monkeypatch.setattr(parts, "one", here)
    monkeypatch.setattr(probe_cost, "TOKENS", 64)
    done = programs.invoke(probe_cost, "--cold", "--tiny", "--most", most, "--out", tmp_path / "probe.json")
    found = json.loads((tmp_path / "probe.json").read_text())
    assert done.exit_code == (most < 0), done.output
    assert len(folders) == 4 and len(found["later_s"]) == 2
    probed = found["parts"]["probe and first step"]
    assert probed["clean"] and probed["first step ended"] > probed["probe"] > 0


# --- the guard


def result(candidate: str, step: float, peak: int = 100, green: bool = True, **more: Any) -> Result:
    counts = {"launches": more.get("launches", 1000)}
    workload = Workload("tiny", "lora", 256, "lognormal", more.get("share", 1.0), 0)
    times, date = {"step": [step] * 4}, more.get("date", "2026-01-01")
    return Result("", candidate, workload, {"green": green}, times, {"peak": peak}, counts, date=date)


def test_the_guard_compares_ratios_and_bytes_with_what_was_committed(tmp_path: Path) -> None:
    write_results([result("pronghorn", 10.0, 120), result("hf", 25.0)], tmp_path / "step-tiny.json")
    write_results([result("pronghorn", 9.0, 100, date="2026-01-03")], tmp_path / "step-tiny-once.json")
    write_results([result("pronghorn", 9.0, 999, share=0.3, date="2026-01-04")], tmp_path / "step-tiny-30.json")
    before = guard.committed("tiny", tmp_path)
    assert before["ratio"] == 2.5 and before["peaks"] == [(1000, 120), (1000, 100)]

    def worse(ours: float, plain: float, peak: int = 100, green: bool = True) -> list[str]:
        now = guard.figures([result("pronghorn", ours, peak, green), result("hf", plain)])
        return guard.compare(now, before, slower=0.07, larger=0.03)

    assert worse(20.0, 50.0) == worse(10.0, 23.5, 102) == []  # a host half as fast, a little noise
    assert worse(10.0, 23.0) == ["2.30 times the plain step; 2.50 was committed"]
    assert "GiB" in worse(10.0, 25.0, 104)[0] and "gate is red" in worse(5.0, 25.0, green=False)[0]
    with pytest.raises(DataError, match="measure pronghorn and hf in one run"):
        guard.figures([result("pronghorn", 1.0)])
    with pytest.raises(ConfigError, match=r"step-other\.json isn't in"):
        guard.committed("other", tmp_path)


def test_the_guard_s_models_have_committed_figures() -> None:
    for model in guard.MODELS:
        found = guard.committed(model, guard.RESULTS)
        assert found["green"] and found["ratio"] > 1.5
        assert min(peak for _, peak in found["peaks"]) > 0 and len({count for count, _ in found["peaks"]}) > 1


def test_the_guard_compares_memory_with_a_run_that_launches_as_much(tmp_path: Path) -> None:
    write_results([result("pronghorn", 10.0, 120), result("hf", 25.0)], tmp_path / "step-tiny.json")
    (tmp_path / "reports").mkdir()
    graph = result("pronghorn", 9.0, 100, launches=80, date="2026-01-03")
    write_results([graph], tmp_path / "reports" / "step-tiny-graph.json")
    before = guard.committed("tiny", tmp_path)

    def worse(peak: int, launches: int) -> list[str]:
        now = guard.figures([result("pronghorn", 10.0, peak, launches=launches), result("hf", 25.0)])
        return guard.compare(now, before, slower=0.07, larger=0.03)

    assert worse(120, 790) == worse(100, 106) == worse(100, 300) == []  # the last is like neither: the newest counts
    assert worse(125, 790) and worse(110, 106) and worse(110, 300)


@pytest.mark.parametrize("slowed", [False, True])
def test_the_guard_ends_with_code_1_where_a_step_got_slower(
    slowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_results([result("pronghorn", 10.0), result("hf", 25.0)], tmp_path / "step-tiny.json")

    def ran(command: list[str], **_: Any) -> None:
        out = Path(command[command.index("--out") + 1])
        write_results([result("pronghorn", 20.0 if slowed else 10.0), result("hf", 25.0)], out)

    monkeypatch.setattr(guard.subprocess, "run", ran)
    done = programs.invoke(guard, "--models", "tiny", "--results", tmp_path, "--out", tmp_path / "guard.json")
    assert done.exit_code == slowed, done.output
    assert bool(json.loads((tmp_path / "guard.json").read_text())["models"]["tiny"]["worse"]) == slowed
