"""Padded training whose steps are sorted by length: stock's documents, losses and gradients, and less padding."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from rich.console import Console
from torch import Tensor
from torch.utils.data import Sampler
from transformers import TrainerCallback

from pronghorn import SFTTrainer
from pronghorn.data.dealing import ByLength
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.models.lora import add_lora
from pronghorn.train import padding_free
from pronghorn.train.run import run
from support.generic import generic_model
from support.processes import together
from support.runs import Make, make  # noqa: F401  (the fixture)
from support.tiny import tiny_model
from support.trainers import config

ROWS, BATCH, MICRO_BATCHES = 43, 2, 4
"""Of one process an epoch has six steps, of which the last has two micro-batches, the last of them of one document."""
STEPS, STOPPED_AT = 14, 9
"""Over the end of the second epoch; in its middle."""


def pads(*_: Any) -> str:
    """Say why documents are padded, also those of families that need no padding: their tests are the fastest."""
    return "so that they are sorted"


@pytest.fixture(autouse=True)
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_free, "why_padded", pads)


def documents(rows: int = ROWS) -> Dataset:
    """The first token of each says which one it is; few labels, many, or all but the first."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for index in range(rows):
        length = int(torch.randint(4, 60, (), generator=draw))
        ids = [index, *torch.randint(3, 131, (length,), generator=draw).tolist()]
        unsupervised = 1 + index % 3 * length // 3
        found.append({"input_ids": ids, "labels": [-100] * unsupervised + ids[unsupervised:]})
    return Dataset.from_list(found)


