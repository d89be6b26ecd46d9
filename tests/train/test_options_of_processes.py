"""TRL's and transformers' options where two processes train: as one process does it, or refused before one waits."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset

from pronghorn import SFTTrainer
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import DataError, PronghornError
from pronghorn.models.lora import add_lora
from pronghorn.state import MANIFEST
from pronghorn.train.ranks import copy_from_first
from support.processes import WORLD, together
from support.tiny import tiny_model
from support.trainers import config

STEP_ROWS = 4


def documents(rows: int = 45, seed: int = 0) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 60, (rows,), generator=draw).tolist()
    return Dataset.from_dict({"input_ids": [torch.randint(3, 131, (n,), generator=draw).tolist() for n in lengths]})


def trainer_of(folder: Path, rows: Dataset | None = None, evaluated: Any = None, **changes: Any) -> Any:
    model = add_lora(tiny_model("llama", num_hidden_layers=1), r=2)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    settings = {"max_length": 64, "gradient_accumulation_steps": STEP_ROWS // processes, "max_steps": 2}
    args = config(folder, **(settings | changes))
    rows = documents() if rows is None else rows
    return SFTTrainer(model, args, train_dataset=rows, eval_dataset=evaluated, processing_class=byte_tokenizer(131))


def figures(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


PADS = {"packing": False, "eval_packing": False}
REFUSED: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "a mean over processes of packed rows": (
        lambda _: {"average_tokens_across_devices": False},
        "one without labels would count as much as the others: leave it at True",
    ),
    "packed batches that are split": (
        lambda _: {"accelerator_config": {"split_batches": True}},
        "split_batches with packed rows: leave it out",
    ),
    "unlike many batches": (
        lambda _: {"accelerator_config": {"even_batches": False}, **PADS},
        "2 processes that may have unlike many batches: one would wait",
    ),
    "unlike many batches of an evaluation": (
        lambda _: {
            "accelerator_config": {"even_batches": False},
            "eval_packing": False,
            "evaluated": documents(5),
        },
        "2 processes that may have unlike many batches",
    ),
    "batches of unlike widths": (
        lambda _: {"accelerator_config": {"dispatch_batches": True}, **PADS},
        "dispatch_batches joins the processes' batches, which are padded to unlike lengths: leave it out",
    ),
    "another number of rows": (
        lambda rank: {"rows": documents(20 + rank)},
        "train_dataset is another one in each of 2 processes: give all of them the same rows in the same order",
    ),
    "another order": (
        lambda rank: {"rows": documents().shuffle(seed=rank), **PADS},
        "train_dataset is another one in each of 2 processes",
    ),
    "another order of packed rows": (
        lambda rank: {"rows": documents().shuffle(seed=rank)},
        "train_dataset is another one in each of 2 processes",
    ),
    "another evaluation": (
        lambda rank: {"evaluated": {"same": documents(3), "other": documents(3, seed=rank)}},
        "eval_dataset is another one in each of 2 processes",
    ),
    "nothing left": (
        lambda _: {"rows": documents(1), "dataloader_drop_last": True},
        "dataloader_drop_last leaves out all there is, 1 row: a micro-batch has 1 on each of 2 processes",
    ),
    "nothing left of padded documents": (
        lambda _: {"rows": documents(1), "dataloader_drop_last": True, **PADS},
        "dataloader_drop_last leaves out all there is, 1 row",
    ),
}


def refused(found: dict[str, Any], rank: int, folder: Path) -> None:
    for name, (make, _) in REFUSED.items():
        try:
            trainer_of(folder, **make(rank)).train()
            found[name] = "nothing was refused"
        except PronghornError as error:
            found[name] = str(error)


def trained(found: dict[str, Any], folder: Path) -> None:
    """What trains, and what it says."""
    an_epoch = {"max_steps": -1, "num_train_epochs": 1}
    for counts in ("all", "non_padding"):
        trainer = trainer_of(folder, include_num_input_tokens_seen=counts, **an_epoch)
        assert len(trainer.train_dataset) % WORLD == 1, "one process has no row of its own in the last step"
        trainer.train()
        found[f"tokens, {counts}"] = trainer.state.num_input_tokens_seen
    for name, changes in {
        "even_batches": {"accelerator_config": {"even_batches": False}},
        "one row": {"rows": documents(1)},
    }.items():
        trainer = trainer_of(folder, **an_epoch, **changes)
        trainer.train()
        found[name] = figures(trainer, "loss")
    streamed = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2, **PADS}
    trainer = trainer_of(folder, evaluated=documents(8, seed=1).to_iterable_dataset(), **streamed)
    trainer.train()
    found["streamed"] = [*figures(trainer, "loss"), *figures(trainer, "eval_loss")]


def worker(rank: int, folder: Path) -> None:
    found: dict[str, Any] = {}
    refused(found, rank, folder / "refused")
    saving = trainer_of(folder / "saved", save_strategy="steps", save_steps=1)
    saving.train()
    found["best"] = best_of(folder / f"at-{rank}-o-clock")
    found["drawn"] = drawn(rank, folder / "drawn")
    found["frozen"] = nothing_trained(rank)
    found["skipped"] = in_float16(folder / "float16")
    found["kept"] = dropped_out(folder / "dropout")
    torch.save(found, folder / f"{rank}.pt")


def best_of(folder: Path) -> list[torch.Tensor]:
    """Train by steps that are too large, and return the weights of the best one."""
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    changes = {"max_steps": 3, "learning_rate": 1.0, "load_best_model_at_end": True}
    trainer = trainer_of(folder, evaluated=documents(3, seed=1), **each, **changes)
    trainer.train()
    assert trainer.state.best_global_step < 3
    return [each.detach() for each in trainer.model.parameters() if each.requires_grad]


def drawn(rank: int, folder: Path) -> list[torch.Tensor]:
    """Train what each process drew for itself, frozen or not, and return it; the base is the same in all of them."""
    trainer = trainer_of(folder)
    torch.manual_seed(rank)
    weights = [(name, each) for name, each in trainer.model.named_parameters() if ".lora_" in name]
    for name, weight in weights:
        torch.nn.init.normal_(weight)
        weight.requires_grad_("lora_B" in name)
    trainer.train()
    return [weight.detach() for _, weight in weights]


def nothing_trained(rank: int) -> torch.Tensor:
    """Copy a weight of which a process drew its own, where no process has a trained one whole."""
    alone = torch.nn.Linear(3, 5, bias=False).requires_grad_(False)
    torch.nn.init.constant_(alone.weight, rank + 1.0)
    assert copy_from_first(alone) == []
    return alone.weight


def dropped_out(folder: Path) -> list[torch.Tensor]:
    """Return what a dropout keeps of ones in each micro-batch: the random state decides it alone."""
    trainer, kept = trainer_of(folder), []
    dropout = torch.nn.Dropout(0.5)
    trainer.model.register_forward_pre_hook(lambda model, args: kept.append(dropout(torch.ones(64))))
    trainer.train()
    assert torch.initial_seed() == trainer.args.seed, "the order of a further training would be another in each process"
    return kept


def in_float16(folder: Path) -> list[float]:
    """Train where float16 overflows at the first loss scales, and return how many steps were skipped by each."""
    trainer = trainer_of(folder, fp16=True, max_steps=8)
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight.mul_(100)
    trainer.train()
    return figures(trainer, "skipped_steps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("options")
    together(worker, made)
    return made


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    return read(folder)


def read(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("name", REFUSED)
def test_what_processes_can_not_do_is_refused(told: list[dict[str, Any]], name: str) -> None:
    for each in told:
        assert REFUSED[name][1] in each[name]


def test_processes_whose_folders_are_named_by_the_time_load_one_best(folder: Path, told: list[dict[str, Any]]) -> None:
    """The first one's folder has the checkpoints of all."""
    assert all(map(torch.equal, *(each["best"] for each in told)))
    assert (folder / "at-0-o-clock/checkpoint-3").is_dir() and not (folder / "at-1-o-clock").exists()


