"""`pronghorn bench step`: bad input, the rows, whose turn it is when memory is short, and a whole run on the CPU."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pronghorn.bench import pairs
from pronghorn.bench.contenders.base import Spec
from pronghorn.bench.gate import judge
from pronghorn.bench.pairs import Outcome, Pairs
from pronghorn.bench.process import OutOfMemory, Worker, WorkerError
from pronghorn.bench.record import Result, Workload, command_line, keeper, read_results, write_results
from pronghorn.bench.reference import Reference, compute_reference
from pronghorn.bench.shapes import SHAPES, byte_tokenizer, checkpoint_of, matmul_parameters
from pronghorn.bench.step import Prepared, StepOptions, recompute_label, result_of
from pronghorn.bench.tables import step_table
from pronghorn.bench.timing import STEPS_A_TURN, Series
from pronghorn.bench.worker import ContenderProcess
from pronghorn.bench.workload import document_lengths, make_rows, read_rows, write_rows
from pronghorn.cli.main import app
from pronghorn.errors import DataError, PronghornError
from pronghorn.parity.parameters import canonical
from test_readme import BASH

GREEN = {
    "dtype": "float32", "loss": 2.0, "grad_norm": 1.0, "gradient_error": 0.0, "gradient_errors": {"w": 0.0},
    "trained": ["w"], "dead": [], "isolation": [1.0, 1.0], "document_losses": {"0": 2.0}, "unmoved": [],
    "first_step_s": 0.5,
}  # fmt: skip


def invoke(*arguments: str) -> Any:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return CliRunner().invoke(app, ["bench", "step", *arguments], env=environment)


# --- rows and checkpoints


def test_rows_are_full_labelled_at_the_end_and_the_same_for_everybody(tmp_path: Path) -> None:
    rows = make_rows(500, "lognormal", 0.3, 512, seed=1)
    assert rows == make_rows(500, "lognormal", 0.3, 512, seed=1) != make_rows(500, "lognormal", 0.3, 512, seed=2)
    assert len({row.input_ids for row in rows}) == len(rows)
    for row in rows:
        assert len(row.input_ids) == len(row.labels) == sum(row.lengths) == 500
        for start, end in row.bounds:
            labelled = [label != -100 for label in row.labels[start:end]]
            assert not labelled[0] and labelled == sorted(labelled)
            assert sum(labelled) == min(max(1, round(0.3 * (end - start))), end - start - 1)
            assert all(label in (-100, token) for label, token in zip(row.labels, row.input_ids, strict=True))
    write_rows(rows, tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json") == rows


def test_rows_to_judge_isolation_by() -> None:
    row = make_rows(500, "lognormal", 1.0, 512, seed=1)[0]
    start, end = row.bounds[1]
    other = row.with_other_tokens(1)
    assert other.labels == row.labels and other.input_ids[:start] == row.input_ids[:start]
    assert other.input_ids[end:] == row.input_ids[end:] and other.input_ids[start:end] != row.input_ids[start:end]
    one, rest = row.labelled_where(lambda d: d == 1), row.labelled_where(lambda d: d != 1)
    assert one.n_labels + rest.n_labels == row.n_labels and one.n_labels == end - start - 1


def test_commands_in_results_tell_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["/home/me/pronghorn", "bench", "--model=/home/me/llama/", "--out", "/home/me/a.json", "--against=hf", "x="]
    monkeypatch.setattr(sys, "argv", given)
    assert command_line() == "python pronghorn bench --model=llama --out a.json --against=hf x="


def test_pronghorn_is_imported_where_its_import_is_timed() -> None:
    code = (
        "import sys; from pronghorn.bench.contenders import CONTENDERS; CONTENDERS['pronghorn'].prepare()\n"
        "assert {'pronghorn.models.attach', 'transformers', 'peft'} <= sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
    draw = document_lengths("lognormal", 8192)
    drawn = [draw(rng) for _ in range(4000)]
    assert min(drawn) >= 16 and max(drawn) <= 2048 and 165 < sum(drawn) / len(drawn) < 195
    file = tmp_path / "lengths.json"
    file.write_text("[5, 7, 900]")
    assert {document_lengths(str(file), 100)(rng) for _ in range(50)} == {5, 7}


def test_a_checkpoint_is_written_once_and_loads_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint_of("tiny", tmp_path, seed=0)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint_of("tiny", tmp_path, seed=0) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert checkpoint_of("tiny", tmp_path, seed=1) != folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and (model.model.norm.weight == 1).all()
    assert model.model.embed_tokens.weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    special = [(tokenizer, "bos"), (tokenizer, "eos"), (tokenizer, "pad")]
    assert [getattr(t, f"{name}_token_id") for t, name in special] == [0, 1, 2]
    assert [getattr(model.config, f"{name}_token_id") for _, name in special] == [0, 1, 2]
    assert tokenizer.decode(tokenizer("Größe, 大小").input_ids) == "Größe, 大小"


def test_processes_that_write_checkpoints_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes whose names are alike up to the last dot, and one that two want: that one is written once."""
    written = []

    def write(shape: dict[str, Any], folder: Path, seed: int) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(shape["hidden_size"]))
        time.sleep(0.2)
        (folder / "weights").write_text(str(shape["hidden_size"]))
        written.append(folder)

    monkeypatch.setattr("pronghorn.bench.shapes.write_checkpoint", write)
    names = ["Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.2-1B"]
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda name: checkpoint_of(name, tmp_path / "new", 0), names))
    assert made[0] == made[2] and len(written) == 2
    for name, folder in zip(names, made, strict=True):
        for file in ("config.json", "weights"):
            assert (folder / file).read_text() == str(SHAPES[name]["hidden_size"])


