"""`benchmarks.step`: bad input, the rows, whose turn it is when memory is short, and a whole run on the CPU."""

from __future__ import annotations

import builtins
import os
import random
import re
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ops, pairs, step
from benchmarks.candidates import CANDIDATES
from benchmarks.candidates.base import Spec
from benchmarks.counts import matmul_parameters
from benchmarks.gate import judge
from benchmarks.pairs import CandidateResult, PairedRunner
from benchmarks.record import Result, Workload, command_line, keeper, read_results, write_results
from benchmarks.reference import Reference, compute_reference
from benchmarks.step import Prepared, StepOptions, candidates_of, recompute_label, result_of, spec_of
from benchmarks.tables import step_table
from benchmarks.timing import STEPS_A_TURN
from benchmarks.worker import CandidateProcess, OutOfMemory, Worker, WorkerError, serve
from benchmarks.workload import document_lengths, make_rows
from pronghorn.diagnose.shapes import SHAPES, checkpoint_of
from pronghorn.errors import ConfigError, DataError
from pronghorn.parity.parameters import canonical
from support import programs

GREEN = {
    "dtype": "float32", "loss": 2.0, "grad_norm": 1.0, "gradient_error": 0.0, "gradient_errors": {"w": 0.0},
    "cosines": {"w": 1.0},
    "trained": ["w"], "dead": [], "isolation": [1.0, 1.0], "document_losses": {0: 2.0}, "unmoved": [],
    "first_step_s": 0.5,
}  # fmt: skip
REFERENCE = Reference(2.0, 1.0, (2.0,), ("w",), 0.0, {"w": 0.0}, "")
ROOT = Path(__file__).parents[2]


def invoke(*arguments: str) -> Any:
    return programs.invoke(step, *arguments)


# --- rows and checkpoints


def test_rows_are_full_and_the_same_for_everybody() -> None:
    rows = make_rows(500, "lognormal", 0.3, 512, seed=1)
    assert rows == make_rows(500, "lognormal", 0.3, 512, seed=1) != make_rows(500, "lognormal", 0.3, 512, seed=2)
    assert len({row.input_ids for row in rows}) == len(rows)
    for row in rows:
        assert len(row.input_ids) == len(row.labels) == sum(row.lengths) == 500
        starts = [start for start, _ in row.bounds]
        assert all(row.labels[start] == -100 for start in starts) and 0 < row.n_labels < 250


def test_rows_to_judge_isolation_by() -> None:
    row = make_rows(500, "lognormal", 1.0, 512, seed=1)[0]
    start, end = row.bounds[1]
    other = row.with_other_tokens(1)
    assert other.labels == row.labels and other.input_ids[:start] == row.input_ids[:start]
    assert other.input_ids[end:] == row.input_ids[end:] and other.input_ids[start:end] != row.input_ids[start:end]
    one, rest = row.supervised_where(lambda d: d == 1), row.supervised_where(lambda d: d != 1)
    assert one.n_labels + rest.n_labels == row.n_labels and one.n_labels == end - start - 1


def test_commands_in_results_tell_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["/home/me/benchmarks/step.py", "--model=/home/me/llama/", "--out", "/home/me/a.json", "--against=hf", "x="]
    monkeypatch.setattr(sys, "argv", given)
    assert command_line() == "python -m benchmarks.step --model=llama --out a.json --against=hf x="


def test_documents_of_one_token_are_left_out(tmp_path: Path) -> None:
    """A row of them would have nothing to learn."""
    file = tmp_path / "lengths.json"
    file.write_text("[1, 1, 1, 5]")
    assert all(row.n_labels for row in make_rows(8, str(file), 1.0, 512, seed=0))
    file.write_text("[1]")
    with pytest.raises(DataError, match="none of 1 documents has 2 to 8 tokens"):
        make_rows(8, str(file), 1.0, 512, seed=0)


def test_lengths(tmp_path: Path) -> None:
    rng = random.Random(0)
    assert document_lengths("one", 8192)(rng) == 8192
    file = tmp_path / "lengths.json"
    file.write_text("[5, 7, 900]")
    assert {document_lengths(str(file), 100)(rng) for _ in range(50)} == {5, 7}


