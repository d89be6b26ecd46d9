"""How many processes a run takes, and who started them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from pronghorn.cli import processes
from pronghorn.cli.main import app
from pronghorn.cli.processes import choose_gpus, leave_error, leaving_group
from pronghorn.config.recipe import Recipe
from pronghorn.environment import join_slurm, joined
from pronghorn.errors import ConfigError, DataError, RunStopped, TrainingError
from support.launched import Forked


def recipe(folder: Path, accumulation: int = 1, rows: int = 1, **launch: object) -> Recipe:
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return Recipe.model_validate(
        {
            "model": {"name": "m/m", "max_seq_length": 64},
            "data": {"train": folder / "train.jsonl"},
            "packing": {"rows_per_step": rows},
            "train": {"output": folder / "run", "gradient_accumulation_steps": accumulation},
            "launch": launch,
        }
    )


@pytest.mark.parametrize(
    ("accumulation", "rows", "visible", "taken"),
    [(8, 1, 0, 1), (8, 1, 1, 1), (8, 1, 2, 2), (8, 1, 8, 8), (6, 1, 4, 3), (1, 1, 4, 1), (1, 4, 4, 4), (3, 2, 4, 3)],
)
def test_all_gpus_that_can_share_a_step_are_taken(
    tmp_path: Path, accumulation: int, rows: int, visible: int, taken: int
) -> None:
    choice = choose_gpus(recipe(tmp_path, accumulation, rows), visible)
    assert choice.gpus == taken
    assert (choice.note is None) == (taken == max(visible, 1))


def test_the_note_says_how_to_use_all(tmp_path: Path) -> None:
    note = choose_gpus(recipe(tmp_path, 1), 4).note
    assert note is not None and "on 1 of 4 GPUs: a step has 1 row" in note
    assert note.endswith("set train.gradient_accumulation_steps to a multiple of 4")
    assert choose_gpus(recipe(tmp_path, 4), 4).gpus == 4


def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch.gpus is 4, and this process sees 2 GPUs.*set launch.gpus: 2"):
        choose_gpus(recipe(tmp_path, 4, gpus=4), 2)
    with pytest.raises(ConfigError, match="this process sees no GPU: leave it out"):
        choose_gpus(recipe(tmp_path, 4, gpus=2), 0)
    assert choose_gpus(recipe(tmp_path, 4, gpus=1), 0).gpus == choose_gpus(recipe(tmp_path, 4, gpus=1), 2).gpus == 1


def test_gpus_that_can_not_share_a_step_are_refused_before_they_start(tmp_path: Path) -> None:
    problem = r"a step of 4 rows .* by 3 processes: set train.gradient_accumulation_steps: 6; or use 2 GPUs, as a run"
    with pytest.raises(ConfigError, match=problem):
        choose_gpus(recipe(tmp_path, 4, gpus=3), 4)


def test_several_machines_are_started_by_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch --slurm RECIPE.*--nnodes 2 --nproc-per-node"):
        choose_gpus(recipe(tmp_path, nodes=2), 8)


def test_the_command_line_names_the_gpus_too(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "r.yaml").write_text(
        f"model: {{name: m/m, max_seq_length: 64}}\ndata: {{train: {tmp_path}/train.jsonl}}\n"
        f"train: {{output: {tmp_path}/run}}\n"
    )
    done = CliRunner().invoke(app, ["train", str(tmp_path / "r.yaml"), "--gpus", "64"])
    assert done.exit_code == 1 and "launch.gpus is 64" in done.output


def test_what_slurm_started_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    join_slurm()
    assert not joined()
    slurm = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    slurm |= {"SLURM_JOB_ID": "12", "MASTER_ADDR": "node-1"}
    for name, value in {**slurm, "RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}.items():
        monkeypatch.setenv(name, value)  # so that they are put back
        if not value:
            del os.environ[name]
    join_slurm()
    ranks = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    assert joined() and ranks == ["3", "4", "1", "2", "node-1"]


def test_a_process_that_says_nothing_is_quoted() -> None:
    """Here every process ends with a usage error, which no Pronghorn error is."""
    with pytest.raises(TrainingError, match=r"process . of 2 ended with status 2"):
        processes.start(2, ["train", "--no-such-option"])


def forked(monkeypatch: pytest.MonkeyPatch, *work: Callable[[], int]) -> None:
    """Let `start` fork processes that do this, each its own."""

    def begin(line: object, env: dict[str, str], **_: object) -> Forked:
        def be() -> int:
            for number in (signal.SIGTERM, signal.SIGHUP):  # as in a program of its own
                signal.signal(number, signal.SIG_DFL)
            os.environ.update(env)
            return work[int(env["RANK"])]()

        return Forked(be)

    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=begin, DEVNULL=subprocess.DEVNULL))


def leaves_an_error(then: Callable[[], object] = bool, text: str = "mine") -> int:
    try:
        raise ValueError(text)
    except ValueError as error:
        leave_error(error)
    then()
    return 1


def dies(after: float, number: int) -> int:
    faulthandler.disable()  # which pytest enabled
    time.sleep(after)
    os.kill(os.getpid(), number)
    return 0


def test_an_error_comes_before_the_end_of_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL aborts a process whose peer is gone."""
    forked(monkeypatch, partial(dies, 0.6, signal.SIGABRT), leaves_an_error)
    with pytest.raises(TrainingError, match="process 1 of 2 failed: ValueError: mine"):
        processes.start(2, [])


def test_a_killed_process_comes_before_the_errors_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits() -> int:
        time.sleep(1.2)  # a busy machine starts the second later
        return leaves_an_error(text="the other one is gone")

    forked(monkeypatch, waits, partial(dies, 0.3, signal.SIGKILL), partial(dies, 2.0, signal.SIGABRT))
    with pytest.raises(TrainingError, match="process 1 of 3 was ended by SIGKILL"):
        processes.start(3, [])


