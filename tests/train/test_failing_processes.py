"""One of two processes fails: both end within seconds, the error shown is the one that came first, nothing that was
saved is lost, and the same command goes on to the same end."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn import state
from pronghorn.errors import DataError
from pronghorn.train import ranks, shared_layers
from pronghorn.train.trainer import SFTTrainer
from support.launched import Fault, Launch, launch
from support.several import Make, recipes, same, same_bits

LORA = {"max_steps": 4, "save_steps": 1, "keep_checkpoints": 9, "gradient_accumulation_steps": 2}
FULL = {**LORA, "learning_rate": 1e-3}
COPIES, SHARED = {"strategy": "copies"}, {"strategy": "sharded"}
FAILS_AT = 3
SOON = 12.0
"""Seconds from a failure to the end, of which the launcher leaves three to the others, on a machine that is busy."""


@pytest.fixture(scope="module")
def recipe(stories: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return recipes(stories, shared, tmp_path_factory.mktemp("failing"), documents=20)


@pytest.fixture(scope="module")
def whole(recipe: Make) -> Callable[[str], Path]:
    """The run of a method that nothing disturbs, trained once."""
    found: dict[str, Path] = {}

    def of(method: str) -> Path:
        if method not in found:
            file, found[method] = recipe(f"{method}-whole", **(FULL if method == "full" else LORA))
            assert launch(1, file, f"adapter.method={method}", folder=Path(file).parent).returncode == 0
        return found[method]

    return of


# ---- what goes wrong ----


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def mistake(*_: Any, **__: Any) -> None:
    raise ValueError("planted in one process")


def bad_data(*_: Any, **__: Any) -> None:
    raise DataError("a planted row is damaged", "look at it")


# ---- and where ----


def after(noted: Path, fails: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    noted.write_text(str(time.time()))
    fails(*args, **kwargs)


def in_saving(at: int, what: str, fails: Callable[..., None], rank: int) -> None:
    """Fail while checkpoint FAILS_AT is written: its `weights`, of which some are written, or `states` of a process."""
    if rank != at:
        return
    save = SFTTrainer._save_checkpoint

    def faulty(self: Any, *args: Any) -> None:
        if self.state.global_step == FAILS_AT:
            if what == "states":
                torch.save = fails  # type: ignore[assignment]
            else:
                in_second_shard(fails)
        save(self, *args)

    SFTTrainer._save_checkpoint = faulty  # type: ignore[method-assign]


def in_second_shard(fails: Callable[..., None]) -> None:
    """Whole models are written in shards of a quarter of a megabyte, of which the second fails; adapters at once."""
    import peft.peft_model
    import safetensors.torch

    peft.peft_model.safe_save_file = fails  # type: ignore[attr-defined]
    write, save_file = shared_layers.write_model, safetensors.torch.save_file
    shards: list[None] = []

    def faulty(*args: Any, **kwargs: Any) -> None:
        shards.append(None)
        (fails if len(shards) == 2 else save_file)(*args, **kwargs)

    safetensors.torch.save_file = faulty
    shared_layers.write_model = lambda base, dtype, folder, _, values: write(base, dtype, folder, "250KB", values)


def in_step(at: int, fails: Callable[..., None], rank: int, times: int = 1) -> None:
    """Fail in the forward of step FAILS_AT."""
    if rank != at:
        return
    compute, left = SFTTrainer.compute_loss, [None] * times

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        if self.state.global_step + 1 == FAILS_AT and left:
            left.pop()
            fails()
        return loss

    SFTTrainer.compute_loss = faulty  # type: ignore[method-assign]


def in_optimiser(at: int, fails: Callable[..., None], rank: int) -> None:
    """Fail in the optimiser, in step FAILS_AT."""
    if rank != at:
        return
    plain, calls = torch.optim.AdamW.step, list[None]()

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == FAILS_AT:
            fails()
        return plain(self, *args, **kwargs)

    torch.optim.AdamW.step = faulty  # type: ignore[method-assign]


def by_ddp(fault: Fault, rank: int) -> None:
    """Average gradients in the backward, as those of large models are."""
    ranks.MOST_BYTES = 0
    fault(rank)


def failing(
    make: Make, name: str, method: str, launched: dict[str, str], fault: Callable[..., Any]
) -> tuple[str, Path]:
    """Run a recipe on two processes, of which one fails; return the errors that were shown, and the run's folder.

    Args:
        fault: given what it fails by, which notes when, and the number of the process.
    """
    file, run = make(name, launched, **(FULL if method == "full" else LORA))
    noted = run.parent / f"{name}.failed"
    done = launch(2, file, f"adapter.method={method}", folder=run.parent, fault=partial(fault, noted))
    assert done.returncode == 1, done.stdout + done.stderr
    assert time.time() - float(noted.read_text()) < SOON
    return " ".join(done.stderr.split()), run


def goes_on(run: Path, method: str, whole: Path, processes: int = 2, step: int = FAILS_AT - 1) -> None:
    """The same command goes on from the newest checkpoint, which is whole, to the end of an undisturbed run."""
    file = run.with_suffix(".yaml")
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in range(1, step + 1)]
    done = launch(processes, str(file), f"adapter.method={method}", folder=run.parent)
    assert done.returncode == 0, done.stderr
    assert f"Going on from checkpoint-{step}" in done.stdout
    assert not any(state.is_temporary(path) for path in run.iterdir()), "what was half written is gone"
    same(run, whole)


DISKS = [
    ("lora", COPIES, 0, "weights"),
    ("lora", COPIES, 1, "states"),
    ("full", SHARED, 0, "weights"),
    ("full", SHARED, 1, "states"),
]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("method", "launched", "rank", "what"), DISKS[::-1], ids=str)
def test_a_full_disk(recipe: Make, whole: Any, method: str, launched: dict[str, str], rank: int, what: str) -> None:
    """Of the first process, whose reads of shared layers all others serve, or of another."""
    name = f"{method}-{launched['strategy']}-full-disk-of-{rank}"
    fault = lambda noted, number: in_saving(rank, what, partial(after, noted, full_disk), number)  # noqa: E731
    errors, run = failing(recipe, name, method, launched, fault)
    assert f"the disk of {run}/checkpoint-{FAILS_AT} is full" in errors and "free some space" in errors
    assert "Traceback" not in errors
    goes_on(run, method, whole(method))


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("method", "launched", "rank", "what"), DISKS[::-1], ids=str)
def test_killed_while_it_saves(
    recipe: Make, whole: Any, method: str, launched: dict[str, str], rank: int, what: str
) -> None:
    name = f"{method}-{launched['strategy']}-killed-{rank}"
    fault = lambda noted, number: in_saving(rank, what, partial(after, noted, killed), number)  # noqa: E731
    errors, run = failing(recipe, name, method, launched, fault)
    assert f"process {rank} of 2 was ended by SIGKILL" in errors and "goes on from the newest checkpoint" in errors
    goes_on(run, method, whole(method), processes=1 + rank)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize(("method", "launched"), [("full", SHARED), ("lora", SHARED), ("lora", COPIES)], ids=str)
def test_a_mistake_in_one_process(recipe: Make, method: str, launched: dict[str, str], rank: int) -> None:
    name = f"{method}-{launched['strategy']}-mistake-{rank}"
    fault = lambda noted, number: in_step(rank, partial(after, noted, mistake), number)  # noqa: E731
    errors, _ = failing(recipe, name, method, launched, fault)
    assert f"process {rank} of 2 failed: ValueError: planted in one process" in errors
    assert errors.count("Traceback") == 1 and errors.count("error: process ") == 1  # libraries log errors, too


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_an_error_of_ours_in_one_process(recipe: Make, rank: int) -> None:
    fault = lambda noted, number: in_step(rank, partial(after, noted, bad_data), number)  # noqa: E731
    errors, _ = failing(recipe, f"data-{rank}", "lora", COPIES, fault)
    assert "error: a planted row is damaged remedy: look at it" in errors and "Traceback" not in errors


def no_memory_in_step(ddp: bool, rank: int, times: int, noted: Path, number: int) -> None:
    """Run out of memory in step FAILS_AT of as many trainings."""
    if ddp:
        ranks.MOST_BYTES = 0  # gradients are averaged in the backward, as those of large models are
    before = len(noted.read_text()) if noted.exists() else 0
    if before == times:
        return

    def fails() -> None:
        noted.write_text("x" * (before + 1))
        no_memory()

    in_step(rank, fails, number)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize(
    ("method", "launched", "ddp"),
    [("full", SHARED, False), ("lora", SHARED, False), ("full", COPIES, True)],
    ids=["full, shared layers", "LoRA, shared layers", "full, DDP"],
)
def test_memory_runs_out_where_others_wait(
    recipe: Make, whole: Any, method: str, launched: dict[str, str], ddp: bool, rank: int
) -> None:
    """All processes are started again and keep less; what deleted an earlier run doesn't delete this one."""
    name = f"{method}-{launched['strategy']}-memory-{rank}"
    file, run = recipe(name, launched, **(FULL if method == "full" else LORA))
    fault = partial(no_memory_in_step, ddp, rank, 1, run.parent / f"{name}.failed")
    done = launch(2, file, f"adapter.method={method}", "--overwrite", folder=run.parent, fault=fault)
    assert done.returncode == 0, done.stderr
    told, errors = " ".join(done.stdout.split()), " ".join(done.stderr.split())
    again = (
        f"step {FAILS_AT} ran out of memory in process {rank} of 2, which can't repeat it alone: all start again from"
    )
    assert errors.count(again) == 1 and "error:" not in errors and "Traceback" not in errors
    assert f"Going on from checkpoint-{FAILS_AT - 1}" in told
    [event] = json.loads((run / "run.json").read_text())["out_of_memory"]
    assert event["restarted"] and (event["process"], event["step"]) == (rank, FAILS_AT)
    assert f"in process {rank}, so that all were started again; layers from here on: {event['plan']}" in told
    same(run, whole(method))