def test_matmul_parameters_are_those_that_a_token_meets() -> None:
    layer = 2 * (64 * 4 * 16) + 2 * (64 * 2 * 16) + 3 * 64 * SHAPES["tiny"]["intermediate_size"]
    assert matmul_parameters("tiny") == 2 * layer + 64 * 512  # the head, though its weight is the embedding's


def test_canonical_names() -> None:
    name = "base_model.model.model.layers.0._orig_mod.self_attn.q_proj.lora_A.default.weight"
    assert canonical(name) == "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert canonical("model.norm.weight") == "model.norm.weight"


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "Llama-9"], "use one of tiny, SmolLM2-135M"),
        (["--model", "tiny", "--against", "hf,axolotl"], "use some of pronghorn, hf, hf-compile"),
        (["--model", "tiny", "--ablate", "layers=fast"], "layers=stock"),
        (["--model", "tiny", "--ablate", "speed"], "packing_metadata=per_layer_mask"),
        (["--model", "tiny", "--lengths", "none.json"], "none.json"),
        (["--model", "tiny", "--supervised", "0"], "--supervised 0.0 is not in (0, 1]"),
        (["--model", "tiny", "--tokens", "1"], "--tokens 1 is below 2"),
        (["--model", "tiny", "--repeats", "0"], "--repeats 0 is below 1"),
        (["--model", "tiny", "--experts", "lora"], "tiny has no experts"),
        (["--model", "tiny", "--python", "hf=/no/such/python"], "--python hf=/no/such/python is not a program"),
        (["--model", "tiny-moe", "--experts", "lora", "--method", "full"], "--experts lora with --method full"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.step.Worker", None)
    result = invoke(*arguments)
    assert result.exit_code == 1 and problem in result.output, result.output


@pytest.mark.parametrize("text", ["[]", '["a"]', "[0]", "{", "[300]"])
def test_bad_files_of_lengths(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"lengths\.json"):
        document_lengths(str(file), 200)


def test_a_results_file_of_another_schema_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    out.write_text('[{"schema": "other-v3"}]')
    result = invoke("--model", "tiny", "--out", str(out))
    assert result.exit_code == 1 and "other-v3" in result.output and "other-v3" in out.read_text()


def test_results_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a run leaves an earlier one's file alone, as does whoever is killed while writing."""
    out, row = tmp_path / "new" / "results.json", Workload("tiny", "lora", 8, "one", 1.0, 0)
    found = [Result("", "hf", row, {"green": False}, {})]
    keeper(out)(found)
    assert not out.exists() and read_results(out.with_name("results.json.unfinished")) == found
    write_results([], out)
    assert os.listdir(out.parent) == ["results.json"]
    monkeypatch.setattr(Path, "replace", lambda *_: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        write_results(found, out)
    assert read_results(out) == []


@pytest.mark.parametrize(("program", "arguments"), [(step, ["--model", "tiny"]), (ops, [])])
def test_where_nothing_can_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Any, arguments: list[str]
) -> None:
    monkeypatch.setattr("benchmarks.step.Worker", None)
    monkeypatch.setattr("benchmarks.ops.Stopwatch", None)
    (tmp_path / "file").touch()
    result = programs.invoke(program, *arguments, "--out", tmp_path / "file" / "results.json")
    assert result.exit_code == 1 and "can't be written" in result.output, result.output


# --- processes


def test_a_process_keeps_what_libraries_print_away_from_its_answers() -> None:
    """And the driver's error, which has no class of its own, is memory that ran out."""

    class Role:
        def hello(self, name: str) -> str:
            print("noise")
            return f"hello {name}"

        def full(self) -> None:
            raise RuntimeError("CUDA error: out of memory")

    ours, theirs = Pipe()
    ours.send(("hello", {"name": "a"}))
    ours.send(("full", {}))
    answers = []
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, Role(), theirs)
        answers = [ours.recv(), ours.recv()]
        ours.close()
        served.result(timeout=30)
    assert answers == [(None, "hello a"), ("memory", "RuntimeError: CUDA error: out of memory")]


def test_a_process_that_dies_or_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with closing(Worker(tmp_path / "log")) as worker:
        with pytest.raises(WorkerError, match="no_such_command"):
            worker.call("no_such_command")
        worker._process.kill()
        with pytest.raises(WorkerError, match=r"(?s)ended with code -9.*Traceback"):
            worker.call("rest")


