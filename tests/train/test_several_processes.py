"""A recipe on several processes: started together, the same steps as on one, ended together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from pronghorn.config.checks import share_of_step
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError
from pronghorn.train.run import run as train_run
from support.launched import Launch, launch
from support.runs import QUIET
from support.several import Make, recipes, same, same_bits, steps, stopped_at

START = """
import sys, typer
from pronghorn.cli.errors import plain_errors
from pronghorn.cli.processes import start
try:
    with plain_errors(False):
        sys.exit(start(int(sys.argv[1]), ["train", *sys.argv[2:]]))
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


@pytest.fixture(scope="module")
def recipe(stories: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return recipes(stories, shared, tmp_path_factory.mktemp("several"))


def begin(processes: int, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-c", START, str(processes), *arguments]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def started(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As the command itself does it, each process by its own interpreter."""
    process = begin(processes, *arguments)
    output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess([], process.returncode, output, errors)


def train(processes: int, file: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return launch(processes, file, *arguments, folder=Path(file).parent)


WAYS = (2, started), (3, train), (4, train)


@pytest.fixture(scope="module")
def alone(recipe: Make) -> Path:
    file, run = recipe("alone")
    assert len(train_run(Recipe.load(Path(file)), QUIET).steps) == 10
    return run


@pytest.mark.parametrize(
    ("processes", "run_by"), [(2, train), *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS)]
)
def test_steps_are_the_same_on_any_number_of_processes(
    recipe: Make, alone: Path, processes: int, run_by: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    accumulation = {"gradient_accumulation_steps": 4}
    if processes == 3:  # four rows can't be shared by three: three micro-batches of four rows can
        accumulation = {"gradient_accumulation_steps": 3}
        file, alone = recipe("alone-of-3", **accumulation)
        assert train(1, file).returncode == 0
    file, run = recipe(f"on-{processes}-{run_by.__name__}", **accumulation)
    done = run_by(processes, file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Held-out loss before training") == 1
    assert f"Rows dealt to {processes} processes" in done.stdout
    same(run, alone)


@pytest.mark.slow
def test_layers_that_are_shared_train_the_same(recipe: Make, alone: Path) -> None:
    file, run = recipe("shared", {"strategy": "sharded"})
    done = train(2, file, "memory.gradient_checkpointing=true")
    assert done.returncode == 0, done.stderr
    assert "Each of 2 processes holds a part of every layer's weights" in done.stdout
    paths = {path["part"]: path["path"] for path in json.loads((run / "run.json").read_text())["paths"]}
    assert paths["layers' weights"] == "a part in each of 2 processes"
    same(run, alone)


@pytest.mark.slow
def test_whole_weights_train_the_same(recipe: Make) -> None:
    runs = []
    for processes in (1, 2):
        file, run = recipe(f"full-{processes}", max_steps=4, learning_rate=1e-3)
        done = train(processes, file, "adapter.method=full")
        assert done.returncode == 0, done.stderr
        runs.append(run)
    assert [loss for loss, *_ in steps(runs[1])] == pytest.approx([loss for loss, *_ in steps(runs[0])], rel=2e-5)


def test_all_processes_load_the_best_checkpoint(recipe: Make) -> None:
    """Steps that are much too large make the loss higher and higher: each process must know where the first one is."""
    file, _ = recipe("best", max_steps=3, eval_steps=1, learning_rate=1.0, warmup_steps=0)
    done = train(2, file)
    assert done.returncode == 0, done.stderr
    assert "The lowest held-out loss was at step 1: those weights are kept" in done.stdout


def test_processes_leave_their_group(recipe: Make, tmp_path: Path) -> None:
    """Otherwise torch warns of it at the interpreter's end, where gloo's threads may abort a process."""

    def note(rank: int) -> None:
        leave = dist.destroy_process_group
        dist.destroy_process_group = lambda *args: ((tmp_path / str(rank)).touch(), leave(*args))

    file, _ = recipe("leaving", max_steps=1)
    done = launch(2, file, folder=tmp_path, fault=note)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("[01]")) == ["0", "1"]


FULL = {"max_steps": 6, "learning_rate": 1e-3, "save_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def full_alone(recipe: Make) -> Path:
    file, run = recipe("full-alone", **FULL)
    done = train(1, file, "adapter.method=full")
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.slow
def test_trained_layers_that_are_shared_train_the_same(full_shared: Path, full_alone: Path) -> None:
    run = full_shared
    paths = {path["part"]: path["path"] for path in json.loads((run / "run.json").read_text())["paths"]}
    assert paths["layers' weights"] == "a part in each of 2 processes"
    same(run, full_alone)
    norms = [
        [step["grad_norm"] for step in json.loads((each / "run.json").read_text())["steps"]]
        for each in (run, full_alone)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.fixture(scope="module")
def full_shared(recipe: Make) -> Path:
    file, run = recipe("full-shared", {"strategy": "sharded"}, **FULL)
    done = train(2, file, "adapter.method=full")
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_shared_and_whole_weights_go_on_from_each_other_s_checkpoints(
    recipe: Make, full_alone: Path, full_shared: Path, before: int, after: int
) -> None:
    first = full_alone if before == 1 else full_shared
    file, run = recipe(f"full-{before}-{after}", {"strategy": "sharded"}, **FULL)
    stopped_at(3, first, run)
    done = train(after, file, "adapter.method=full")
    assert done.returncode == 0, done.stderr
    assert "Going on from checkpoint-3" in done.stdout
    same(run, first)
    if before == after:
        same_bits(run, first)


@pytest.mark.slow
def test_a_killed_process_ends_all_and_another_number_goes_on(recipe: Make, alone: Path) -> None:
    file, run = recipe("killed", save_steps=2)
    process = begin(2, file)
    while not (saved := list(run.glob("checkpoint-*"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    killed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - killed < 10
    assert "process 1 of 2 was ended by SIGKILL" in errors and "goes on from the newest checkpoint" in errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    done = train(1, file)
    assert done.returncode == 0, done.stderr
    assert saved and "Began on 2 GPUs, goes on with 1: the same rows a step" in " ".join(done.stdout.split())
    same(run, alone)


@pytest.mark.slow
def test_one_process_s_run_goes_on_with_two(recipe: Make, alone: Path) -> None:
    file, run = recipe("stopped", save_steps=3)
    process = begin(1, file)
    while not list(run.glob("checkpoint-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM" in errors
    done = train(2, file)
    assert done.returncode == 0, done.stderr
    same(run, alone)


def test_a_signal_that_one_process_gets_stops_all(recipe: Make) -> None:
    """As who finds the process on the GPU and ends that one."""
    file, run = recipe("one-is-told", save_steps=1, max_steps=500)
    program = Launch(2, file, folder=run.parent)
    while not list(run.glob("checkpoint-*")):
        assert program.poll() is None, program.communicate()
        time.sleep(0.02)
    os.kill(program.children()[1], signal.SIGTERM)
    _, errors = program.communicate()
    assert program.returncode == 128 + signal.SIGTERM and "error:" not in errors
    assert errors.count("stopped by SIGTERM after step") == 1


def test_rows_that_cannot_be_shared_are_refused(recipe: Make) -> None:
    odd = Recipe.load(Path(recipe("odd", gradient_accumulation_steps=3)[0]))
    with pytest.raises(ConfigError, match=r"a step of 3 rows .* set train.gradient_accumulation_steps: 4"):
        share_of_step(odd, 2)


@pytest.mark.slow
def test_an_error_of_all_processes_is_told_once(recipe: Make) -> None:
    done = train(2, recipe("odd", gradient_accumulation_steps=3)[0])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "a step of 3 rows" in done.stderr
    assert done.stderr.count("error:") == 1


@pytest.mark.slow
def test_a_process_that_hangs_is_waited_for_so_long_and_no_longer(recipe: Make) -> None:
    file, run = recipe("hangs", {"timeout_minutes": 0.2}, save_steps=2, max_steps=500)
    process = begin(2, file)
    while not list(run.glob("checkpoint-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGSTOP)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "process 0 of 2 waited for another one that did not answer in time" in errors
    assert "launch.timeout_minutes" in errors
