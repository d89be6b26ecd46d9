"""A run attaches its model once and merges its weights once, from a recipe and from scripts alike."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.memory.devices import device_spec
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models import measured_layer
from pronghorn.models.attach import Handle, attached
from pronghorn.models.attach_options import AttachOptions
from pronghorn.models.auto_plan import dims_of, measured_times, setup_of
from support.fused import count_attachments
from support.runs import QUIET, Make, run
from support.tiny import packed_row
from support.trainers import LINEARS, ROW, config

ONCE = {"attached": 1, "merged": 1}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Attachments and merges of runs whose layers are fused, and whose plans are made by measured times."""
    monkeypatch.setattr(AttachOptions, "fuses", lambda options, model: True)
    monkeypatch.setattr("pronghorn.train.prepared_model.resolve", resolve_as_on_cuda)
    monkeypatch.setattr(measured_layer, "_measure", forwards_of_one_layer_and_of_two)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return count_attachments(monkeypatch)


def resolve_as_on_cuda(handle: Handle, rows: int, row_tokens: int, **_: Any) -> Plan | None:
    assert handle.plan is not None and handle.plan.undecided
    assert any("lora_" in name for name, _ in handle.model.named_parameters()), "the plan is made before the adapters"
    measured_times(handle.model, dims_of(handle.model), setup_of(handle.model, rows * row_tokens), device_spec("h100"))
    return handle.replan(Plan((Policy.RECOMPUTE_MLP,))).plan


def forwards_of_one_layer_and_of_two(base: Any, *_: Any) -> None:
    """What `_measure` times; each layer has to be fused."""
    handle, layers = attached(base), base.base_model.layers
    assert handle is not None and handle.plan == Plan.keep() and handle.layers is not None
    batch = packed_row([5, 12], 17)
    for count in (1, 2):
        base.base_model.layers = nn.ModuleList(list(layers)[:count])
        base.base_model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], packed=batch["packed"])
        assert len(handle.layers._builds[0].runs) == count
    base.base_model.layers = layers


def test_of_a_recipe(make: Make, counts: dict[str, int]) -> None:
    memory = {"gradient_checkpointing": "auto"}
    record = run(make("run", adapter={"r": 8, "lora_dropout": 0.0}, memory=memory, train={"max_steps": 2}), QUIET)
    assert {path["part"]: path["path"] for path in record.paths}["activations"] == Policy.RECOMPUTE_MLP
    assert counts == ONCE


@pytest.mark.parametrize("adapters_by", ["get_peft_model", "peft_config"])
def test_of_a_script(stories: Path, tmp_path: Path, counts: dict[str, int], adapters_by: str) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=ROW)
    options: dict[str, Any] = {}
    if adapters_by == "get_peft_model":
        model = FastLanguageModel.get_peft_model(model, r=8, target_modules=LINEARS, use_gradient_checkpointing="auto")
    else:
        options["peft_config"] = LoraConfig(r=8, target_modules=LINEARS)
    documents = [{"input_ids": list(range(3, 60)), "labels": list(range(3, 60))}] * 8
    trainer = SFTTrainer(
        model, config(tmp_path, max_steps=2), train_dataset=Dataset.from_list(documents), tokenizer=tokenizer, **options
    )
    handle = attached(trainer.model)  # type: ignore[arg-type]
    assert handle is not None and handle.plan == Plan((Policy.RECOMPUTE_MLP,))
    trainer.train()
    assert counts == ONCE and len([log for log in trainer.state.log_history if "loss" in log]) == 2
