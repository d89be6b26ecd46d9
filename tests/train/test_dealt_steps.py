"""`packing.look_ahead: auto` through the trainer: where lengths differ much, rows of like times share a step.

It is the same step on any number of processes, and after a run was taken up again.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from pronghorn.data.dealing import LOOK_AHEAD
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from support.processes import together
from support.tiny import packed_row, tiny_model
from support.trainers import Noting, config

ROW, ROWS, STEP_ROWS, STEPS = 64, 37, 4, 20
"""An epoch has ten steps, of which the last has one row."""
STOPPED_AT = 14
LENGTHS = [[64], [32, 32], [16] * 4, [8] * 8, [24, 40]]


def documents() -> Dataset:
    found = []
    for index in range(ROWS):
        for document, length in enumerate(LENGTHS[index % len(LENGTHS)]):
            ids = packed_row([length], length, seed=100 * index + document)["input_ids"][0].tolist()
            found.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return Dataset.from_list(found)


def train(processes: int, folder: Path, resumed: Path | None = None, look_ahead: int | None = None) -> Any:
    """Train, from a checkpoint or the start; return the documents of this process by step."""
    model = add_lora(tiny_model("llama", num_hidden_layers=1), r=2)
    attach(model, layers="fused")
    args = config(
        folder,
        max_length=ROW,
        max_steps=STEPS,
        gradient_accumulation_steps=STEP_ROWS // processes,
        train_sampling_strategy="random",
        save_strategy="steps",
        save_steps=STOPPED_AT,
    )
    trainer = Noting(model, args, train_dataset=documents(), processing_class=byte_tokenizer(512))
    trainer.look_ahead = look_ahead
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    sampler: Any = trainer.get_train_dataloader().batch_sampler
    assert sampler.look_ahead == (look_ahead or LOOK_AHEAD), "it was worth while"
    return dict(trainer.documents)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The documents of each step, and the checkpoint of the step STOPPED_AT."""
    folder = tmp_path_factory.mktemp("alone")
    return train(1, folder), folder / f"checkpoint-{STOPPED_AT}"


def worker(processes: int, checkpoint: Path | None, rank: int, folder: Path) -> None:
    torch.save(train(processes, folder / "run", checkpoint), folder / f"{rank}.pt")


def dealt(processes: int, folder: Path, checkpoint: Path | None = None) -> dict[int, list[Any]]:
    """Return the documents of each step, of all processes together."""
    together(partial(worker, processes, checkpoint), folder, processes)
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]
    return {step: sorted(document for each in found for document in each.get(step, [])) for step in found[0]}


def in_order(found: dict[int, list[Any]], begin: int = 0) -> dict[int, list[Any]]:
    return {step: sorted(found[step]) for step in range(begin, STEPS)}


def test_rows_of_a_step_take_alike_long(alone: tuple[Any, Path], tmp_path: Path) -> None:
    """A document of n tokens takes n² of the time in attention: a step waits for the row with the longest ones."""

    def longest_wait(found: Any) -> list[float]:
        times = [[sum(len(document) ** 2 for document in row) for row in rows_of(found[step])] for step in range(9)]
        return [max(of_step) / min(of_step) for of_step in times]

    dealt_, as_they_come = longest_wait(alone[0]), longest_wait(train(1, tmp_path, look_ahead=1))
    assert statistics.median(dealt_) < 1.5 and statistics.median(as_they_come) > 2


def rows_of(documents: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Put a step's documents, which one process had in turn, into the rows that they fill."""
    rows: list[list[tuple[int, ...]]] = [[]]
    for document in documents:
        if sum(map(len, rows[-1])) == ROW:
            rows.append([])
        rows[-1].append(document)
    return rows


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_has_the_same_rows_on_any_number_of_processes(
    alone: tuple[Any, Path], tmp_path: Path, processes: int
) -> None:
    assert dealt(processes, tmp_path) == in_order(alone[0])


@pytest.mark.parametrize("processes", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_was_taken_up_in_an_epoch_has_the_same_order(
    alone: tuple[Any, Path], tmp_path: Path, processes: int
) -> None:
    expected, checkpoint = alone
    assert in_order(expected)[STOPPED_AT] != in_order(expected)[STOPPED_AT - STEPS // 2], "each epoch has its own order"
    found = train(1, tmp_path, checkpoint) if processes == 1 else dealt(processes, tmp_path, checkpoint)
    assert in_order(found, STOPPED_AT) == in_order(expected, STOPPED_AT)
