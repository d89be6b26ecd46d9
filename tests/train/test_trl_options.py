"""Options of TRL and transformers that the trainer's own ways passed over, beside stock TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import EarlyStoppingCallback

from pronghorn import SFTTrainer
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from pronghorn.train.counters import StepCounters
from support.tiny import stock_loss_on_cpu, tiny_model
from support.trainers import config

LENGTH = 16


def documents(rows: int = 10) -> Dataset:
    draw = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, 131, (rows, LENGTH), generator=draw).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer_of(cls: Any, folder: Path, family: str = "llama", **changes: Any) -> Any:
    """Make a trainer whose packed rows are one document each."""
    model = add_lora(tiny_model(family), r=2)
    args = config(folder, **({"max_length": LENGTH, "per_device_train_batch_size": 2, "max_steps": 2} | changes))
    given = {"train_dataset": documents(), "eval_dataset": documents(5)}
    return cls(model, args, **given, processing_class=byte_tokenizer(64))


@stock_loss_on_cpu
def test_packed_evaluations_tell_what_stock_s_tell(tmp_path: Path) -> None:
    found = []
    for cls, packing in ((SFTTrainer, True), (trl.SFTTrainer, False)):
        trainer = trainer_of(cls, tmp_path, packing=packing, skip_memory_metrics=False, max_steps=1)
        trainer.train()
        found.append(trainer.evaluate())
    unmeasured = {f"eval_{name}" for name in ("mean_token_accuracy", "entropy", "num_tokens")}
    assert set(found[1]) - set(found[0]) == unmeasured and set(found[0]) <= set(found[1])
    assert {"epoch", "eval_samples_per_second", "eval_mem_cpu_alloc_delta"} <= set(found[0])
    assert found[0]["epoch"] == found[1]["epoch"] == 0.2


@stock_loss_on_cpu
def test_the_routers_auxiliary_loss_is_logged_as_trl_logs_it(tmp_path: Path) -> None:
    found = []
    for cls in (SFTTrainer, trl.SFTTrainer):
        trainer = trainer_of(cls, tmp_path, "qwen3_moe", packing=False, gradient_accumulation_steps=2, logging_steps=2)
        trainer.train()
        found.append([entry["aux_loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[0]) == 1 and found[0] == pytest.approx(found[1], rel=1e-4)
    packed = trainer_of(SFTTrainer, tmp_path, "qwen3_moe")
    packed.train()
    assert all(entry["aux_loss"] > 0 for entry in packed.state.log_history if "loss" in entry)
    without = trainer_of(SFTTrainer, tmp_path, "qwen3_moe", router_aux_loss_coef=0.0)
    without.train()
    assert not any("aux_loss" in entry for entry in without.state.log_history)


def test_an_auxiliary_loss_is_the_mean_since_the_last_log() -> None:
    counters, place = StepCounters(), torch.tensor(1.0)
    counters.add_balance(place)
    counters.add_balance(place.fill_(2.0))  # as a graph's replay does
    assert counters.take(torch.device("cpu"), balances=True)["aux_loss"] == 1.5
    assert counters.take(torch.device("cpu"), balances=True)["aux_loss"] == 0
    assert "aux_loss" not in counters.take(torch.device("cpu"))


def test_an_auxiliary_loss_chooses_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'eval_aux_loss', which evaluations don't measure here: use 'loss'"):
        trainer_of(SFTTrainer, tmp_path, "qwen3_moe", metric_for_best_model="eval_aux_loss")


def test_tokenised_documents_are_shuffled_before_they_are_packed(tmp_path: Path) -> None:
    packed = trainer_of(SFTTrainer, tmp_path, shuffle_dataset=True).train_dataset.documents
    assert list(packed["input_ids"]) == list(documents().shuffle(seed=1)["input_ids"])


def test_selective_checkpointing_beside_a_plan_is_refused(tmp_path: Path) -> None:
    model = add_lora(tiny_model("llama"), r=2)
    attach(model, Plan.keep())
    args = config(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True})
    with pytest.raises(ConfigError, match=r"'selective': True}, and the model's memory plan .* leave it out"):
        SFTTrainer(model, args, train_dataset=documents(), processing_class=byte_tokenizer(64))


def test_arguments_by_place_are_trl_s(tmp_path: Path) -> None:
    model, args = add_lora(tiny_model("llama"), r=2), config(tmp_path, max_length=LENGTH, max_steps=1)
    tokenizer, stop = byte_tokenizer(64), EarlyStoppingCallback()
    with pytest.raises(ConfigError, match="given train_dataset twice: as argument 4, and by name: leave one out"):
        SFTTrainer(model, args, None, documents(), train_dataset=documents(), processing_class=tokenizer)
    with pytest.raises(ConfigError, match=r"\d+ arguments by place, and SFTTrainer has \d+: name them"):
        SFTTrainer(model, args, *[None] * 40)
    trainer = SFTTrainer(model, args, None, documents(), documents(5), tokenizer, None, None, [stop])
    assert trainer.processing_class is tokenizer and len(trainer.eval_dataset) == 5
    assert stop in trainer.callback_handler.callbacks