def test_a_checkpoint_that_is_there_needs_nothing_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-seed0").mkdir()
    monkeypatch.setattr("filelock.FileLock", None)
    assert checkpoint_of("tiny", tmp_path, seed=0) == tmp_path / "tiny-seed0"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-seed0"]


def test_a_checkpoint_that_the_disk_has_no_room_for_leaves_it_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(shape: dict[str, Any], folder: Path, seed: int) -> None:
        folder.mkdir()
        (folder / "model-00001-of-00009.safetensors").write_bytes(b"0")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pronghorn.bench.shapes.write_checkpoint", write)
    with pytest.raises(OSError, match="No space left"):
        checkpoint_of("tiny", tmp_path, seed=0)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_shapes_are_the_published_ones(shared: Path) -> None:
    facts = json.loads((shared / "data" / "model_shapes.json").read_text())["models"]
    names = {"Mistral-7B": "Mistral-7B-v0.3", "Gemma-3-1B": "gemma-3-1b", "Gemma-3-4B": "gemma-3-4b"}
    for name, shape in SHAPES.items():
        if name.startswith("tiny") or name in ("Llama-3.2-3B", "Mixtral-8x7B", "gpt-oss-120b"):  # not among the facts
            continue
        known = facts[names.get(name, name)]
        assert {key: known[key] for key in shape if key in known} == {key: shape[key] for key in shape if key in known}
        rope = shape.get("rope_parameters", {"rope_theta": known["rope_theta"]})
        rope = rope.get("full_attention", rope)
        assert rope["rope_theta"] == known["rope_theta"]
        scaling = {key: value for key, value in (known["rope_scaling"] or {}).items() if key != "applies_to"}
        assert scaling.items() <= rope.items()
    tiny = SHAPES["tiny"]
    layer = 2 * (64 * 4 * 16) + 2 * (64 * 2 * 16) + 3 * 64 * tiny["intermediate_size"]
    assert matmul_parameters("tiny") == 2 * layer + 64 * 512  # the head, though its weight is the embedding's


def test_canonical_names() -> None:
    name = "base_model.model.model.layers.0._orig_mod.self_attn.q_proj.lora_A.default.weight"
    assert canonical(name) == "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert canonical("model.norm.weight") == "model.norm.weight"


def test_the_tokenizer_covers_every_byte() -> None:
    assert len(byte_tokenizer(100)) == 4 + 256 <= SHAPES["tiny"]["vocab_size"]


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "Llama-9"], "use one of tiny, SmolLM2-135M"),
        (["--model", "tiny", "--against", "hf,axolotl"], "use some of pronghorn, hf, hf-compile"),
        (["--model", "tiny", "--ablate", "layers=fast"], "layers=stock"),
        (["--model", "tiny", "--ablate", "speed"], "packing_metadata=per_layer_mask"),
        (["--model", "tiny", "--lengths", "none.json"], "none.json"),
        (["--model", "tiny", "--labelled", "0"], "--labelled 0.0 is not in (0, 1]"),
        (["--model", "tiny", "--tokens", "1"], "--tokens 1 is below 2"),
        (["--model", "tiny", "--repeats", "0"], "--repeats 0 is below 1"),
        (["--model", "tiny", "--experts", "lora"], "tiny has no experts"),
        (["--model", "tiny-moe", "--experts", "lora", "--method", "full"], "--experts lora with --method full"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronghorn.bench.step.Worker", None)
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


@pytest.mark.parametrize("command", ["step --model tiny", "ops"])
def test_where_nothing_can_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("pronghorn.bench.step.Worker", None)
    monkeypatch.setattr("pronghorn.bench.ops.Stopwatch", None)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["bench", *command.split(), "--out", str(tmp_path / "file" / "results.json")])
    assert result.exit_code == 1 and "can't be written" in result.output, result.output