class Noted(SFTTrainer):
    """Notes the documents of each micro-batch by step, and the places of its batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: dict[int, list[list[int]]] = defaultdict(list)
        self.places = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.batches[self.state.global_step].append(inputs["input_ids"][:, 0].tolist())
        self.places += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)


class Unsorted(Noted):
    """Takes its documents as stock does."""

    get_train_dataloader = trl.SFTTrainer.get_train_dataloader


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.first:
            self.first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trainer_of(cls: Any, folder: Path, model: Any = None, rows: Dataset | None = None, **changes: Any) -> Any:
    model = add_lora(tiny_model("llama", num_hidden_layers=1), r=2) if model is None else model
    settings = {
        "packing": False,
        "max_length": 64,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        "train_sampling_strategy": "random",
    }
    args = config(folder, **(settings | changes))
    rows = documents() if rows is None else rows
    return cls(model, args, train_dataset=rows, processing_class=byte_tokenizer(64))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def in_steps(batches: dict[int, list[list[int]]]) -> dict[int, list[int]]:
    return {step: sorted(row for batch in found for row in batch) for step, found in batches.items()}


@pytest.mark.parametrize("changes", [{}, {"train_sampling_strategy": "sequential"}, {"dataloader_drop_last": True}])
def test_a_run_has_stock_s_steps_with_less_padding(tmp_path: Path, changes: dict[str, Any]) -> None:
    sorted_, plain = (trainer_of(cls, tmp_path, **changes) for cls in (Noted, Unsorted))
    for each in (sorted_, plain):
        each.train()
    assert in_steps(sorted_.batches) == in_steps(plain.batches)
    assert {k: list(map(len, v)) for k, v in sorted_.batches.items()} == {
        k: list(map(len, v)) for k, v in plain.batches.items()
    }
    assert losses(sorted_) == pytest.approx(losses(plain), rel=1e-5)
    assert sorted_.places < 0.92 * plain.places


def test_stock_trl_has_the_same_documents_in_each_step(tmp_path: Path) -> None:
    settings = config(tmp_path, packing=False, max_length=64, per_device_train_batch_size=BATCH, data_seed=7,
                      gradient_accumulation_steps=MICRO_BATCHES, train_sampling_strategy="random")  # fmt: skip
    stock = trl.SFTTrainer(
        tiny_model("llama"), settings, train_dataset=documents(), processing_class=byte_tokenizer(64)
    )
    ours = trainer_of(SFTTrainer, tmp_path, data_seed=7)
    loaders = stock.get_train_dataloader(), ours.get_train_dataloader()
    for epoch in range(2):
        found = []
        for loader in loaders:
            loader.set_epoch(epoch)
            found.append([batch["input_ids"][:, 0].tolist() for batch in loader])
        steps = [in_steps({i: own[i : i + MICRO_BATCHES] for i in range(0, len(own), MICRO_BATCHES)}) for own in found]
        assert steps[0] == steps[1] and found[0] != found[1]


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_a_step_s_gradient_is_the_same(tmp_path: Path, kind: str) -> None:
    found = []
    for cls in (Noted, Unsorted):
        model = tiny_model("llama", num_hidden_layers=1) if kind == "llama" else generic_model(kind)
        trainer = trainer_of(cls, tmp_path, model, max_steps=1, max_grad_norm=0.0, per_device_train_batch_size=4)
        trainer.add_callback(kept := Gradients())
        trainer.train()
        found.append((losses(trainer), kept.first, trainer.batches))
    assert found[0][2] != found[1][2]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        assert (gradient - found[1][1][name]).norm() <= 1e-6 * gradient.norm(), name


GROUPED = {"train_sampling_strategy": "group_by_length"}


@pytest.mark.parametrize("changes", [{}, GROUPED, GROUPED | {"packing": True}])
def test_a_run_that_was_taken_up_in_an_epoch_has_the_same_micro_batches(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = trainer_of(Noted, tmp_path, save_strategy="steps", save_steps=STOPPED_AT, **changes)
    whole.train()
    resumed = trainer_of(Noted, tmp_path, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STOPPED_AT}"))
    assert resumed.batches == {step: whole.batches[step] for step in range(STOPPED_AT, STEPS)}
    assert losses(resumed) == losses(whole)


def grouped(rank: int, folder: Path) -> None:
    padding_free.why_padded = pads
    model = add_lora(tiny_model("llama", num_hidden_layers=1), r=2, lora_dropout=0.1)
    trainer = trainer_of(Noted, folder, model, documents(48), max_steps=6, **GROUPED)
    trainer.train()
    torch.save(trainer.batches, folder / f"{rank}.pt")


def test_two_processes_draw_the_same_groups_of_like_lengths(tmp_path: Path) -> None:
    """Also after dropout, of which each draws as much as its batches are wide; and others in each epoch."""
    together(partial(grouped), tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    epochs = [[row for rank in ranks for step in steps for batch in rank[step] for row in batch]
              for steps in ((0, 1, 2), (3, 4, 5))]  # fmt: skip
    assert epochs[0] != epochs[1] and [sorted(epoch) for epoch in epochs] == [list(range(48))] * 2


def worker(rank: int, folder: Path) -> None:
    padding_free.why_padded, found = pads, {}
    for cls in (Noted, Unsorted):
        trainer = trainer_of(cls, folder, save_strategy="steps", save_steps=STOPPED_AT // 2)
        trainer.train()
        found[cls.__name__] = (trainer.batches, losses(trainer))
        if cls is Noted:
            resumed = trainer_of(cls, folder)
            resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{STOPPED_AT // 2 * 2}"))
            found["resumed"] = resumed.batches, losses(resumed)
    assert not is_sorted(trainer_of(SFTTrainer, folder, average_tokens_across_devices=False)), "a mean over processes"
    torch.save(found, folder / f"{rank}.pt")


def test_two_processes_have_stock_s_steps(tmp_path: Path) -> None:
    """Eight documents a process: an epoch has three steps, and the last begins again to fill its micro-batches."""
    together(partial(worker), tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    dealt, plain, resumed = ([each[name][0] for each in ranks] for name in ("Noted", "Unsorted", "resumed"))

    def all_of(found: Any) -> dict[int, list[int]]:
        return in_steps({step: found[0][step] + found[1][step] for step in found[0]})

    assert all_of(dealt) == all_of(plain)
    assert all(list(map(len, dealt[0][step])) == list(map(len, dealt[1][step])) for step in dealt[0])
    assert ranks[0]["Noted"][1] == pytest.approx(ranks[0]["Unsorted"][1], rel=1e-5)
    lengths = {row["input_ids"][0]: len(row["input_ids"]) for row in documents()}
    for each in range(2):
        assert resumed[each] == {step: dealt[each][step] for step in range(STOPPED_AT // 2 * 2, STEPS)}
        for found in dealt[each].values():
            widest = [max(lengths[row] for row in batch) for batch in found]
            assert widest == sorted(widest, reverse=True)


class Backwards(Sampler):
    """An order of somebody's own."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(range(ROWS - 1, -1, -1))