def test_a_killed_process_may_end_after_others_see_that_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are closed before its memory is given back, which takes a busy machine a while."""
    forked(monkeypatch, partial(leaves_an_error, text="the other one is gone"), partial(dies, 0.8, signal.SIGKILL))
    with pytest.raises(TrainingError, match="process 1 of 2 was ended by SIGKILL"):
        processes.start(2, [])


GRACE = 1.0
"""In place of the launcher's own: nobody here needs longer to end."""


def test_an_error_ends_all_though_its_process_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in NCCL's own end."""
    monkeypatch.setattr(processes, "GRACE", GRACE)
    forked(monkeypatch, partial(time.sleep, 60), partial(leaves_an_error, partial(time.sleep, 60)))  # type: ignore[arg-type]
    begun = time.monotonic()
    with pytest.raises(TrainingError, match="process 1 of 2 failed: ValueError: mine"):
        processes.start(2, [])
    assert time.monotonic() - begun < GRACE + 5


def test_an_error_after_a_signal_is_shown_and_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a disk that is full when a checkpoint is asked for; the first process stops as it was asked to."""
    monkeypatch.setattr(processes, "GRACE", GRACE)
    ended = 128 + signal.SIGTERM

    def asks() -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(ended))
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    def fails() -> int:
        signal.signal(signal.SIGTERM, lambda *_: None)
        time.sleep(1.5)
        return leaves_an_error()

    forked(monkeypatch, asks, fails, ignores)
    begun = time.monotonic()
    with pytest.raises(TrainingError, match="process 1 of 3 failed: ValueError: mine"):
        processes.start(3, [])
    assert time.monotonic() - begun < 1.5 + GRACE + 5


def test_a_signal_while_processes_are_started_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sends it before the second is there."""
    begun: list[int] = []

    def asks() -> int:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    forked(monkeypatch, asks, partial(time.sleep, 60))  # type: ignore[arg-type]
    begin = processes.subprocess.Popen

    def slowly(*args: Any, **options: Any) -> Any:
        process = begin(*args, **options)
        begun.append(process.pid)
        time.sleep(0.3)
        return process

    processes.subprocess.Popen = slowly  # type: ignore[misc]
    assert processes.start(2, []) == 128 + signal.SIGTERM
    assert len(begun) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in begun)


def ignores() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
    return 0


def write_recipe(folder: Path, accumulation: int = 1) -> Path:
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (folder / "my run.yaml").write_text(
        f"model: {{name: m/m, max_seq_length: 64}}\ndata: {{train: {folder}/train.jsonl}}\n"
        f"train: {{output: {folder}/run, gradient_accumulation_steps: {accumulation}}}\n"
    )
    return folder / "my run.yaml"


def test_a_batch_script_is_written_and_shown(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, 16)
    line = ["launch", "--slurm", str(file), "--gpus", "4", "--nodes", "2", "train.seed=1"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    script = (tmp_path / "my run.sbatch").read_text()
    assert script in done.output and "sbatch '" in done.output
    assert "#SBATCH --nodes=2\n" in script and "--gpus-per-node=4" in script and "--job-name=my-run\n" in script
    assert f"-m pronghorn train '{file}' train.seed=1\n" in script
    assert subprocess.run(["bash", "-n", str(tmp_path / "my run.sbatch")]).returncode == 0
    assert CliRunner().invoke(app, line).exit_code == 0, "the same script again is not a conflict"
    other = CliRunner().invoke(app, ["launch", "--slurm", str(file), "--gpus", "8"])
    assert other.exit_code == 1 and "already exists" in other.output and "it has other lines" in other.output


def test_a_batch_script_that_can_not_be_written(tmp_path: Path) -> None:
    line = ["launch", "--slurm", str(write_recipe(tmp_path, 16)), "--gpus", "4", "--output"]
    for path, problem in ((tmp_path / "no" / "a.sbatch", "can't be written"), (tmp_path, "already exists")):
        done = CliRunner().invoke(app, [*line, str(path)])
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.output
        assert problem in done.output and "remedy" in done.output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "add --slurm"),
        (["--slurm"], "give --gpus N"),
        (["--slurm", "--gpus", "3"], "can't be shared by 3 processes"),
    ],
)
def test_what_a_batch_script_needs(tmp_path: Path, options: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, ["launch", *options, str(write_recipe(tmp_path, 16))])
    assert done.exit_code == 1 and problem in " ".join(done.output.split())
    assert not list(tmp_path.glob("*.sbatch"))


def test_the_port_is_a_free_one_that_no_connection_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 20_000 <= processes._free_port() < 30_000
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(processes, "PORTS", range(port, port + 1))
        with pytest.raises(TrainingError, match="can be listened on"):
            processes._free_port()


@pytest.mark.parametrize(
    ("given", "error", "left"),
    [
        pytest.param(False, None, True, id="at the end"),
        pytest.param(False, RunStopped("stopped", "go on", 15), True, id="all stop"),
        pytest.param(False, DataError("a row", "mend it"), False, id="one fails"),
        pytest.param(True, None, False, id="somebody else's"),
    ],
)
def test_the_group_that_a_command_joined_is_left(
    tmp_path: Path, given: bool, error: Exception | None, left: bool
) -> None:
    def work() -> int:
        def join() -> None:
            dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)

        if given:
            join()
        with contextlib.suppress(RunStopped, DataError), leaving_group():
            if not given:
                join()
            if error is not None:
                raise error
        return 0 if dist.is_initialized() is not left else 9

    assert Forked(work).wait() == 0


def test_a_command_without_a_group_leaves_none() -> None:
    with leaving_group():
        pass