@pytest.mark.slow
def test_memory_runs_out_again_and_again(recipe: Make, whole: Any) -> None:
    """Three times are survived, each with less kept than before."""
    file, run = recipe("again-and-again", SHARED, **LORA)
    fault = partial(no_memory_in_step, False, 1, 9, run.parent / "again-and-again.failed")
    done = launch(2, file, "adapter.method=lora", folder=run.parent, fault=fault)
    errors = " ".join(done.stderr.split())
    assert done.returncode == 1 and errors.count("all start again") == 3 and errors.count("error:") == 1
    assert "after 3 times that were survived" in errors and "Traceback" not in errors


@pytest.mark.matrix(1)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_memory_runs_out_where_nobody_waits(recipe: Make, whole: Any, method: str) -> None:
    """The step is repeated there with less kept, the other process keeps as little, and the numbers stay."""
    file, run = recipe(f"{method}-survived", COPIES, **(FULL if method == "full" else LORA))
    fault = lambda number: in_step(1, no_memory, number)  # noqa: E731
    done = launch(2, file, f"adapter.method={method}", folder=run.parent, fault=fault)
    assert done.returncode == 0, done.stderr
    told = f"step {FAILS_AT} ran out of memory in process 1, which repeats it; layers from here on: recompute the MLP"
    assert " ".join(done.stdout.split()).count(told) == 1
    [event] = json.loads((run / "run.json").read_text())["out_of_memory"]
    assert event["step"] == FAILS_AT and event["process"] == 1, "the first process keeps the record"
    same(run, whole(method))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "launched"), [("lora", COPIES), ("full", SHARED)], ids=str)
