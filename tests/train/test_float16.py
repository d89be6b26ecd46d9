"""float16: losses are scaled, steps that overflow are skipped, counted and shown, and too many of them end the run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from torch import Tensor
from transformers import TrainerCallback

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.errors import TrainingError
from pronghorn.records.record import RunRecord
from pronghorn.records.report import headlines
from pronghorn.train.gradients import MOST_SKIPPED
from pronghorn.train.run import run
from support.runs import Make
from support.trainers import config

STEPS = 6
SCALE = 2.0**8
"""With which nothing overflows by itself."""


class _Steps(TrainerCallback):
    """Keeps weights, loss scale and learning rate after every step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.weights: list[dict[str, Tensor]] = []
        self.scales: list[float] = []
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = self.trainer.model.named_parameters()
        self.weights.append({name: p.detach().clone() for name, p in named if p.requires_grad})
        self.scales.append(self.trainer.accelerator.scaler.get_scale())
        self.rates.append(self.trainer.lr_scheduler.get_last_lr()[0])


class _Planted(SFTTrainer):
    """Multiplies the loss of some steps, so that their gradients overflow."""

    overflows: tuple[int, ...] = ()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * 1e30 if self.state.global_step + 1 in self.overflows else loss


def trainer_of(
    stories: Path, folder: Path, full: bool = False, device: str = "cpu", **changes: Any
) -> tuple[_Planted, _Steps]:
    rows = Dataset.from_dict({"input_ids": [[1, *range(5, 60 + 9 * i)] for i in range(8)]})
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(stories),
        max_seq_length=256,
        dtype=None if full else "float16",
        full_finetuning=full,
        use_gradient_checkpointing=False,
    )
    if not full:
        model = FastLanguageModel.get_peft_model(model, r=4)
    settings = {"max_length": 256, "fp16": True, "max_steps": STEPS, "lr_scheduler_type": "linear"}
    settings |= {"use_cpu": device == "cpu"} | changes
    steps = _Steps()
    trainer = _Planted(model, config(folder, **settings), train_dataset=rows, tokenizer=tokenizer, callbacks=[steps])
    steps.trainer = trainer
    trainer.accelerator.scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    return trainer, steps


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


KINDS = [(False, 1.0, "adamw_torch_fused"), (True, 0.0, "adamw_torch_fused"), (False, 1.0, "adamw_torch")]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("full", "max_grad_norm", "optim"), KINDS)
def test_a_planted_overflow_skips_one_step_and_halves_the_scale(
    stories: Path, tmp_path: Path, full: bool, max_grad_norm: float, optim: str
) -> None:
    check_planted(*trainer_of(stories, tmp_path, full, max_grad_norm=max_grad_norm, optim=optim))


@pytest.mark.gpu
@pytest.mark.parametrize(("full", "max_grad_norm", "optim"), [*KINDS, (False, 1.0, "paged_adamw_8bit")])
def test_a_planted_overflow_on_a_gpu(
    stories: Path, tmp_path: Path, full: bool, max_grad_norm: float, optim: str
) -> None:
    trainer, steps = trainer_of(stories, tmp_path, full, "cuda", max_grad_norm=max_grad_norm, optim=optim)
    check_planted(trainer, steps)
    assert trainer.model.device.type == "cuda"


def check_planted(trainer: _Planted, steps: _Steps) -> None:
    trainer.overflows = (3,)
    trainer.train()
    moved = [not equal(*pair) for pair in zip(steps.weights, steps.weights[1:], strict=False)]
    assert moved == [True, False, True, True, True], "the third step alone must change nothing"
    assert steps.scales == [SCALE] * 2 + [SCALE / 2] * (STEPS - 2)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["skipped_steps"] for entry in logs] == [0, 0, 1, 1, 1, 1]
    assert [entry["loss_scale"] for entry in logs] == steps.scales
    # transformers counts a skipped step among max_steps, and doesn't advance the schedule for it; with fused
    # optimisers, which skip on the device, accelerate doesn't notice by itself
    assert steps.rates[1] == steps.rates[2] > steps.rates[3]
    assert steps.rates[-1] == pytest.approx(5e-3 / STEPS) and trainer.state.global_step == STEPS


@pytest.mark.slow
def test_a_scale_that_is_too_large_falls_until_it_fits(stories: Path, tmp_path: Path) -> None:
    trainer, steps = trainer_of(stories, tmp_path, max_steps=20)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    trainer.train()
    skipped = trainer.state.log_history[-2]["skipped_steps"]
    assert 0 < skipped < 15 and steps.scales[-1] == 2.0 ** (24 - skipped)
    assert not equal(steps.weights[-2], steps.weights[-1])


@pytest.mark.slow
def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_remedy(stories: Path, tmp_path: Path) -> None:
    trainer, steps = trainer_of(stories, tmp_path, max_steps=60)
    trainer.overflows = tuple(range(2, 60))
    with pytest.raises(
        TrainingError, match=rf"step {MOST_SKIPPED + 1}: .*float16 in {MOST_SKIPPED} steps in a row.*bf16"
    ):
        trainer.train()
    assert equal(steps.weights[0], steps.weights[-1])
    again, _ = trainer_of(stories, tmp_path / "again", max_steps=60)
    again.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)
    again.overflows = tuple(range(2, 61, 2))
    again.train()
    assert again.state.global_step == 60, "skipped steps that aren't in a row were added up"


def test_a_run_in_float16_shows_what_it_skipped(make: Make, tmp_path: Path) -> None:
    """torch's first scale, 65,536, is too large for this model."""
    console = Console(file=io.StringIO(), width=200)
    run(make("run", precision={"dtype": "float16"}, train={"max_steps": 6, "logging_steps": 1}), console)
    record = RunRecord.read(tmp_path / "run")
    skipped = int(record.steps[-1]["skipped"])
    assert 0 < skipped < 4
    assert record.steps[-1]["loss_scale"] == 2 ** (16 - skipped)
    scale = f"{2 ** (16 - skipped):,}"
    card = ("Skipped steps", str(skipped), f"gradients overflowed float16; the loss scale is {scale}")
    assert card in headlines(record)
    assert f"skipped {skipped}, loss scale {scale}" in console.file.getvalue()  # type: ignore[attr-defined]
