"""A step waits for the GPU nowhere, and losses that aren't finite are logged as stock logs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from pronghorn import SFTTrainer
from pronghorn.train.non_blocking import NonBlockingTrainer
from pronghorn.train.shared_layers import SharedLayersTrainer
from support.trainers import adapted, config

ROWS = Dataset.from_list([{"input_ids": [5, 6, 7, 8, 9 + n, 10], "labels": [5, 6, 7, 8, 9 + n, 10]} for n in range(99)])
BAD = {3: float("nan"), 5: float("inf")}
"""Losses of some steps."""


def trained(stories: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, of: Any = trl.SFTTrainer, **args: Any) -> Any:
    """Train by a trainer some of whose losses aren't finite, though gradients are: from the method `of` this class."""
    step = of.training_step

    def broken(self: Any, *given: Any, **named: Any) -> Tensor:
        loss = step(self, *given, **named)
        return loss * BAD.get(self.state.global_step, 1.0)

    monkeypatch.setattr(of, "training_step", broken)
    model, tokenizer = adapted(stories)
    asked = config(folder, max_steps=6, logging_steps=2, **args)
    trainer = SFTTrainer(model, asked, train_dataset=ROWS, eval_dataset=ROWS, tokenizer=tokenizer)
    trainer.train()
    monkeypatch.undo()
    return trainer


def logged(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("of", [trl.SFTTrainer, SFTTrainer], ids=["stock's", "a subclass's"])
def test_losses_that_are_not_finite_are_logged_as_in_stock(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Any
) -> None:
    ours = trained(stories, tmp_path / "ours", monkeypatch, of)
    for name in ("train", "training_step", "_track_num_input_tokens"):
        monkeypatch.delattr(NonBlockingTrainer, name)
    stock = trained(stories, tmp_path / "stock", monkeypatch, of)
    assert logged(ours) == logged(stock) and all(0 < loss < 30 for loss in logged(ours))
    assert ours.args.logging_nan_inf_filter is True


def test_losses_that_are_not_finite_are_logged_where_no_filter_is_asked_for(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trained(stories, tmp_path, monkeypatch, logging_nan_inf_filter=False)
    assert [loss == loss for loss in logged(ours)] == [True, False, False]  # no number is unlike itself


def test_the_arguments_are_as_given_wherever_they_are_read_or_saved(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    seen: dict[str, bool] = {}

    class Looks(SFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            seen["step"] = self.args.logging_nan_inf_filter
            return loss

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            seen["evaluation"] = self.args.logging_nan_inf_filter
            return super().prediction_step(*args, **kwargs)

    class Notes(TrainerCallback):
        """Notes what trackers of experiments write down."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["begin"] = args.logging_nan_inf_filter

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["update"] = args.logging_nan_inf_filter

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["substep"] = args.logging_nan_inf_filter

    asked = config(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)
    asked.eval_packing, asked.gradient_accumulation_steps = False, 2
    held_out = ROWS.select(range(4))
    given = {"train_dataset": ROWS, "eval_dataset": held_out, "tokenizer": tokenizer, "callbacks": [Notes()]}
    Looks(model, asked, **given).train()
    saved = torch.load(tmp_path / "checkpoint-1/training_args.bin", weights_only=False)
    everywhere = dict.fromkeys(("begin", "update", "substep", "evaluation"), True)
    assert seen == {"step": False, **everywhere} and saved.logging_nan_inf_filter and asked.logging_nan_inf_filter


def test_a_training_that_is_interrupted_leaves_the_arguments_as_given(stories: Path, tmp_path: Path) -> None:
    class Interrupted(SFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            super().training_step(*args, **kwargs)
            raise KeyboardInterrupt

    model, tokenizer = adapted(stories)
    trainer = Interrupted(model, config(tmp_path), train_dataset=ROWS, tokenizer=tokenizer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.args.logging_nan_inf_filter


def test_where_stock_keeps_its_sum_elsewhere_it_filters_itself(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = adapted(stories)
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=ROWS, tokenizer=tokenizer)
    monkeypatch.setattr(SharedLayersTrainer, "training_step", lambda self: torch.tensor(float("nan")), raising=False)
    trainer._corrects = True
    assert NonBlockingTrainer.training_step(trainer).isnan() and trainer.args.logging_nan_inf_filter


def test_where_stock_does_not_call_what_corrects_its_sum_it_filters_itself_from_the_second_step_on(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NonBlockingTrainer, "_track_num_input_tokens", lambda self, inputs: None)
    ours = trained(stories, tmp_path, monkeypatch)
    assert all(0 < loss < 30 for loss in logged(ours)) and ours.args.logging_nan_inf_filter


@pytest.mark.gpu
@pytest.mark.parametrize("packs", [True, False])
def test_a_step_of_a_script_never_waits(stories: Path, tmp_path: Path, packs: bool) -> None:
    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.cuda.set_sync_debug_mode("error" if 8 <= state.global_step < 12 else "default")

    model, tokenizer = adapted(stories)
    asked = config(tmp_path, max_steps=13, logging_steps=100, packing=packs, use_cpu=False)
    trainer = SFTTrainer(model.cuda(), asked, train_dataset=ROWS, tokenizer=tokenizer, callbacks=[Watch()])
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 13
