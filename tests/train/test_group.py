"""Processes that can't train together are refused, with what to do, before one waits for another; those on unlike GPUs
plan alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pronghorn.config.recipe import Recipe
from pronghorn.errors import PronghornError, UnsupportedError
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import CONTEXT_BYTES
from pronghorn.models import auto_plan
from pronghorn.train import group
from pronghorn.train.build import training_arguments
from pronghorn.train.documents import find
from pronghorn.train.strategy import Strategy, strategy
from support.processes import WORLD, together

CUDA = torch.device("cuda")


def recipe(model: Path, folder: Path, **precision: Any) -> Recipe:
    (folder / "rows.jsonl").write_text('{"text": "Once upon a time"}\n' * 4)
    return Recipe.model_validate(
        {
            "model": {"name": str(model), "max_seq_length": 128},
            "data": {"train": str(folder / "rows.jsonl")},
            "train": {"output": str(folder / "run"), "gradient_accumulation_steps": 2},
            "precision": precision,
        }
    )


def test_gpus_without_nccl(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"2 processes on GPUs, and this .* has no NCCL: .* --gpus 1"):
        training_arguments(recipe(stories, tmp_path))
    group.check_backend(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    group.check_backend(2)  # by gloo, on the CPU


def said(check: Any, *arguments: Any) -> str:
    try:
        check(*arguments)
        return ""
    except PronghornError as error:
        return str(error)


def worker(model: Path, rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for uuids in (("a", "b"), ("a", "a")):
            patch.setattr(torch.cuda, "get_device_properties", lambda _, own=uuids[rank]: SimpleNamespace(uuid=own))
            found.append(said(group.check_gpus_apart, CUDA))
        for capabilities in (((8, 0), (9, 0)), ((9, 0), (7, 5))):
            patch.setattr(torch.cuda, "get_device_capability", lambda _, own=capabilities[rank]: own)
            patch.setattr(group, "default_device", lambda: CUDA)
            found.append(said(group.check_one_dtype, recipe(model, folder)))
            found.append(said(group.check_one_dtype, recipe(model, folder, dtype="float16")))
        plain = recipe(model, folder)
        for sizes in ((2**40, CONTEXT_BYTES), (CONTEXT_BYTES, 2**40), (2**40, 2**39)):
            patch.setattr(auto_plan, "cuda_device_spec", lambda _, own=sizes[rank]: device_spec("NVIDIA H200", own))
            patch.setattr(group, "default_device", lambda: CUDA)
            found.append(strategy(plain, find(plain), WORLD, CUDA).strategy)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def told(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each process was told in turn."""
    folder = tmp_path_factory.mktemp("group")
    together(partial(worker, stories), folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def test_more_processes_than_gpus(told: list[list[Any]]) -> None:
    """By torchrun, which starts as many as it is told."""
    for apart, together_, *_ in told:
        assert apart == ""
        assert together_ == (
            "2 processes were started, and they have 1 GPU: process 1 has that of process 0: start one for each GPU: "
            "pronghorn train does, or torchrun --nproc-per-node GPUS"
        )


def test_gpus_of_which_one_lacks_bfloat16(told: list[list[Any]]) -> None:
    for alike, asked, unlike, asked_unlike in (each[2:6] for each in told):
        assert alike == asked == asked_unlike == ""
        assert unlike.startswith("precision.dtype: auto is bfloat16 on some of these GPUs and float16 on others: set")


def test_unlike_gpus_choose_by_the_smallest(told: list[list[Any]]) -> None:
    for each in told:
        assert each[6:] == [Strategy.SHARDED, Strategy.SHARDED, Strategy.COPIES]
