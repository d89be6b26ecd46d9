"""benchmarks/Makefile: every result has its target, every target a command that exists; one command a GPU."""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import subprocess
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import AutoConfig

from benchmarks.record import read_results
from benchmarks.step import StepOptions, candidates_of, spec_of
from pronghorn.cli.main import app
from pronghorn.diagnose.shapes import shape_of
from pronghorn.models import auto_plan
from pronghorn.train.weightless import skeleton
from support import programs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
EARLIER = {
    "trainer-step-waiting": "trainer-step",
    "end-to-end-qwen3-0.6b-non-blocking": "end-to-end-qwen3-0.6b",
    "load-qwen3-14b-by-one-thread": "load-qwen3-14b",
    "load-qwen3-30b-a3b-8-warm": "load-qwen3-14b",
    "load-qwen3-30b-a3b-8-16-bits": "load-llama-3.1-8b",
    "load-buffers": "load-qwen3-14b",
    "end-to-end-llama-3.1-8b-read-by-threads": "end-to-end-llama-3.1-8b",
    "end-to-end-qwen3-14b-nf4-read-by-threads": "end-to-end-qwen3-14b-nf4",
    "end-to-end-qwen3-14b-nf4-by-torchs-threads": "end-to-end-qwen3-14b-nf4",
    "load-qwen3-14b-by-torchs-threads": "load-qwen3-14b",
    "end-to-end-smollm2-instructions-fair-rows": "end-to-end-smollm2-instructions",
    "step-qwen3-0.6b-device-time": "step-qwen3-0.6b",
    "end-to-end-llama-3.1-8b-four-at-a-time": "end-to-end-llama-3.1-8b",
    "end-to-end-llama-3.1-8b-first-on-a-machine": "end-to-end-llama-3.1-8b",
    "end-to-end-qwen3-14b-nf4-four-at-a-time": "end-to-end-qwen3-14b-nf4",
    "end-to-end-qwen3-14b-nf4-first-on-a-machine": "end-to-end-qwen3-14b-nf4",
    "end-to-end-qwen3-0.6b-four-at-a-time": "end-to-end-qwen3-0.6b",
    "end-to-end-smollm2-precisions": "end-to-end-smollm2",
    "end-to-end-smollm2-trl": "end-to-end-smollm2",
    "end-to-end-smollm2-instructions-unsloth": "end-to-end-smollm2-instructions",
    "end-to-end-gpt-oss-20b-trl": "end-to-end-gpt-oss-20b",
    "profile-qwen3-0.6b": "pronghorn profile, of a recipe with that checkpoint",
    "end-to-end-llama-3.1-8b-h100": "end-to-end-llama-3.1-8b",
    "end-to-end-qwen3-14b-nf4-h100": "end-to-end-qwen3-14b-nf4",
    "end-to-end-qwen3-0.6b-h100": "end-to-end-qwen3-0.6b",
    "end-to-end-qwen3-0.6b-multiples-of-64": "end-to-end-qwen3-0.6b",
    "end-to-end-qwen3-0.6b-few-lengths": "end-to-end-qwen3-0.6b",
    "end-to-end-bloom-1b7-recomputed": "end-to-end-bloom-1b7",
    "end-to-end-bloom-1b7-kept": "end-to-end-bloom-1b7",
    "dpo-qwen3-0.6b-built-anew": "dpo-qwen3-0.6b",
    "dpo-qwen3-0.6b-trl": "dpo-qwen3-0.6b",
    "dpo-qwen3-0.6b-without-graphs": "dpo-qwen3-0.6b",
    "dpo-qwen3-0.6b-with-graphs": "dpo-qwen3-0.6b",
    "end-to-end-qwen3-0.6b-unpacked-without-graphs": "end-to-end-qwen3-0.6b",
    "end-to-end-qwen3-0.6b-unpacked-with-graphs": "end-to-end-qwen3-0.6b",
    "end-to-end-qwen3-0.6b-unpacked": "end-to-end-qwen3-0.6b",
    "end-to-end-qwen3-0.6b-unpacked-branch": "end-to-end-qwen3-0.6b",
    "accuracy-int8": "accuracy",
    "gradients-int8-smollm2-1024-tokens": "benchmarks.accuracy --gradients --tokens 1024, with bf16, fp8 and int8, too",
    "accuracy-int8-fp8": "accuracy",
    "accuracy-int8-fp8-instructions": "accuracy-instructions",
    "step-llama-3.1-8b-int8-fp8": "step-llama-3.1-8b-fp8",
    "step-llama-3.1-8b-int8-h100": "step-llama-3.1-8b-int8",
    "step-qwen3-30b-a3b-fp8-h100": "step-qwen3-30b-a3b-fp8",
    "probe-cost-compiled-before": "probe-cost",
    "accuracy-int8-instructions": "accuracy-instructions",
    "precision-int8": "precision",
    "ablations-llama-3.2-1b-graph": "ablations-llama-3.2-1b",
    "cards-1b-judged-by-forwards": "cards-1b",
    "cards-3b-by-tokens": "cards-3b",
    "longest-row-32gib-first-rule": "longest-row-32gib",
    "longest-row-32gib-one-process": "longest-row-32gib",
    "longest-row-48gib-one-process": "longest-row-48gib",
    "packing-metadata-llama-3.2-1b": "ablations-llama-3.2-1b",
    "plan-calibrated": "plan",
    "plan-gpt-oss-20b-mxfp4-decoded-in-the-product": "plan-gpt-oss-mxfp4",
    "trees-eef0da6": "benchmarks.step --tree, in its earlier form",
    "step-qwen3.5-35b-a3b-seed-0": "step-qwen3.5-35b-a3b",
    "spike-fp8-layer": "a spike that became benchmarks/precision.py",
    "precision-nf4-by-bitsandbytes": "precision",
    "spike-fp8-products": "benchmarks/spikes/fp8_products.py, tried once",
    "profile-llama-3.2-1b": "pronghorn profile, of a recipe with that checkpoint",
    "step-gpt-oss-20b-12-layers-fp8": "step-gpt-oss-20b-fp8",
    "step-llama-3.1-8b-qlora-written-out": "step-llama-3.1-8b-qlora",
    "ranks-llama-3.1-8b-without-alone": "ranks-llama-3.1-8b",
    "ranks-llama-3.1-8b-copy-engines": "ranks-llama-3.1-8b",
    "ranks-llama-3.1-8b-h100": "ranks-llama-3.1-8b",
    "ranks-llama-3.1-8b-full-float32-gathers": "ranks-llama-3.1-8b-full",
    "ranks-llama-3.1-8b-sharded": "ranks-llama-3.1-8b",
    "ranks-llama-3.1-8b-mixed-red": "ranks-llama-3.1-8b-mixed",
    "ranks-qwen3-14b-nf4-without-alone": "ranks-qwen3-14b-nf4",
    "precision-h100": "precision",
    "precision-codes-by-passes-of-their-own": "precision",
    "accuracy-gradients": "accuracy",
    "accuracy-gradients-instructions": "accuracy-instructions",
    "step-llama-3.1-8b-fp8-gradients": "step-llama-3.1-8b-fp8",
    "ranks-blocks-of-nccl": "phases of benchmarks.ranks under NCCL_MAX_CTAS, tried once",
    "step-llama-3.1-8b-once": "step-llama-3.1-8b",
    "step-llama-3.2-1b-busy-host": "step-llama-3.2-1b",
    "step-llama-3.2-1b-graph-asked": "step-llama-3.2-1b with --ablate graph=on",
    "step-llama-3.2-1b-judged-by-steps": "step-llama-3.2-1b",
    "step-llama-3.2-1b-once": "step-llama-3.2-1b",
    "step-llama-3.2-1b-quiet-host": "step-llama-3.2-1b",
    "step-mistral-7b-larger-chunks": "step-mistral-7b",
    "step-qwen3-0.6b-faster-host": "step-qwen3-0.6b",
    "step-qwen3-0.6b-once": "step-qwen3-0.6b",
    "step-qwen3-14b-10-layers-qlora-fp8": "step-qwen3-14b-qlora-fp8",
    "step-qwen3-30b-a3b-graph": "step-qwen3-30b-a3b",
    "step-qwen3-30b-a3b-once": "step-qwen3-30b-a3b",
}
"""Files beside the newest of a target, and what made them."""