def test_a_process_imports_nothing_heavy_before_its_library() -> None:
    """The import of the library is timed."""
    code = "import sys, benchmarks.worker; print(sys.modules.keys() & {'torch', 'transformers', 'peft', 'pandas'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_pronghorn_is_imported_where_its_import_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: set[str] = set()
    real = builtins.__import__

    def recorded(name: str, *args: Any, **kwargs: Any) -> Any:
        imported.update((name, *(f"{name}.{part}" for part in (args[2] if len(args) > 2 and args[2] else ()))))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", recorded)
    CANDIDATES["pronghorn"].prepare()
    assert {"pronghorn.FastLanguageModel", "transformers", "peft"} <= imported


@pytest.mark.slow
def test_a_candidate_may_have_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """It imports its own packages, not ours, and this repository's source."""
    venv.create(tmp_path / "other", symlinks=True)
    (packages,) = (tmp_path / "other").glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (packages / "theirs.pth").write_text(f"{ours}\n")
    (packages / "only_there.py").write_text("")
    python = str(tmp_path / "other/bin/python")
    with closing(Worker(tmp_path / "log", python)) as worker:
        with pytest.raises(WorkerError, match="no_such_command"):
            worker.call("no_such_command")
        assert os.readlink(f"/proc/{worker._process.pid}/exe") == os.path.realpath(python)
        environment = Path(f"/proc/{worker._process.pid}/environ").read_bytes().decode().split("\0")
    assert f"PYTHONPATH={ROOT}{os.pathsep}{ROOT / 'src'}" in environment


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_process_holds_the_lock_on_its_gpu(tmp_path: Path) -> None:
    """`benchmarks/on_a_gpu.sh` opens the lock, and the GPU is taken as long as anybody has it open."""
    lock = (tmp_path / "gpu.lock").open("w")
    os.set_inheritable(lock.fileno(), True)
    with closing(Worker(tmp_path / "log")) as worker:
        held = [os.path.realpath(fd) for fd in Path(f"/proc/{worker._process.pid}/fd").iterdir()]
    assert str(tmp_path / "gpu.lock") in held