# --- processes


def test_a_process_keeps_what_libraries_print_away_from_its_answers(tmp_path: Path) -> None:
    code = (
        "import os; from pronghorn.bench import worker\n"
        "class P:\n"
        "    def hello(self, name):\n"
        "        print('noise'); os.system('echo noise'); return {'name': name}\n"
        "    def full(self): raise RuntimeError('CUDA error: out of memory')\n"  # the driver's, and no class of its own
        "worker.ContenderProcess = P; worker.main()"
    )
    lines = "".join(json.dumps(r) + "\n" for r in ({"command": "hello", "name": "a"}, {"command": "full"}))
    done = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"name": "a"},
        {"error": "RuntimeError: CUDA error: out of memory", "kind": "memory"},
    ]
    assert done.stderr.count("noise") == 2 and "Traceback" in done.stderr


def test_a_process_that_dies_or_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with closing(Worker("contender", os.environ, tmp_path / "log")) as worker:
        with pytest.raises(WorkerError, match="no_such_command"):
            worker.ask("no_such_command")
        worker._process.kill()
        with pytest.raises(WorkerError, match=r"(?s)ended with code -9.*Traceback"):
            worker.ask("rest")


def test_a_process_that_dies_within_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Worker("contender", os.environ, tmp_path / "log")) as worker:
        worker._process.kill()
        monkeypatch.setattr(worker._process, "stdin", io.StringIO())
        monkeypatch.setattr(worker._process, "stdout", io.StringIO('{"steps": [{"forw'))
        with pytest.raises(WorkerError, match="ended with code -9 during 'steps'"):
            worker.ask("steps")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_process_holds_the_lock_on_its_gpu(tmp_path: Path) -> None:
    """`benchmarks/on_a_gpu.sh` opens the lock, and the GPU is taken as long as anybody has it open."""
    lock = (tmp_path / "gpu.lock").open("w")
    os.set_inheritable(lock.fileno(), True)
    with closing(Worker("contender", os.environ, tmp_path / "log")) as worker:
        held = [os.path.realpath(fd) for fd in Path(f"/proc/{worker._process.pid}/fd").iterdir()]
    assert str(tmp_path / "gpu.lock") in held


# --- turns, with processes that only pretend


class FakeWorker:
    """Answers as a process would; `script` says who runs out of memory beside another, crashes, or is red."""

    script: dict[str, str]
    asked: list[str]
    alive: set[str]

    def __init__(self, role: str, environment: Any, log: Path) -> None:
        self.name = log.stem
        self.alive.add(self.name)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
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
) -> tuple[dict[str, Outcome], list[str]]:
    """Measure pronghorn against hf and hf-sdpa, 8 steps each; the outcomes and what was asked, in order.

    Args:
        memory: the limit of all but the one that is `unlimited`.
    """
    kept: list[list[str]] = []
    fake = type("Scripted", (FakeWorker,), {"script": script, "asked": [], "alive": set()})
    monkeypatch.setattr(pairs, "Worker", fake)
    reference = folder / "reference.json"
    Reference(2.0, 1.0, (2.0,), ("w",), 0.0, {"w": 0.0}, "").write(reference)
    names = ("pronghorn", "hf", "hf-sdpa")
    limits = {name: None if name == unlimited else memory for name in names}
    outcomes = {name: Outcome(name, Spec(name, "", "lora", "off", 8, 8, 1, 0, memory=limits[name])) for name in names}
    first, *others = outcomes.values()
    keep = lambda: kept.append([name for name, outcome in outcomes.items() if outcome.told])  # noqa: E731
    Pairs(folder / "rows.json", reference, folder, {}, 8, 2**34, lambda text: None, keep).measure(first, others)
    assert not fake.alive
    assert "hf" in kept[0] and "hf-sdpa" in kept[1] and kept[2] == list(outcomes)  # whatever failed
    return outcomes, fake.asked


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
    assert len(outcomes["pronghorn"].series.parts["step"]) == 16
    assert outcomes["hf"].beside["step_ratio"] == (1.0, 1.0, 1.0) and len(outcomes["hf"].beside["step_ms"]) == 8
    assert all(f"{name} steps {STEPS_A_TURN}" in asked for name in outcomes)