def test_memory_runs_out_in_one_optimiser(recipe: Make, whole: Any, method: str, launched: dict[str, str]) -> None:
    fault = lambda noted, number: in_optimiser(1, partial(after, noted, no_memory), number)  # noqa: E731
    errors, run = failing(recipe, f"{method}-optimiser", method, launched, fault)
    assert f"step {FAILS_AT} ran out of memory in the optimiser" in errors
    goes_on(run, method, whole(method))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "launched"), [("lora", COPIES), ("full", SHARED)], ids=str)
def test_killed_at_random_moments(recipe: Make, method: str, launched: dict[str, str]) -> None:
    """One process, or all with what started them, again and again until the run ends: to the same bits."""
    table = {**(FULL if method == "full" else LORA), "max_steps": 8, "deterministic": True}
    file, undisturbed = recipe(f"{method}-undisturbed", launched, **table)
    begun = time.monotonic()
    done = launch(2, file, f"adapter.method={method}", folder=undisturbed.parent)
    assert done.returncode == 0, done.stderr
    seconds, chance, killed = time.monotonic() - begun, random.Random(7), 0
    file, run = recipe(f"{method}-random", launched, **table)
    while killed < 6:
        program = Launch(2, file, f"adapter.method={method}", folder=run.parent)
        time.sleep(chance.uniform(0.3, 0.95) * seconds)
        children = program.children()
        for child in children if chance.random() < 0.5 else children[:1]:
            os.kill(child, signal.SIGKILL)
        if not children or chance.random() < 0.3:
            program.kill()
        killed += program.wait() != 0
        assert not any(Path(f"/proc/{child}").exists() for child in children if program.returncode == 1)
        for child in children:  # of a launcher that was killed itself
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if (run / "run.json").exists():
            break
    if not (run / "run.json").exists():
        done = launch(2, file, f"adapter.method={method}", folder=run.parent)
        assert done.returncode == 0, done.stderr
    assert killed and json.loads((run / "run.json").read_text())["resumed_at"]
    same_bits(run, undisturbed)
