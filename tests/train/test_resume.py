"""A run that survives: killed at any moment, stopped by a signal, taken up again, to the same bits."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from transformers.utils import logging

from pronghorn import state
from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, DataError, PronghornError, RunStopped
from pronghorn.records.record import RunRecord
from pronghorn.train.checkpoint import Fingerprint, checkpoints, clear_leftovers, seal
from pronghorn.train.control import RunControl, trained_seconds
from pronghorn.train.run import run
from pronghorn.train.run_folder import lock_folder
from pronghorn.train.run_state import open_run_state
from support.resumed import same_run
from support.runs import QUIET, Make, finish, start, stop_at


@pytest.fixture(autouse=True)
def indeterministic_again() -> Iterator[None]:
    """Deterministic mode is of the process: other tests shall not get it."""
    backend = torch.backends.cudnn
    before = backend.deterministic, backend.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    backend.deterministic, backend.benchmark = before


LORA = {"train": {"eval_steps": 5, "save_steps": 1}}
FULL = {
    "adapter": {"method": "full"},
    "train": {"gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 10, "epochs": 1.0},
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("changes", "kills", "resumes"),
    [
        pytest.param(LORA, 2, 1, id="LoRA with dropout"),
        pytest.param(LORA, 15, 5, id="LoRA with dropout, often", marks=pytest.mark.slow),
        pytest.param(FULL, 15, 5, id="full, accumulated, often", marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments(
    make: Make, tmp_path: Path, changes: dict[str, Any], kills: int, resumes: int
) -> None:
    """kill -9 at moments all over the run; whatever was lost, the end is the same to the bit. More often on a machine
    so busy that hardly a kill comes after the first checkpoint."""
    started = time.monotonic()
    assert finish(start(make("whole", **changes))) == 0
    whole = time.monotonic() - started
    chance, killed, resumed, number = random.Random(7), 0, 0, 0
    while killed < kills or (resumed < resumes and killed < 4 * kills):
        name, number = f"run{number}", number + 1
        for _ in range(3):
            process = start(make(name, **changes))
            time.sleep(chance.uniform(0.05, 0.9) * whole)
            os.kill(process, signal.SIGKILL)
            status = finish(process)
            killed += status == -signal.SIGKILL
            if status == 0:  # it was done before
                break
        if not (tmp_path / name / "run.json").exists():
            assert finish(start(make(name, **changes))) == 0
        resumed += len(RunRecord.read(tmp_path / name).resumed_at)
        same_run(tmp_path / "whole", tmp_path / name)
    assert resumed >= resumes, "hardly a kill came after the first checkpoint"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(make: Make, tmp_path: Path, number: signal.Signals, monkeypatch: Any) -> None:
    run(make("whole"), QUIET)
    steps = iter(range(100))

    def at_the_fifth(self: Any, *args: Any, **kwargs: Any) -> None:
        if next(steps) == 4:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # torchrun passes on a Ctrl-C that its processes got too

    monkeypatch.setattr(RunControl, "on_step_begin", at_the_fifth)
    before = signal.getsignal(number)
    with pytest.raises(RunStopped, match=f"stopped by {number.name} after step 5; checkpoint-5 is saved") as stopped:
        run(make("run"), QUIET)
    assert stopped.value.signal == number and signal.getsignal(number) == before
    assert checkpoints(tmp_path / "run")[-1].name == "checkpoint-5" and not (tmp_path / "run/run.json").exists()
    record = run(make("run"), QUIET)
    assert record.resumed_at == [5] and record.stopped == "max_steps"
    same_run(tmp_path / "whole", tmp_path / "run")


def test_a_signal_leaves_the_last_checkpoint_where_one_is_kept_and_another_is_the_best(
    make: Make, tmp_path: Path, monkeypatch: Any
) -> None:
    """transformers ends a training by deleting the last one then."""
    evaluations = iter([1.0, 2.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    monkeypatch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 5))
    with pytest.raises(RunStopped, match="checkpoint-5 is saved"):
        run(make("run", train={"eval_steps": 2, "save_steps": 4, "keep_checkpoints": 1}), QUIET)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-5"]


def test_a_second_signal_later_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.train.control.SAME_SIGNAL", -1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a test runner may have changed
    try:
        with pytest.raises(KeyboardInterrupt), RunControl(None, None, None).signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_first_signal_is_the_one_that_counts() -> None:
    control = RunControl(None, None, None)
    with control.signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert control._asked == signal.SIGTERM


def test_the_command_line_says_how_to_go_on(make: Make, tmp_path: Path) -> None:
    recipe = make("run", train={"max_steps": 2000, "save_steps": 5})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    process = os.fork()  # which spares it the imports
    if not process:
        status: Any = 9
        try:
            with (tmp_path / "stdout").open("w") as sys.stdout, (tmp_path / "stderr").open("w") as sys.stderr:
                app(["train", str(tmp_path / "recipe.yaml")])
        except SystemExit as end:
            status = end.code
        finally:
            os._exit(status)
    deadline = time.monotonic() + 120
    while not checkpoints(tmp_path / "run"):
        assert os.waitpid(process, os.WNOHANG) == (0, 0) and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process, signal.SIGTERM)
    assert finish(process) == 128 + signal.SIGTERM
    errors = (tmp_path / "stderr").read_text()
    assert "stopped by SIGTERM after step" in errors and "run the same command to go on" in errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_on_a_gpu(make: Make, tmp_path: Path, monkeypatch: Any, dtype: str, method: str) -> None:
    """Packed flash attention, CUDA's random state and, in float16, the loss scaler's: all go on where they were."""
    changes: dict[str, Any] = {"precision": {"dtype": dtype}, "adapter": {"method": method, "lora_dropout": 0.1}}
    run(make("whole", **changes), QUIET)
    with monkeypatch.context() as patch:
        patch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 5))
        with pytest.raises(RunStopped):
            run(make("run", **changes), QUIET)
    assert (tmp_path / "run/checkpoint-5/scaler.pt").exists() == (dtype == "float16")
    assert run(make("run", **changes), QUIET).resumed_at == [5]
    same_run(tmp_path / "whole", tmp_path / "run")
    if dtype == "float16":
        scalers = [torch.load(tmp_path / name / "checkpoint-12/scaler.pt") for name in ("whole", "run")]
        assert scalers[0] == scalers[1]


def test_a_changed_recipe(make: Make, unfinished: Path) -> None:
    changed = make("run", train={"learning_rate": 1e-3, "save_steps": 3}, adapter={"r": 4, "lora_alpha": 8})
    with pytest.raises(ConfigError) as refused:
        run(changed, QUIET)
    assert "adapter.lora_alpha was 16, is 8; train.learning_rate was 0.01, is 0.001" in refused.value.problem
    assert "save_steps" not in str(refused.value) and "--allow" in refused.value.remedy
    record = run(changed, QUIET, allow=True)
    assert record.resumed_at == [5] and record.recipe["train"]["learning_rate"] == 1e-3 and len(record.steps) == 12


@pytest.mark.parametrize("scheduler", ["linear", "constant"])
def test_a_changed_learning_rate_and_weight_decay_train(
    make: Make, unfinished: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    """A checkpoint's optimiser and schedule bring theirs along."""
    decays: list[list[float]] = []

    def on_step_end(self: RunControl, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        decays.append([group["weight_decay"] for group in kwargs["optimizer"].param_groups])

    monkeypatch.setattr(RunControl, "on_step_end", on_step_end)
    changes = {"learning_rate": 1e-4, "weight_decay": 0.1, "lr_scheduler": scheduler, "logging_steps": 1}
    record = run(make("run", train=changes), QUIET, allow=True)
    expected = [1e-4 * (11 - done) / 11 if scheduler == "linear" else 1e-4 for done in range(4, 11)]
    assert [step["learning_rate"] for step in record.steps[5:]] == pytest.approx(expected, rel=1e-6)
    assert decays == [[0.1, 0.0]] * 7


@pytest.mark.parametrize(
    ("begun", "changes", "problem"),
    [
        ({}, {"optimizer": "adafactor"}, "train.optimizer was 'adamw_torch_fused', is 'adafactor'"),
        ({}, {"lr_scheduler": "greedy", "eval_steps": 4}, "train.lr_scheduler was 'linear', is 'greedy'"),
        (
            {"lr_scheduler": "greedy", "eval_steps": 4},
            {"learning_rate": 1e-3},
            "train.learning_rate was 0.01, is 0.001",
        ),
    ],
)
def test_states_of_another_optimiser_or_schedule_are_refused_even_when_allowed(
    make: Make, unfinished: Path, begun: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    journal = unfinished / "journal.json"
    table = json.loads(journal.read_text())
    table["recipe"]["train"] |= begun
    journal.write_text(json.dumps(table))
    changed = make("run", train={**begun, **changes})
    with pytest.raises(ConfigError, match=problem):
        run(changed, QUIET, allow=True)
    for folder in checkpoints(unfinished):
        shutil.rmtree(folder)
    assert open_run_state(unfinished, changed, allow=True).recipe == changed.to_dict()


@pytest.mark.parametrize("asked", [{}, {"eval_rows": 1}, {"eval": None}], ids=["other file", "fewer rows", "none"])
def test_the_loss_before_is_of_the_held_out_rows_of_now(make: Make, unfinished: Path, asked: dict[str, Any]) -> None:
    """What is held out may be changed with --allow: the losses before and after are of the same rows."""
    journal = unfinished / "journal.json"
    table = json.loads(journal.read_text())
    if not asked:
        table["data"]["eval"] = "the hash of what the file held"
    journal.write_text(json.dumps(table | {"before": 99.0}))
    resumed = run(make("run", data=asked), QUIET, allow=True).heldout
    expected = run(make("whole", data=asked, train={"max_steps": 1}), QUIET).heldout
    assert (resumed["before"], resumed["rows"]) == (expected["before"], expected["rows"])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"data": {"eval_rows": 1}}, [3.0, 2.5]),
        ({"adapter": {"lora_alpha": 7}}, [3.0, 2.5]),
        ({"train": {"eval_steps": None}}, [1.0]),
    ],
    ids=str,
)
def test_the_best_is_of_the_held_out_rows_of_now(
    make: Make, tmp_path: Path, monkeypatch: Any, asked: dict[str, Any], expected: list[float]
) -> None:
    """And of adapters that weigh what they do now; earlier weights would be another model. Nor is it one of before,
    where nothing is evaluated any more: the steps since then would be for nothing."""
    evaluations = iter([1.0, 3.0, 2.5])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    table: dict[str, Any] = {"eval_steps": 4}
    with monkeypatch.context() as patch, pytest.raises(RunStopped):
        patch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 5))
        run(make("run", train=table), QUIET)
    record = run(make("run", **{**asked, "train": table | asked.get("train", {})}), QUIET, allow=True)
    assert [evaluation["loss"] for evaluation in record.evaluations] == expected
    kept = (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes()
    assert kept == (tmp_path / "run/checkpoint-12/adapter_model.safetensors").read_bytes()


def test_a_longer_run_when_allowed(make: Make, unfinished: Path) -> None:
    record = run(make("run", train={"max_steps": 14}), QUIET, allow=True)
    assert [step["step"] for step in record.steps] == list(range(1, 15))


def test_going_on_warns_of_nothing(make: Make, unfinished: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers compares arguments with the checkpoint's state, where a share of the run is a number of steps."""
    logging.enable_propagation()
    run(make("run"), QUIET)
    logging.disable_propagation()
    assert "do not match" not in caplog.text


def test_what_is_free_to_change_changes(make: Make, unfinished: Path, tmp_path: Path) -> None:
    """transformers goes on with the checkpoint's intervals."""
    record = run(make("run", train={"save_steps": 3, "logging_steps": 4, "keep_checkpoints": 9}), QUIET)
    assert [path.name for path in checkpoints(tmp_path / "run")][-3:] == [
        "checkpoint-6",
        "checkpoint-9",
        "checkpoint-12",
    ]
    assert [step["step"] for step in record.steps] == [1, 2, 3, 4, 5, 6, 8, 9, 12]


@pytest.mark.slow
def test_a_longer_run_after_the_last_step(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunRecord, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        run(make("run"), QUIET)
    shutil.rmtree(tmp_path / "run/adapter")
    record = run(make("run", train={"max_steps": 14}), QUIET, allow=True)
    assert [step["step"] for step in record.steps] == list(range(1, 15)) and record.resumed_at == [12]


@pytest.mark.slow
def test_checkpoints_that_were_deleted_after_the_last_step(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunRecord, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        run(make("run"), QUIET)
    for folder in checkpoints(tmp_path / "run"):
        shutil.rmtree(folder)
    record = run(make("run"), QUIET)
    assert len(record.steps) == 12 and record.resumed_at == []


def test_another_number_of_processes(make: Make, unfinished: Path) -> None:
    path = unfinished / "journal.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))
    told = Console(file=io.StringIO(), width=200)
    assert len(run(make("run"), told).steps) == 12
    assert "Began on 2 GPUs, goes on with 1: the same rows a step" in told.file.getvalue()
    assert json.loads(path.read_text())["processes"] == 1


def test_two_runs_in_one_folder(make: Make, unfinished: Path, monkeypatch: Any) -> None:
    """As when torchrun is killed, and its processes go on."""
    monkeypatch.setattr("pronghorn.train.run_folder.PATIENCE", 0.1)
    hold = "import sys; from filelock import FileLock\nwith FileLock(sys.argv[1]): print(flush=True), sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(unfinished / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        before = {path: path.stat().st_mtime_ns for path in unfinished.iterdir()}
        with pytest.raises(ConfigError, match="another process trains the run in"):
            run(make("run"), QUIET)
        assert {path: path.stat().st_mtime_ns for path in unfinished.iterdir()} == before
        other.kill()
    assert run(make("run"), QUIET).resumed_at == [5]


def test_killed_before_the_journal(make: Make, tmp_path: Path) -> None:
    with ExitStack() as locked:
        lock_folder(tmp_path / "run", locked)
    assert (tmp_path / "run/.lock").exists() and len(run(make("run"), QUIET).steps) == 12


def test_opening_a_run_moves_nothing(make: Make, unfinished: Path) -> None:
    """Whoever holds the lock clears up, before."""
    put_aside = checkpoints(unfinished)[-1].rename(unfinished / f".checkpoint-5.{16 * '0'}.old")
    open_run_state(unfinished, make("run"), allow=False)
    assert put_aside.is_dir()
    assert run(make("run"), QUIET).resumed_at == [5]


def _truncate(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated weights": (
        lambda f: _truncate(f, "adapter_model.safetensors"),
        r"adapter_model\.safetensors: [\d,]+ bytes",
    ),
    "truncated optimiser": (lambda f: _truncate(f, "optimizer.pt"), r"optimizer\.pt: [\d,]+ bytes instead of"),
    "no scheduler": (lambda f: (f / "scheduler.pt").unlink(), r"scheduler\.pt: missing"),
    "truncated manifest": (lambda f: _truncate(f, "manifest.json"), r"manifest\.json: not valid JSON"),
    "another schema": (
        lambda f: (f / "manifest.json").write_text('{"schema": "pronghorn-checkpoint-v9"}'),
        "schema 'pronghorn-checkpoint-v9', not 'pronghorn-checkpoint-v2'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint(make: Make, unfinished: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    newest = checkpoints(unfinished)[-1]
    spoil(newest)
    with pytest.raises(DataError, match=message):
        run(make("run"), QUIET)


def test_a_damaged_checkpoint_where_nobody_can_be_asked(
    make: Make, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoints(unfinished)[-1] / "optimizer.pt").unlink()
    monkeypatch.setattr(sys, "stdin", None)  # `<&-`
    with pytest.raises(DataError, match="give --allow-older to go on from checkpoint-4"):
        run(make("run"), Console(file=io.StringIO(), force_terminal=True))


@pytest.mark.slow
def test_the_remedy_for_a_damaged_checkpoint_works(make: Make, unfinished: Path, tmp_path: Path) -> None:
    run(make("whole"), QUIET)
    shutil.rmtree(checkpoints(unfinished)[-1])
    assert run(make("run"), QUIET).resumed_at == [4]
    same_run(tmp_path / "whole", unfinished)


def test_a_checkpoint_of_another_model(make: Make, unfinished: Path, stories: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(stories, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    moved = make("run", model={"name": str(other)})
    with pytest.raises(ConfigError, match=r"model\.name was"):
        run(moved, QUIET)
    with pytest.raises(DataError, match="checkpoint-5 is a checkpoint of another model: its frozen weights"):
        run(moved, QUIET, allow=True)
    with pytest.raises(DataError, match="its trainable weights have other names, shapes or dtypes"):
        run(make("run", adapter={"r": 8}), QUIET, allow=True)


@pytest.mark.parametrize(
    ("change", "is_adapter"),
    [
        pytest.param({"rms_norm_eps": 1e-3}, False, id="epsilon"),
        pytest.param({"hidden_act": "gelu"}, False, id="activation"),
        pytest.param({"lora_alpha": 64}, True, id="scale of an adapter that is trained on"),
    ],
)
def test_a_model_whose_configuration_changed(
    make: Make, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], is_adapter: bool
) -> None:
    model = tmp_path / "model"
    if is_adapter:
        run(make("first", train={"max_steps": 1}), QUIET)
        shutil.copytree(tmp_path / "first/adapter", model)
    else:
        shutil.copytree(stories, model)
    changes = {"model": {"name": str(model)}, "adapter": {"lora_dropout": 0.0}}
    with monkeypatch.context() as patch:
        patch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 5))
        with pytest.raises(RunStopped):
            run(make("run", **changes), QUIET)
    file = model / ("adapter_config.json" if is_adapter else "config.json")
    table = json.loads(file.read_text())
    file.write_text(json.dumps(table | change))
    with pytest.raises(ConfigError, match=r"configuration in .+ changed since the run began"):
        run(make("run", **changes), QUIET)
    file.write_text(json.dumps(table if is_adapter else table | {"transformers_version": "4.0"}))
    assert run(make("run", **changes), QUIET).resumed_at == [5]


def test_a_model_whose_configuration_another_version_noted(make: Make, unfinished: Path) -> None:
    journal = unfinished / "journal.json"
    table = json.loads(journal.read_text())
    journal.write_text(json.dumps(table | {"model": "4.0 of another form"}))
    assert run(make("run"), QUIET).resumed_at == [5]
    assert json.loads(journal.read_text())["model"] == table["model"]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{", DataError, "not valid JSON"),
        ('{"schema": "pronghorn-journal-v9"}', DataError, "schema 'pronghorn-journal-v9'"),
        (None, ConfigError, "is not empty, and no run was begun there"),
    ],
)
def test_a_folder_that_is_no_run(make: Make, tmp_path: Path, content: str | None, error: Any, message: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ("notes.txt" if content is None else "journal.json")).write_text(content or "mine")
    with pytest.raises(error, match=message):
        run(make("run"), QUIET)


def test_killed_when_the_record_is_written(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """From then on the run is finished: its cards must be there."""
    monkeypatch.setattr("pronghorn.train.run.RunRecord.write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(make("run", train={"max_steps": 1}), QUIET)
    assert all((tmp_path / "run" / folder / "README.md").is_file() for folder in (".", "adapter"))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("noted", [True, False])
def test_killed_after_the_last_step(make: Make, tmp_path: Path, monkeypatch: Any, noted: bool) -> None:
    """What is left is to save and to judge: not a step more is trained, whether or not the journal has the end."""
    run(make("whole"), QUIET)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunRecord, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        run(make("run"), QUIET)
    shutil.rmtree(tmp_path / "run/adapter")
    if not noted:
        journal = tmp_path / "run/journal.json"
        journal.write_text(journal.read_text().replace('"trained": 12', '"trained": null'))
    weights = tmp_path / "run/checkpoint-12/adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    with pytest.raises(DataError, match="bytes instead of"):
        run(make("run"), QUIET)
    weights.write_bytes(content)
    record = run(make("run"), QUIET)
    assert len(record.steps) == 12 and record.resumed_at == []
    same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_checkpoints_by_minutes_count_and_best(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    evaluations = iter([3.0, 1.0, 2.0, 2.5, 2.25, 9.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    train = {"save_steps": None, "save_minutes": 1e-6, "keep_checkpoints": 2, "eval_steps": 2, "patience": 3}
    record = run(make("run", train=train), QUIET)
    assert record.stopped == "patience" and [e["loss"] for e in record.evaluations] == [3.0, 1.0, 2.0, 2.5, 2.25]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4", "checkpoint-9", "checkpoint-10"]
    kept = (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes()
    assert kept == (tmp_path / "run/checkpoint-4/adapter_model.safetensors").read_bytes()
    state = json.loads((tmp_path / "run/checkpoint-10/trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]) == tmp_path / "run/checkpoint-4"


def test_killed_after_patience_ran_out(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """The record says why training ended although the journal was not told."""
    evaluations = iter([1.0, 2.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    recipe = make("run", train={"eval_steps": 2, "patience": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunRecord, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        run(recipe, QUIET)
    shutil.rmtree(tmp_path / "run/adapter")
    journal = tmp_path / "run/journal.json"
    journal.write_text(json.dumps(json.loads(journal.read_text()) | {"trained": None, "stopped": None}))
    record = run(recipe, QUIET)
    assert record.stopped == "patience" and [step["step"] for step in record.steps][-1] == 4


def test_a_signal_is_why_a_run_stops_whose_patience_ends_with_the_same_step(make: Make, monkeypatch: Any) -> None:
    evaluations = iter([1.0, 2.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    recipe = make("run", train={"eval_steps": 2, "patience": 1})
    with monkeypatch.context() as patch, pytest.raises(RunStopped, match="stopped by SIGTERM after step 4"):
        patch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 4))
        run(recipe, QUIET)
    assert run(recipe, QUIET).stopped == "patience"


def test_moved_after_the_last_step(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """The best weights are looked for where the run is, not where it was."""
    evaluations = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunRecord, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        run(make("run", train={"eval_steps": 4}), QUIET)
    shutil.rmtree(tmp_path / "run/adapter")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert run(make("moved", train={"eval_steps": 4}), QUIET).kept_step == 4
    kept, best = (tmp_path / "moved" / name / "adapter_model.safetensors" for name in ("adapter", "checkpoint-4"))
    assert kept.read_bytes() == best.read_bytes()


@pytest.mark.slow
def test_what_a_better_evaluation_saves_has_the_log_so_far(make: Make, tmp_path: Path) -> None:
    run(make("run", train={"save_steps": None, "eval_steps": 2, "logging_steps": 100, "keep_checkpoints": 9}), QUIET)
    state = json.loads((checkpoints(tmp_path / "run")[0] / "trainer_state.json").read_text())
    assert (
        state["global_step"] == 2
        and trained_seconds(SimpleNamespace(**state)) > state["log_history"][-1]["eval_runtime"]
    )


@pytest.mark.slow
def test_no_run_is_quiet_for_long(make: Make, monkeypatch: Any) -> None:
    """A hundredth of a long run may be many minutes, or all that `max_minutes` leaves of it."""
    changes = {"save_steps": None, "logging_steps": 100}
    assert [step["step"] for step in run(make("plain", train=changes), QUIET).steps] == [12]
    monkeypatch.setattr("pronghorn.train.control.LOG_SECONDS", -1.0)
    assert [step["step"] for step in run(make("slow", train=changes), QUIET).steps] == list(range(1, 13))


@pytest.mark.slow
def test_the_last_weights_when_the_best_are_not_asked_for(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    evaluations = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    run(make("run", train={"eval_steps": 4, "load_best": False}), QUIET)
    kept = (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes()
    assert kept == (tmp_path / "run/checkpoint-12/adapter_model.safetensors").read_bytes()
    assert kept != (tmp_path / "run/checkpoint-4/adapter_model.safetensors").read_bytes()


def test_clocks_of_saves_logs_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("pronghorn.train.control.time", SimpleNamespace(monotonic=lambda: now))
    control = RunControl(max_minutes=10, save_minutes=2, patience=None)
    state = SimpleNamespace(
        log_history=[{"step_seconds": 50.0, "eval_runtime": 10.0}],
        global_step=5,
        max_steps=9,
        compute_steps=lambda *_: None,
    )
    args: Any = SimpleNamespace(device=torch.device("cpu"))

    def step(seconds: float) -> str:
        nonlocal now
        now += seconds
        asked = SimpleNamespace(should_save=False, should_log=False, should_evaluate=False, should_training_stop=False)
        control.on_step_end(args, state, asked)
        if asked.should_log:
            control.on_log(args, state, asked)
        if asked.should_save:
            control.on_save(args, state, asked)
        return " ".join(name.rpartition("_")[2] for name, wanted in vars(asked).items() if wanted)

    for _ in range(2):
        control.on_train_begin(args, state, None)
        assert [step(seconds) for seconds in (29, 2, 29, 59, 2, 29)] == ["", "log", "", "log", "save log", ""]
        assert step(389) == "save log" and control.stopped is None
        assert step(2) == "save log stop"  # after 541 seconds, and 60 before
        assert control.stopped == (None if state.global_step == 9 else "max_minutes") and control.signal == 0
        state.global_step, control.stopped = 9, None  # it was the last step anyway


@pytest.mark.slow
def test_minutes_count_over_resumes(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """The time limit is of the whole run, not of each process."""
    with monkeypatch.context() as patch:
        patch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 5))
        with pytest.raises(RunStopped):
            run(make("run"), QUIET)
    path = tmp_path / "run/checkpoint-5/trainer_state.json"
    table = json.loads(path.read_text())
    table["log_history"][0]["step_seconds"] = 3600.0
    path.write_text(json.dumps(table))
    manifest = json.loads((path.parent / state.MANIFEST).read_text())
    seal(path.parent, Fingerprint(**manifest["model"]), manifest["recipe"], manifest["step_rows"])
    record = run(make("run", train={"max_minutes": 59}), QUIET)
    assert record.stopped == "max_minutes" and len(record.steps) == 6 and record.seconds > 3600


def test_leftovers_of_a_killed_process(tmp_path: Path) -> None:
    """What was being written goes; a whole checkpoint that had been put aside for its successor comes back."""
    old, tail = ".checkpoint-{}." + 16 * "0" + ".old", f".{16 * '0'}.tmp"
    names = [f".checkpoint-4{tail}", *(old.format(step) for step in (2, 3, 4)), "checkpoint-4"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
        seal(tmp_path / name, Fingerprint("a", "b"), None, 1)
    (tmp_path / old.format(3) / "which").unlink()
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert (tmp_path / "checkpoint-4/which").read_text() == "checkpoint-4"


def test_ranks_agree(tmp_path: Path) -> None:
    """A signal on one rank and a clock on the other: both hear of both."""
    import torch
    import torch.distributed as dist

    processes = []
    for rank in range(2):
        process = os.fork()
        if not process:
            status = 9
            try:
                store = dist.FileStore(str(tmp_path / "store"), 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                wishes = [[15, 0, 1], [0, 1, 0]][rank]
                status = 0 if RunControl(None, None, None)._agree(wishes, torch.device("cpu")) == [15, 1, 1] else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        processes.append(process)
    assert [finish(process) for process in processes] == [0, 0]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"patience": 2}, "train.patience counts evaluations"),
        ({"report_to": ["wandb"]}, "wandb is not installed: pip install wandb"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
        ({"save_minutes": 0}, "save_minutes"),
    ],
)
def test_recipes_that_make_no_sense(make: Make, tmp_path: Path, train: dict[str, Any], message: str) -> None:
    recipe = make("run").to_dict()
    recipe["train"] |= train
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(PronghornError, match=message):
        Recipe.load(tmp_path / "recipe.yaml")