@pytest.mark.parametrize("script", ["memory at load", "memory at gate", "memory at steps", "retries"])
def test_a_pair_that_does_not_fit_is_relaunched_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    outcomes, asked = run_pairs(monkeypatch, tmp_path, hf=script)
    hf = outcomes["hf"]
    assert hf.green and len(hf.series.parts["step"]) == 8 and hf.counts
    assert hf.notes == ["doesn't fit beside pronghorn: every turn in a new process"]
    assert asked.count("hf load") >= 2 and asked.count("pronghorn load") >= 3
    assert hf.loaded["notes"] == ["plans alone"]  # as what was timed did; files are read the first time
    assert script == "memory at load" or hf.loaded["load_s"] == asked.index("hf load") + 1
    assert not outcomes["hf-sdpa"].notes and len(outcomes["pronghorn"].series.parts["step"]) == 16


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

    monkeypatch.setattr("pronghorn.bench.step.Worker", None)
    for arguments, problem in (
        (["--against", "hf"], "--against hf: is unknown"),
        (["--against", "hf:on,axolotl:off"], "--against axolotl:off is unknown"),
        (["--cards", "8Gigs"], "--cards"),
        (["--cards", "8GiB,500MiB"], "500 MiB is less than CUDA and libraries take"),
        (["--out", str(tmp_path)], "can't be written"),
    ):
        monkeypatch.setattr(sys, "argv", ["memory_time.py", "--model", "tiny", *arguments])
        with pytest.raises(PronghornError, match=problem):
            memory_time.main()


def test_a_device_that_holds_only_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, _ = run_pairs(monkeypatch, tmp_path, everybody="needs all memory")
    assert all(outcome.green and outcome.series.turns and outcome.counts for outcome in outcomes.values())
    assert all(len(outcomes[name].notes) == 1 for name in ("hf", "hf-sdpa"))


def test_a_failure_withholds_what_was_measured() -> None:
    outcome = Outcome("hf", Spec("hf", "", "lora", "off", 8, 8, 1, 0), {"green": True, "reasons": []})
    outcome.series, outcome.memory, outcome.counts = Series([[{"step": 1.0}]]), {"peak": 1}, {"syncs": 1}
    outcome.beside = {"contender": "pronghorn"}
    outcome.fail("died")
    assert not outcome.green and outcome.gate["reasons"] == ["died"]
    assert not outcome.series.turns and not (outcome.memory or outcome.counts or outcome.beside)


@pytest.mark.parametrize("script", ["red", "red again", "crash at load", "crash at gate", "crash at steps", "nan"])
def test_who_fails_is_withheld_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    outcomes, asked = run_pairs(monkeypatch, tmp_path, hf=script)
    hf = outcomes["hf"]
    assert not hf.green and len(hf.gate["reasons"]) == 1
    assert not hf.series.turns and not hf.counts and not hf.beside
    assert len(outcomes["hf-sdpa"].series.parts["step"]) == 8 and outcomes["hf-sdpa"].beside
    if script == "red":
        assert not any(line.startswith("hf steps") for line in asked)  # the gate comes first
        assert hf.gate["reasons"][0].startswith("loss is off by 0.5")
    if script == "red again":
        assert hf.gate["reasons"][0].startswith("after its steps: loss is off by 0.5")


def test_without_the_first_s_second_verdict_nobody_has_a_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, _ = run_pairs(monkeypatch, tmp_path, pronghorn="red again")
    assert not outcomes["pronghorn"].green and not outcomes["pronghorn"].series.turns
    assert all(outcomes[name].green and not outcomes[name].beside for name in ("hf", "hf-sdpa"))