class OwnOrder(SFTTrainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return Backwards()


def is_sorted(trainer: Any) -> bool:
    return isinstance(getattr(trainer.get_train_dataloader().batch_sampler, "sampler", None), ByLength)


def test_what_would_make_another_step_stays_stock_s(tmp_path: Path) -> None:
    assert is_sorted(trainer_of(SFTTrainer, tmp_path))
    for changes in (
        {"gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 1},
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"split_batches": True}},
    ):
        assert not is_sorted(trainer_of(SFTTrainer, tmp_path, **changes)), changes
    assert not is_sorted(trainer_of(OwnOrder, tmp_path))
    assert not is_sorted(trainer_of(SFTTrainer, tmp_path, rows=documents().to_iterable_dataset()))


@pytest.mark.parametrize("coefficient", [0.01, 0.0])
def test_a_loss_that_balances_experts_is_a_mean_over_stock_s_micro_batches(tmp_path: Path, coefficient: float) -> None:
    trainer = trainer_of(SFTTrainer, tmp_path, tiny_model("qwen3_moe"), router_aux_loss_coef=coefficient)
    assert is_sorted(trainer) is (coefficient == 0.0)


def test_rope_that_depends_on_the_longest_document_keeps_stock_s_batches(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for positions in (32, 64):
        model = tiny_model("llama", max_position_embeddings=positions, rope_parameters=dynamic)
        assert is_sorted(trainer_of(SFTTrainer, tmp_path, model)) is (positions == 64)


def test_noise_and_adapters_that_go_by_a_whole_batch_keep_stock_s_batches(tmp_path: Path) -> None:
    assert not is_sorted(trainer_of(SFTTrainer, tmp_path, neftune_noise_alpha=5.0))
    trainer = trainer_of(SFTTrainer, tmp_path)
    trainer.model.active_peft_config.alora_invocation_tokens = [5]  # as Lily's, of which not every PEFT knows
    assert not is_sorted(trainer)


def test_a_loss_of_one_s_own_keeps_stock_s_batches(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert not is_sorted(trainer_of(SFTTrainer, tmp_path, model))
    trainer = trainer_of(SFTTrainer, tmp_path)
    trainer.model_accepts_loss_kwargs = False
    assert not is_sorted(trainer), "each micro-batch's loss is its own mean"


def test_a_recipe_tells_how_full_its_batches_are(make: Make) -> None:  # noqa: F811
    told = Console(file=io.StringIO(), width=200)
    recipe = make(
        "unpacked",
        packing={"enabled": False, "rows_per_step": 4},
        train={"gradient_accumulation_steps": 5, "max_steps": 3, "save_steps": None, "logging_steps": 1},
    )
    record = run(recipe, told)
    line = r"Padded batches are ([\d.]+)% text, sorted by length within each step \(([\d.]+)% unsorted\)"
    found = re.search(line, told.file.getvalue())  # type: ignore[attr-defined]
    assert found is not None
    dealt, plain = (float(each) / 100 for each in found.groups())
    assert dealt > plain + 0.05
    places = sum(step["tokens"] / step["packing_efficiency"] for step in record.steps)
    assert sum(step["tokens"] for step in record.steps) / places == pytest.approx(dealt, abs=1e-3)