class ThreadWorker(Worker):
    """A worker's calls answered by a thread, through the same pipe: starting a process takes seconds."""

    def __init__(self, log: Path, *_: Any) -> None:
        self._log, self._busy = log, False
        self._connection, child = Pipe()
        self._thread = threading.Thread(target=serve, args=(CandidateProcess(), child), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._connection.close()
        self._thread.join()


# --- turns, with processes that only pretend


class FakeWorker:
    """Answers as a process would; `script` says who runs out of memory beside another, crashes, or is red."""

    script: dict[str, str]
    asked: list[str]
    alive: set[str]

    def __init__(self, log: Path, python: str, tree: Path) -> None:
        self.name = log.stem
        self.alive.add(self.name)

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append(f"{self.name} {command}" + (f" {arguments['count']}" if command == "steps" else ""))
        does = self.script.get(self.name, "")
        beside = len(self.alive) > 1
        if beside and (does == f"memory at {command}" or "everybody" in self.script):
            raise OutOfMemory("no room", "none")
        if does == f"crash at {command}":
            raise WorkerError("it crashed", "look")
        if command == "gate":
            again = self.asked.count(f"{self.name} gate") > 1
            return GREEN | ({"loss": 3.0} if does == ("red again" if again else "red") else {})
        if command == "steps":
            count = arguments["count"]
            times = [{"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "step": 3.5}] * count
            retries = int(does == "retries" and beside)
            losses = [float("nan") if does == "nan" else 1.0] * count
            return {"steps": times, "losses": losses, "memory_retries": retries, "peak": 10}
        loaded = {"notes": ["plans beside another" if beside else "plans alone"], "load_s": len(self.asked)}
        return {"load": loaded, "rest": {"resting": 3, "notes": loaded["notes"]}, "count": {"launches": 5, "syncs": 1}}[
            command
        ]

    def close(self) -> None:
        self.alive.discard(self.name)


def run_pairs(
    monkeypatch: pytest.MonkeyPatch, folder: Path, memory: int | None = None, unlimited: str = "", **script: str
) -> tuple[dict[str, CandidateResult], list[str]]:
    """Measure pronghorn against hf and hf-sdpa, 8 steps each; the outcomes and what was asked, in order.

    Args:
        memory: the limit of all but the one that is `unlimited`.
    """
    kept: list[list[str]] = []
    fake = type("Scripted", (FakeWorker,), {"script": script, "asked": [], "alive": set()})
    monkeypatch.setattr(pairs, "Worker", fake)
    names = ("pronghorn", "hf", "hf-sdpa")
    limits = {name: None if name == unlimited else memory for name in names}
    outcomes = {
        name: CandidateResult(name, Spec(name, "", "lora", "off", 8, 8, 1, 0, memory=limits[name])) for name in names
    }
    first, *others = outcomes.values()
    on_result = lambda: kept.append([name for name, outcome in outcomes.items() if outcome.known])  # noqa: E731
    PairedRunner([], REFERENCE, folder, 8, 2**34, lambda text: None, on_result).run(first, others)
    assert not fake.alive
    assert "hf" in kept[0] and "hf-sdpa" in kept[1] and kept[2] == list(outcomes)  # whatever failed
    return outcomes, fake.asked


def steps_of(outcome: CandidateResult) -> int:
    return sum(map(len, outcome.turns))


def timed(asked: list[str]) -> list[str]:
    """The turns: steps that came after a gate and were followed by the memory given back."""
    turns = [a.split()[0] for a, after in pairwise(asked) if " steps " in a and "rest" in after]
    return [name for i, name in enumerate(turns) if name in turns[:i]]  # the first of each is its warm-up


def test_a_run_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, asked = run_pairs(monkeypatch, tmp_path)
    assert timed(asked) == ["pronghorn", "hf"] * 2 + ["pronghorn", "hf-sdpa"] * 2
    for name, outcome in outcomes.items():
        assert outcome.green and outcome.counts == {"launches": 5, "syncs": 1}
        assert outcome.memory == {"resting": 3, "peak": 10}
        mine = [line for line in asked if line.startswith(f"{name} ")]
        assert mine[:2] == [f"{name} load", f"{name} gate"] and mine[-1] == f"{name} count"
        assert mine.count(f"{name} load") == 1
    assert steps_of(outcomes["pronghorn"]) == 16
    assert (
        outcomes["hf"].paired_with["step_ratio"] == (1.0, 1.0, 1.0) and len(outcomes["hf"].paired_with["step_ms"]) == 8
    )
    assert all(f"{name} steps {STEPS_A_TURN}" in asked for name in outcomes)


@pytest.mark.parametrize("script", ["memory at load", "memory at gate", "memory at steps", "retries"])
def test_a_pair_that_does_not_fit_is_relaunched_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    outcomes, asked = run_pairs(monkeypatch, tmp_path, hf=script)
    hf = outcomes["hf"]
    assert hf.green and steps_of(hf) == 8 and hf.counts
    assert hf.notes == ["doesn't fit together with pronghorn: every turn in a new process"]
    assert asked.count("hf load") >= 2 and asked.count("pronghorn load") >= 3
    assert hf.loaded["notes"] == ["plans alone"]  # as what was timed did; files are read the first time
    assert script == "memory at load" or hf.loaded["load_s"] == asked.index("hf load") + 1
    assert not outcomes["hf-sdpa"].notes and steps_of(outcomes["pronghorn"]) == 16


def test_within_a_limit_memory_that_runs_out_is_ones_own_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless two limits are more than the device has, or the one beside it has none."""
    outcomes, asked = run_pairs(monkeypatch, tmp_path, 2**33, "pronghorn", hf="memory at gate")
    assert outcomes["hf"].green and asked.count("hf load") >= 2
    outcomes, asked = run_pairs(monkeypatch, tmp_path, memory=2**33 + 1, hf="memory at gate")
    assert outcomes["hf"].green and asked.count("hf load") >= 2
    outcomes, asked = run_pairs(monkeypatch, tmp_path, memory=2**33, hf="memory at gate")
    assert not outcomes["hf"].green and outcomes["hf"].gate["reasons"] == ["no room"]
    assert asked.count("hf load") == 1 and outcomes["hf-sdpa"].green
    assert recompute_label(outcomes["hf"].spec) == "off, 8 GiB"
    outcomes, asked = run_pairs(monkeypatch, tmp_path, memory=2**33, hf="retries")
    assert outcomes["hf"].green and not outcomes["hf"].notes and asked.count("hf load") == 1


def test_memory_time_refuses_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import memory_time

    monkeypatch.setattr("benchmarks.step.Worker", None)
    for arguments, problem in (
        (["--against", "hf"], "--against hf: is unknown"),
        (["--against", "hf:on,axolotl:off"], "--against axolotl:off is unknown"),
        (["--cards", "8Gigs"], "--cards"),
        (["--cards", "8GiB,500MiB"], "500 MiB is less than CUDA and libraries take"),
        (["--out", str(tmp_path)], "can't be written"),
    ):
        done = programs.invoke(memory_time, "--model", "tiny", *arguments)
        assert done.exit_code == 1 and problem in done.stderr, done.output


def test_a_device_that_holds_only_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, _ = run_pairs(monkeypatch, tmp_path, everybody="needs all memory")
    assert all(outcome.green and outcome.turns and outcome.counts for outcome in outcomes.values())
    assert all(len(outcomes[name].notes) == 1 for name in ("hf", "hf-sdpa"))


def test_a_failure_withholds_what_was_measured() -> None:
    outcome = CandidateResult("hf", Spec("hf", "", "lora", "off", 8, 8, 1, 0), gate={"green": True, "reasons": []})
    outcome.turns, outcome.memory, outcome.counts = [[{"step": 1.0}]], {"peak": 1}, {"syncs": 1}
    outcome.paired_with = {"candidate": "pronghorn"}
    outcome.fail("died")
    assert not outcome.green and outcome.gate["reasons"] == ["died"]
    assert not outcome.turns and not (outcome.memory or outcome.counts or outcome.paired_with)


@pytest.mark.parametrize("script", ["red", "red again", "crash at load", "crash at gate", "crash at steps", "nan"])
def test_who_fails_is_withheld_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    outcomes, asked = run_pairs(monkeypatch, tmp_path, hf=script)
    hf = outcomes["hf"]
    assert not hf.green and len(hf.gate["reasons"]) == 1
    assert not hf.turns and not hf.counts and not hf.paired_with
    assert steps_of(outcomes["hf-sdpa"]) == 8 and outcomes["hf-sdpa"].paired_with
    if script == "red":
        assert not any(line.startswith("hf steps") for line in asked)  # the gate comes first
        assert hf.gate["reasons"][0].startswith("loss is off by 0.5")
    if script == "red again":
        assert hf.gate["reasons"][0].startswith("after its steps: loss is off by 0.5")


def test_without_the_first_s_second_verdict_nobody_has_a_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, _ = run_pairs(monkeypatch, tmp_path, pronghorn="red again")
    assert not outcomes["pronghorn"].green and not outcomes["pronghorn"].turns
    assert all(outcomes[name].green and not outcomes[name].paired_with for name in ("hf", "hf-sdpa"))


def test_who_computes_something_else_after_the_gate_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph may, that is captured when a model has run for a while; adapters that moved are set back."""
    monkeypatch.setattr("benchmarks.candidates.base.LEARNING_RATE", 1e-2)
    rows = make_rows(64, "lognormal", 1.0, SHAPES["tiny"]["vocab_size"], seed=0)
    checkpoint = str(checkpoint_of("tiny", tmp_path, seed=0))
    spec = Spec("hf", checkpoint, "lora", "off", 64, 64, max(len(row.lengths) for row in rows), seed=0)
    reference = compute_reference(spec, rows[0], tmp_path)
    process = CandidateProcess()
    process.load(spec, rows)

    def verdict() -> dict[str, Any]:
        return judge(process.gate(reference), reference)

    assert verdict()["green"]
    process.steps(count=4, warm=0)
    assert verdict()["green"]
    sound = process._built.make_batch
    process._built.make_batch = lambda row: sound(row) | {"position_ids": sound(row)["position_ids"] * 2}
    assert not verdict()["green"]


def test_what_cannot_be_counted_is_still_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, _ = run_pairs(monkeypatch, tmp_path, hf="crash at count", pronghorn="memory at count")
    for name in ("hf", "pronghorn"):
        assert outcomes[name].green and outcomes[name].turns
    assert outcomes["hf"].notes == ["launches and synchronisations could not be counted: it crashed"]
    assert outcomes["pronghorn"].counts  # asked last, when it was alone


def test_qlora_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs.importlib.util, "find_spec", lambda name: None)
    result = invoke("--model", "tiny", "--method", "qlora")
    assert result.exit_code == 1 and "pronghorn[nf4]" in result.output


def test_without_the_first_the_others_are_measured_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, asked = run_pairs(monkeypatch, tmp_path, pronghorn="red")
    assert not outcomes["pronghorn"].green and timed(asked) == ["hf"] * 2 + ["hf-sdpa"] * 2
    assert all(steps_of(outcomes[name]) == 8 and not outcomes[name].paired_with for name in ("hf", "hf-sdpa"))


def test_who_is_not_installed_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("liger", "", "lora", "off", 8, 8, 1, 0)
    monkeypatch.setattr(pairs.importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else name)
    assert pairs.unavailable(spec, sys.executable, cuda=True) == "not installed: pip install liger-kernel"
    monkeypatch.setattr(pairs.importlib.util, "find_spec", lambda name: name)
    assert pairs.unavailable(spec, sys.executable, cuda=True) is None
    assert "GPU" in (pairs.unavailable(spec, sys.executable, cuda=False) or "")


# --- results


def test_figures_and_table(tmp_path: Path) -> None:
    """2,000 weights in linears, 100 tokens in 2 ms: 4N is 0.4 GFLOP/s of a ceiling of 1."""
    spec = Spec("pronghorn", "", "lora", "off", 100, 50, 2, 0)
    rows = make_rows(100, "one", 0.25, 512, seed=0)
    prepared = Prepared(spec, rows, REFERENCE, {"matmul_tflops": 0.001}, 2000, "GPU", device_bytes=2**37)
    steps = [{"forward": 0.5, "backward": 1.0, "optimizer": 0.5, "step": step} for step in (1.0, 2.0, 6.0)]
    ours = CandidateResult(
        "pronghorn",
        spec,
        gate={"green": True, "reasons": []},
        turns=[steps],
        memory={"peak": 3 * 2**30},
        counts={"syncs": 0},
    )
    ours.loaded, ours.first_step_s = {"import_s": 1.25, "load_s": 1.0, "notes": ["[a] note"]}, 4.0
    red = CandidateResult("hf", spec)
    red.fail("loss is off")
    options = StepOptions("tiny", tokens=100, lengths="one", supervised=0.25)
    results = [result_of(options, outcome, prepared) for outcome in (ours, red)]
    assert results[0].extra["mfu"]["4N"] == pytest.approx(0.4) and results[0].extra["mfu"]["6N"] == pytest.approx(0.6)
    assert results[0].extra["tokens_per_s"] == pytest.approx({"real": 50_000, "supervised": 12_500})
    assert results[1].timings_ms == {} and "tokens_per_s" not in results[1].extra
    cells = table(results)
    assert cells["gate"] == ["green", "not judged"]
    assert cells["step, ms (min to max)"] == ["2.0 (1.0 to 6.0)", "–"]
    assert cells["MFU at 4N"] == ["40.0%", "–"] and cells["supervised tokens/s"] == ["12,500", "–"]
    assert cells["peak memory, GiB"] == ["3.00", "–"] and cells["launches a step"] == ["–", "–"]
    assert cells["synchronisations a step"] == ["0", "–"] and cells["first step, s"] == ["4.0", "–"]

    results[0].gate["green"] = False  # a file can say anything
    assert table(results)["tokens/s"] == ["–", "–"]


def table(results: list[Result]) -> dict[str, list[str]]:
    """The table's cells by the name of their row."""
    return {name: list(cells) for name, *cells in step_table(results).itertuples()}


# --- the whole command


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.step", "--model", "tiny", "--tokens", "64"]
    with subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, cwd=ROOT, stderr=subprocess.DEVNULL
    ) as run:
        while not list(tmp_path.glob("pronghorn-bench-*/prepare.log")) and run.poll() is None:
            time.sleep(0.1)
        run.terminate()
    assert run.returncode == 130 and not list(tmp_path.glob("pronghorn-bench-*"))


def test_a_whole_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command of benchmarks/README.md, with one more candidate."""
    monkeypatch.setattr(step, "Worker", ThreadWorker)
    monkeypatch.setattr(pairs, "Worker", ThreadWorker)
    (line,) = re.findall(
        r"^python -m benchmarks\.step (.* tiny .*)$", (ROOT / "benchmarks/README.md").read_text(), re.M
    )
    assert line.split() == ["--model", "tiny", "--tokens", "256", "--against", "hf"]
    out = tmp_path / "results.json"
    more = ("--supervised", "0.5", "--repeats", "2", "--out", str(out), "--against", "hf,unsloth")
    monkeypatch.chdir(tmp_path)
    done = invoke(*line.split(), *more)
    assert done.exit_code == 0, done.output
    assert "On the CPU" in done.output and "unsloth: not installed: pip install unsloth" in done.output
    ours, hf, unsloth = read_results(out)
    for result in (ours, hf):
        assert result.gate["green"] and result.extra["on_cpu"] and "CPU" in result.device
        assert result.workload.supervised_share == 0.5 and result.workload.shape == "tiny"
        speed = result.extra["tokens_per_s"]
        assert speed["real"] == pytest.approx(256 / result.median("step") * 1e3)
        assert 0.4 < speed["supervised"] / speed["real"] < 0.6
        assert result.extra["import_s"] > 0 and result.extra["first_step_s"] > 0
    assert len(hf.timings_ms["step"]) == 2 and len(ours.timings_ms["step"]) == 2
    assert hf.extra["paired_with"]["candidate"] == "pronghorn" and not ours.extra["paired_with"]
    assert ours.gate["loss"] == pytest.approx(hf.gate["loss"], rel=1e-5)  # the same weights, adapters and rows
    assert not unsloth.gate["green"] and unsloth.timings_ms == {}


def test_a_folder_is_a_model_too(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = spec_of(StepOptions(str(stories), tokens=96))
    prepared = CandidateProcess().prepare(str(stories), tmp_path, "one", 1.0, spec)
    assert prepared["spec"].checkpoint == str(stories) and prepared["spec"].longest == 96
    assert prepared["reference"].loss > 0 and Path(prepared["reference"].gradients).parent == tmp_path


def test_failing_its_own_gate_ends_the_command_with_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = Workload("tiny", "lora", 8, "one", 1.0, 0)
    red = Result("", "pronghorn", row, {"green": False, "reasons": ["planted"], "loss": 1.0}, {"step": [66.6]})
    red.extra["recompute"] = "off"
    monkeypatch.setattr(step, "bench_step", lambda *_: [red])
    done = invoke("--model", "tiny", "--out", str(tmp_path / "results.json"))
    assert done.exit_code == 1 and "FAILED" in done.output and "planted" in done.output and "66.6" not in done.output


def test_another_checkout_is_measured_by_its_own_source(tmp_path: Path) -> None:
    """Told by the paths of its process."""
    (tmp_path / "old/benchmarks").mkdir(parents=True)
    (tmp_path / "old/benchmarks/__init__.py").touch()
    (tmp_path / "old/benchmarks/worker.py").write_text("import sys; sys.exit(len(sys.argv))")
    options = StepOptions("tiny", trees=(tmp_path / "old",))
    _, other = candidates_of(options, spec_of(options))
    assert other.label == "pronghorn, tree old" and other.spec.candidate == "pronghorn"
    with closing(Worker(tmp_path / "log", other.python, other.tree)) as worker:  # noqa: SIM117
        with pytest.raises(WorkerError, match="ended with code 3 "):
            worker.call("load")
    with pytest.raises(ConfigError, match="give a checkout's root"):
        candidates_of(replace(options, trees=(tmp_path,)), spec_of(options))


def test_what_ran_is_told_for_the_steps_own_autocast(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 weights' steps compute in bf16 on a GPU: attention goes another way than without autocast."""
    from benchmarks.candidates import pronghorn as candidate
    from pronghorn.models.attach import Handle

    asked: list[Any] = []
    monkeypatch.setattr(candidate, "autocast_dtype", lambda method: method)
    monkeypatch.setattr(Handle, "paths", lambda self, autocast: asked.append(autocast) or [])
    candidate.build(Spec("pronghorn", str(stories), "full", "off", 32, 32, 1, 0)).describe()
    assert asked == ["full"]


def test_unsloth_finds_the_argument_it_looks_for() -> None:
    from inspect import signature

    from benchmarks.candidates.unsloth import _with_gqa_argument

    def given(query: int, max_q: int, *, scale: float | None = None) -> tuple[int, int, float | None]:
        return query, max_q, scale

    wrapped = _with_gqa_argument(given)
    assert list(signature(wrapped).parameters) == ["query", "max_q", "scale", "enable_gqa"]
    assert wrapped(1, 2, scale=0.5, enable_gqa=True) == (1, 2, 0.5)