def test_who_computes_something_else_after_the_gate_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph may, that is captured when a model has run for a while; adapters that moved are set back."""
    monkeypatch.setattr("pronghorn.bench.contenders.base.LEARNING_RATE", 1e-2)
    rows = make_rows(64, "lognormal", 1.0, SHAPES["tiny"]["vocab_size"], seed=0)
    write_rows(rows, tmp_path / "rows.json")
    checkpoint = str(checkpoint_of("tiny", tmp_path, seed=0))
    spec = Spec("hf", checkpoint, "lora", "off", 64, 64, max(len(row.lengths) for row in rows), seed=0)
    reference = compute_reference(spec, rows[0], tmp_path)
    reference.write(tmp_path / "reference.json")
    process = ContenderProcess()
    process.load(asdict(spec), str(tmp_path / "rows.json"))

    def verdict() -> dict[str, Any]:
        return judge(process.gate(str(tmp_path / "reference.json")), reference)

    assert verdict()["green"]
    process.steps(count=4, warm=0)
    assert verdict()["green"]
    sound = process._built.make_batch
    process._built.make_batch = lambda row: sound(row) | {"position_ids": sound(row)["position_ids"] * 2}
    assert not verdict()["green"]


def test_what_cannot_be_counted_is_still_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, _ = run_pairs(monkeypatch, tmp_path, hf="crash at count", pronghorn="memory at count")
    for name in ("hf", "pronghorn"):
        assert outcomes[name].green and outcomes[name].series.turns
    assert outcomes["hf"].notes == ["launches and synchronisations could not be counted: it crashed"]
    assert outcomes["pronghorn"].counts  # asked last, when it was alone


def test_qlora_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs.importlib.util, "find_spec", lambda name: None)
    result = invoke("--model", "tiny", "--method", "qlora")
    assert result.exit_code == 1 and "pronghorn[nf4]" in result.output


def test_without_the_first_the_others_are_measured_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes, asked = run_pairs(monkeypatch, tmp_path, pronghorn="red")
    assert not outcomes["pronghorn"].green and timed(asked) == ["hf"] * 2 + ["hf-sdpa"] * 2
    assert all(
        len(outcomes[name].series.parts["step"]) == 8 and not outcomes[name].beside for name in ("hf", "hf-sdpa")
    )


def test_who_is_not_installed_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("liger", "", "lora", "off", 8, 8, 1, 0)
    monkeypatch.setattr(pairs.importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else name)
    assert pairs._refusal(spec, cuda=True) == "not installed: pip install liger-kernel"
    monkeypatch.setattr(pairs.importlib.util, "find_spec", lambda name: name)
    assert pairs._refusal(spec, cuda=True) is None
    assert "GPU" in (pairs._refusal(spec, cuda=False) or "")


# --- results


def test_figures_and_table(tmp_path: Path) -> None:
    """2,000 weights in linears, 100 tokens in 2 ms: 4N is 0.4 GFLOP/s of a ceiling of 1."""
    spec = Spec("pronghorn", "", "lora", "off", 100, 50, 2, 0)
    rows = make_rows(100, "one", 0.25, 512, seed=0)
    prepared = Prepared(spec, rows, tmp_path, {"matmul_tflops": 0.001}, 2000, "GPU", device_bytes=2**37)
    steps = [{"forward": 0.5, "backward": 1.0, "optimizer": 0.5, "step": step} for step in (1.0, 2.0, 6.0)]
    ours = Outcome(
        "pronghorn", spec, {"green": True, "reasons": []}, Series([steps]), {"peak": 3 * 2**30}, {"syncs": 0}
    )
    ours.loaded, ours.first_step_s = {"import_s": 1.25, "load_s": 1.0, "notes": ["[a] note"]}, 4.0
    red = Outcome("hf", spec)
    red.fail("loss is off")
    options = StepOptions("tiny", tokens=100, lengths="one", labelled=0.25)
    results = [result_of(options, outcome, prepared) for outcome in (ours, red)]
    assert results[0].extra["mfu"]["4N"] == pytest.approx(0.4) and results[0].extra["mfu"]["6N"] == pytest.approx(0.6)
    assert results[0].extra["tokens_per_s"] == pytest.approx({"real": 50_000, "supervised": 12_500})
    assert results[1].timings_ms == {} and "tokens_per_s" not in results[1].extra
    cells = table(results)
    assert cells["gate"] == ["green", "FAILED"]
    assert cells["step, ms (min to max)"] == ["2.0 (1.0 to 6.0)", "–"]
    assert cells["MFU at 4N"] == ["40.0%", "–"] and cells["supervised tokens/s"] == ["12,500", "–"]
    assert cells["peak memory, GiB"] == ["3.00", "–"] and cells["launches a step"] == ["–", "–"]
    assert cells["synchronisations a step"] == ["0", "–"] and cells["first step, s"] == ["4.0", "–"]

    results[0].gate["green"] = False  # a file can say anything
    assert table(results)["tokens/s"] == ["–", "–"]


def table(results: list[Result]) -> dict[str, list[str]]:
    """The table's cells by the name of their row."""
    console = Console(width=160)
    with console.capture() as captured:
        console.print(step_table(results))
    rows = [line.split("│")[1:-1] for line in captured.get().splitlines() if line.startswith("│")]
    return {name.strip(): [cell.strip() for cell in others] for name, *others in rows}