def commands() -> list[list[str]]:
    """What makes results would run, from the interpreter on."""
    done = subprocess.run(
        [
            "make",
            "-n",
            "-C",
            FOLDER,
            "all",
            "several",
            "tokenising",
            "exports",
            "export-time-llama-3.1-8b",
            "fair-rows-stories260k",
            "gemma",
            "gradients",
            "PYTHON=python",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [shlex.split(line) for line in done.stdout.splitlines() if " python " in line]
    return [line[line.index("python") + 1 :] for line in lines]


def test_commands_are_known() -> None:
    """Their arguments parse, their models exist, and a step can serve its candidates."""
    ran = commands()
    assert len(ran) > 25
    for _, name, *given in ran:
        if name == "pronghorn":
            verify = typer.main.get_command(app).commands[given[0]]  # type: ignore[attr-defined]
            known = {option for parameter in verify.params for option in parameter.opts}
            assert {part for part in given if part.startswith("--")} <= known
            continue
        parsed = vars(importlib.import_module(name).arguments().parse_args(given))
        model = str(parsed.get("shape", parsed.get("model") or "tiny"))
        assert "/" in model or shape_of(model), model
        if name == "benchmarks.step":
            options = StepOptions("tiny", against=parsed["against"], ablate=tuple(parsed["ablate"]))
            candidates_of(options, spec_of(options))


@pytest.mark.parametrize(("limit", "tried"), [(102, [100, 105]), (109, [100, 105, 110]), (96, [95, 100])])
def test_longest_row_is_searched_on_both_sides(limit: int, tried: list[int]) -> None:
    from benchmarks.longest_row import next_percent, row_of

    trained: list[int] = []
    failed: list[int] = []
    while (percent := next_percent(trained, failed)) is not None:
        (trained if percent <= limit else failed).append(percent)
    assert sorted(trained + failed) == tried
    assert row_of(3840, 100) == 3840 and row_of(3840, 105) == 4032
    assert row_of(3840, 103) == 3968 and row_of(3840, 97) == 3712  # at least 3 % longer, at least 3 % shorter
    assert next_percent([100, 105, 110, 115, 120], []) is next_percent([], [100, 95, 90, 85, 80]) is None


def test_a_row_that_can_not_be_shorter_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """95 % of 64 tokens are none, in steps of 64."""
    from benchmarks import longest_row

    ran: list[int] = []

    class OutOfMemory(Executor):
        """In the place of a process with a GPU."""

        def submit(self, fn: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
            ran.append(arguments[-1])
            done: Future[Any] = Future()
            done.set_result(None)
            return done

    monkeypatch.setattr(longest_row, "ProcessPoolExecutor", lambda *_: OutOfMemory())
    monkeypatch.setattr(longest_row, "longest", lambda *_: 64)
    fields = shape_of("tiny")
    assert fields is not None
    shape = auto_plan.dims_of(skeleton(AutoConfig.for_model(**fields)))
    found = longest_row.meet(shape, "keep", longest_row.Setting(fields, 2**30, 8192, 2))
    assert ran == [64] and found["tried"][0]["out_of_memory"]
    assert found["longest_tokens"] == 0 and not found["met"]


def test_offload_runs_on_the_cpu(tmp_path: Path) -> None:
    """Right gradients, and no figure that only a GPU has."""
    from benchmarks import offload

    if offload.torch.cuda.is_available():
        pytest.skip("times a GPU there")
    out = tmp_path / "offload.json"
    done = programs.invoke(offload, "--shape", "tiny", "--tokens", "64", "--repeats", "1", "--out", out)
    assert done.exit_code == 0, done.output
    ways = read_results(out)
    assert [way.candidate for way in ways] == [f"pronghorn, {name}" for name in offload.WAYS]
    assert all(way.gate["green"] and way.timings_ms["step"] for way in ways)
    assert not ways[0].extra["megahertz"] and "saved_cycles_share" not in ways[0].extra


def test_quantise_on_load_is_timed_against_reading(tmp_path: Path) -> None:
    from benchmarks import load

    out = tmp_path / "load.json"
    done = programs.invoke(load, "--model", "tiny", "--checkpoints", tmp_path, "--repeats", "1", "--out", out)
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["seconds"].keys() == {
        f"{state} {way}" for state in ("cold", "warm") for way in load.WAYS | load.LOADERS
    }
    assert report["over reading"].keys() == {"cold", "warm"} and report["file bytes"] > 2**16


def test_an_export_is_timed(shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from benchmarks import export_time

    out = tmp_path / "time.json"
    done = programs.invoke(
        export_time, "--tokenizer", shared / "models/stories260k", "--scratch", tmp_path, "--out", out
    )
    assert done.exit_code == 0, done.output
    facts = json.loads(out.read_text())
    assert facts["parameters"] > 10**5 and facts["seconds"] > 0 and facts["file bytes"] > facts["parameters"]
    assert [path.name for path in tmp_path.iterdir()] == ["time.json"]


def test_tokenising_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls what the data package has; a tokenizer without a chat template doesn't give the same tokens."""
    from benchmarks import tokenising
    from pronghorn.diagnose.shapes import byte_tokenizer
    from support.data_files import read_rows

    monkeypatch.setattr(tokenising, "REPEATS", 1)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one and one", "completion": "two"}\n' * 3)
    rows = read_rows(tmp_path / "rows.jsonl", {})
    times, tokens, _ = tokenising.measure(rows, byte_tokenizer(512))
    assert tokens > 0 and [len(series) for series in times.values()] == [1, 1, 1]


@pytest.mark.parametrize("n", [6, 8, 10, 12, 20, 21, 60])
def test_the_interval_of_a_median_covers_it_in_95_of_100(n: int) -> None:
    from benchmarks.always_on import of_median_95

    def coverage(least: int, most: int) -> float:
        """That of n tosses at least so many and at most so many less one fall below."""
        return sum(math.comb(n, i) for i in range(least, most)) / 2**n

    low, high = (int(value) for value in of_median_95([float(i) for i in range(n)]))
    assert low + high == n - 1
    assert coverage(low + 1, high + 1) >= 0.95 > coverage(low + 2, high)


def test_a_red_gate_is_not_drawn(tmp_path: Path) -> None:
    """The figure is of the committed results, as many bars as there are green gates."""
    matplotlib = pytest.importorskip("matplotlib")
    from benchmarks.packed_vs_padded import draw

    results = read_results(FOLDER / "results/packed-vs-padded-smollm2.json")
    draw(results, tmp_path / "both.svg")
    if f"matplotlib=={matplotlib.__version__}" in (ROOT / "constraints.txt").read_text():
        both = re.sub(r'"[^"]*#?[mp][0-9a-f]{10}[^"]*"', "", (tmp_path / "both.svg").read_text())
        assert both == re.sub(r'"[^"]*#?[mp][0-9a-f]{10}[^"]*"', "", (ROOT / "docs/packed-vs-padded.svg").read_text())
    results[1].gate["green"] = False
    draw(results, tmp_path / "one.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert "packed" in drawn and "padded" not in drawn and "padded" in (tmp_path / "both.svg").read_text()


def test_every_result_has_its_target() -> None:
    targets = {Path(part).stem for command in commands() for part in command if part.endswith(".json")}
    results = {path.stem for path in (FOLDER / "results").rglob("*.json")}
    assert results - targets == set(EARLIER)
    assert {name for name in EARLIER.values() if " " not in name} <= targets
    programs = {path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert programs - {command[1].split(".")[-1] for command in commands()} == {"packing", "parts", "report", "worker"}


def test_one_command_a_gpu(tmp_path: Path) -> None:
    """Two GPUs, three commands: the third waits for one of the first two, and takes its GPU."""
    script = FOLDER / "on_a_gpu.sh"
    environment = {"CUDA_VISIBLE_DEVICES": "5,7", "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    go = tmp_path / "go"
    gpu = "$CUDA_VISIBLE_DEVICES"
    hold = f"touch '{tmp_path}/at-'{gpu}; echo {gpu}; until test -e '{go}'; do sleep 0.05; done"
    running = [
        subprocess.Popen([script, "sh", "-c", hold], env=environment, stdout=subprocess.PIPE, text=True) for _ in "123"
    ]
    try:
        deadline = time.monotonic() + 30
        while not all((tmp_path / f"at-{gpu}").exists() for gpu in (5, 7)):
            assert time.monotonic() < deadline, "one GPU was never taken"
            time.sleep(0.05)
        go.touch()
        lines = [process.communicate(timeout=30)[0].strip() for process in running]
        assert all(process.returncode == 0 for process in running)
    finally:
        for process in running:
            process.kill()
    assert len(lines) == 3 and set(lines) == {"5", "7"}


def test_a_command_that_fails_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0", "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = ["make", "-C", FOLDER, "ops", "moe-ops", "PYTHON=false", f"OUT={tmp_path}", "COMMIT=none"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode and done.stdout.count("false ") == 2, done.stdout + done.stderr


def test_without_git_the_commit_is_unknown(tmp_path: Path) -> None:
    environment = {"GIT_DIR": str(tmp_path / "none"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["make", "-n", "-C", FOLDER, "ops"], env=environment, capture_output=True, text=True)
    assert " --commit unknown --out " in done.stdout and not done.stderr


def test_what_was_cut_off_goes_on(tmp_path: Path) -> None:
    """Whole results aren't measured again, what a run had when it was killed is."""
    (tmp_path / "reports").mkdir()
    for name in ("ops.json", "step-qwen3-0.6b.json", "reports/plan.json", "moe-ops.json.unfinished"):
        (tmp_path / name).touch()
    command = ["make", "-n", "-C", FOLDER, "PYTHON=python", "SHARED=s", "COMMIT=c", f"OUT={tmp_path}"]
    left = {}
    for target in ("all", "rest"):
        done = subprocess.run([*command, target], capture_output=True, text=True, check=True)
        left[target] = [line for line in done.stdout.splitlines() if " python " in line]
    whole = [line for line in left["all"] if line not in left["rest"]]
    assert [line.split("--out ")[1].split()[0] for line in whole] == [
        f"{tmp_path}/{name}.json" for name in ("ops", "step-qwen3-0.6b", "reports/plan")
    ]


def test_a_verdict_that_never_came_leaves_the_last_one(tmp_path: Path) -> None:
    file = tmp_path / "reports" / "verify-llama-3.1-8b.json"
    file.parent.mkdir()
    file.write_text("whole")
    environment = {"CUDA_VISIBLE_DEVICES": "0", "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = ["make", "-C", FOLDER, "verify-llama-3.1-8b", "PYTHON=false", f"OUT={tmp_path}", "COMMIT=none"]
    assert subprocess.run(command, env=environment, capture_output=True).returncode and file.read_text() == "whole"


def test_no_gpu_is_an_error(tmp_path: Path) -> None:
    """None is visible; the driver doesn't answer, which nvidia-smi tells on stdout."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    for environment in ({"CUDA_VISIBLE_DEVICES": ""}, {}):
        environment |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
        done = subprocess.run([FOLDER / "on_a_gpu.sh", "true"], env=environment, capture_output=True, timeout=30)
        assert done.returncode == 1 and b"no NVIDIA GPU" in done.stderr