def test_weights_that_processes_drew_are_the_first_one_s(told: list[dict[str, Any]]) -> None:
    assert all(map(torch.equal, *(each["drawn"] for each in told)))


def test_frozen_weights_travel_where_none_is_trained(told: list[dict[str, Any]]) -> None:
    """As in full fine-tuning of shared layers with a frozen embedding, head and norm."""
    assert [each["frozen"].unique().tolist() for each in told] == [[1.0]] * WORLD


def test_the_same_steps_overflow_float16(told: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = in_float16(tmp_path)
    assert 0 < alone[-1] < len(alone)
    assert [each["skipped"] for each in told] == [alone] * WORLD


def test_each_process_draws_its_own_dropout(told: list[dict[str, Any]]) -> None:
    first, second = (each["kept"] for each in told)
    assert len(first) == len(second) == STEP_ROWS
    assert not any(map(torch.equal, first, second))


def trains(rank: int, folder: Path) -> None:
    found: dict[str, Any] = {}
    trained(found, folder / "together")
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.slow
def test_what_trains_is_what_one_process_trains(tmp_path: Path) -> None:
    """The last step of the epoch has an odd row; of streamed rows four batches of two are evaluated in either way."""
    alone: dict[str, Any] = {}
    together(trains, tmp_path)
    trained(alone, tmp_path / "alone")
    for each in read(tmp_path):
        for name, expected in alone.items():
            assert each[name] == pytest.approx(expected, rel=2e-5), name


@pytest.mark.parametrize("rows", [STEP_ROWS, STEP_ROWS // 2])
def test_a_checkpoint_of_steps_of_other_rows(
    folder: Path, told: list[Any], rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One process that has the settings of two goes on with half as many rows a step."""
    trainer = trainer_of(folder / "resumed", gradient_accumulation_steps=rows)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(folder / "saved/checkpoint-1"))
    said = "checkpoint-1 was saved by steps of 4 rows, and those of this training have 2"
    assert (said in caplog.text) == (rows != STEP_ROWS)


def test_a_checkpoint_without_the_schedule_is_not_gone_on_from(folder: Path, tmp_path: Path) -> None:
    """transformers would load the optimiser's states as little, and tell nobody. Stock TRL's has no manifest."""
    copy = tmp_path / "checkpoint-1"
    shutil.copytree(folder / "saved/checkpoint-1", copy)
    (copy / "scheduler.pt").unlink()
    (copy / MANIFEST).unlink()
    with pytest.raises(DataError, match=r"checkpoint-1 has no scheduler.pt, the place in the learning rate's schedule"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(copy))


def test_a_checkpoint_without_the_optimiser_is_not_gone_on_from(tmp_path: Path) -> None:
    trainer_of(tmp_path, save_strategy="steps", save_steps=1, save_only_model=True).train()
    with pytest.raises(DataError, match=r"checkpoint-2 has no optimiser state .*\(save_only_model=True\): resume from"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)
