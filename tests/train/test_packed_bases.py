"""Training over checkpoints in few bits, from loading to the last step, alone and under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from pronghorn import FastLanguageModel
from pronghorn.kernels.packed import PackedTensor
from pronghorn.train.trainer import SFTTrainer
from support.documents import LENGTHS
from support.packed_linears import KINDS, packed_linears
from support.processes import alone
from support.tiny import packed_row
from support.trainers import ROW, config


def trainer_over(folder: Path, kind: str, compute: str = "dtype", **changes: Any) -> Any:
    packed_linears(folder / "base", kind, vocab_size=512)
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder / "base"), max_seq_length=ROW, use_gradient_checkpointing=False, compute=compute
    )
    model = FastLanguageModel.get_peft_model(model, r=4)
    rows = datasets.Dataset.from_dict({"text": ["The quick brown fox jumps over the lazy dog. " * 2] * 16})
    return SFTTrainer(model, config(folder / "run", **changes), tokenizer=tokenizer, train_dataset=rows)


@pytest.mark.parametrize("kind", ["fine-grained", "nvfp4"])
def test_the_loss_falls(tmp_path: Path, kind: str) -> None:
    check_falls(trainer_over(tmp_path, kind, max_steps=6))


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["dtype", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_on_a_gpu(tmp_path: Path, kind: str, compute: str) -> None:
    trainer = trainer_over(tmp_path, kind, compute, max_steps=6, use_cpu=False)
    check_falls(trainer)
    assert {each.device.type for each in trainer.model.parameters()} == {"cuda"}
    trainer.save_model(str(tmp_path / "adapter"))
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=ROW)
    batch = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    with torch.no_grad():
        losses = [model.eval()(**batch).loss for model in (trainer.model, again)]
    assert losses[0] == losses[1]


def check_falls(trainer: Any) -> None:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert sum(isinstance(each, PackedTensor) for each in trainer.model.parameters()) == 14


def test_ddp_leaves_packed_weights_to_each_process(tmp_path: Path) -> None:
    trainer = trainer_over(tmp_path, "nvfp4")
    with alone():
        wrapped = DistributedDataParallel(trainer.model)
        wrapped(**packed_row(LENGTHS, ROW)).loss.backward()
    trained = [each for each in trainer.model.parameters() if each.requires_grad]
    assert trained and all(each.grad is not None and torch.isfinite(each.grad).all() for each in trained)