# --- the whole command


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_run_that_is_ended_leaves_no_checkpoint_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pronghorn", "bench", "step", "--model", "tiny", "--tokens", "64"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL) as run:
        while not list(tmp_path.glob("pronghorn-bench-*/tiny-seed0")) and run.poll() is None:
            time.sleep(0.1)
        run.terminate()
    assert run.returncode == 130 and not list(tmp_path.glob("pronghorn-bench-*"))


@pytest.mark.slow
def test_a_whole_run_on_the_cpu(tmp_path: Path) -> None:
    """The README's own command, with more contenders."""
    readme = BASH[-1].removeprefix("pronghorn bench step ").split()
    assert readme == ["--model", "tiny", "--tokens", "256", "--against", "hf"]
    out = tmp_path / "results.json"
    result = invoke(
        *readme, "--labelled", "0.5", "--repeats", "2", "--out", str(out),
        "--against", "hf,unsloth", "--ablate", "packing_metadata=per_layer",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "On the CPU" in result.output and "unsloth: not installed: pip install unsloth" in result.output
    ours, ablated, hf, unsloth = read_results(out)
    assert ablated.contender == "pronghorn, packing_metadata=per_layer" and hf.contender == "hf"
    for found in (ours, ablated, hf):
        assert found.gate["green"] and found.extra["on_cpu"] and "CPU" in found.device
        assert found.workload.labelled_share == 0.5 and found.workload.shape == "tiny"
        speed = found.extra["tokens_per_s"]
        assert speed["real"] == pytest.approx(256 / found.median("step") * 1e3)
        assert 0.4 < speed["supervised"] / speed["real"] < 0.6
        assert found.extra["import_s"] > 0 and found.extra["first_step_s"] > 0
    assert len(hf.timings_ms["step"]) == 2 and len(ours.timings_ms["step"]) == 4
    assert hf.extra["beside"]["contender"] == "pronghorn" and "ratio" not in ours.extra["beside"]
    assert ours.gate["loss"] == pytest.approx(hf.gate["loss"], rel=1e-5)  # the same weights, adapters and rows
    assert not unsloth.gate["green"] and unsloth.timings_ms == {}
    out.write_text(json.dumps([asdict(ours)]))
    assert read_results(out)[0] == ours


@pytest.mark.slow
def test_a_folder_is_a_model_too(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given relative to the current folder; failing its own gate ends the command with code 1."""
    monkeypatch.chdir(stories.parent)
    out = tmp_path / "results.json"
    arguments = ["--model", stories.name, "--tokens", "96", "--lengths", "one", "--repeats", "1", "--out", str(out)]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    (found,) = read_results(out)
    assert found.workload.shape == stories.name and found.gate["isolation"] is None  # one document
    red = replace(found, gate={"green": False, "reasons": ["planted"]}, timings_ms={})
    monkeypatch.setattr("pronghorn.bench.step.bench_step", lambda *_: [red])
    result = invoke(*arguments)
    assert result.exit_code == 1 and "FAILED" in result.output and "planted" in result.output
    assert read_results(out)[0].timings_ms == {}


def test_what_ran_is_told_for_the_steps_own_autocast(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 weights' steps compute in bf16 on a GPU: attention goes another way than without autocast."""
    from pronghorn.bench.contenders import pronghorn as contender
    from pronghorn.models.attach import Handle

    asked: list[Any] = []
    monkeypatch.setattr(contender, "autocast_dtype", lambda method: method)
    monkeypatch.setattr(Handle, "paths", lambda self, autocast: asked.append(autocast) or [])
    contender.build(Spec("pronghorn", str(stories), "full", "off", 32, 32, 1, 0)).paths()
    assert asked == ["full"]


def test_unsloth_finds_the_argument_it_looks_for() -> None:
    from inspect import signature

    from pronghorn.bench.contenders.unsloth import _with_gqa_argument

    def given(query: int, max_q: int, *, scale: float | None = None) -> tuple[int, int, float | None]:
        return query, max_q, scale

    wrapped = _with_gqa_argument(given)
    assert list(signature(wrapped).parameters) == ["query", "max_q", "scale", "enable_gqa"]
    assert wrapped(1, 2, scale=0.5, enable_gqa=True) == (1, 2, 0.5)
