"""Adapters have the dtype that is asked for, by themselves: over any base, through the trainer and in what is saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError
from pronghorn.memory.estimate import resting_bytes
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.lora import add_lora, cast_adapters
from pronghorn.train.run import run
from support.runs import QUIET, Make
from support.tiny import packed_row, tiny_model
from support.trainers import config


def adapters(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("asked", "dtype"), [(None, "float32"), ("auto", "float32"), ("bf16", "bfloat16")])
def test_adapters_have_the_dtype_asked_for_over_any_base(base: torch.dtype, asked: str | None, dtype: str) -> None:
    model = add_lora(tiny_model("llama").to(base), r=4, adapter_dtype=asked)
    assert {parameter.dtype for parameter in adapters(model)} == {getattr(torch, dtype)}
    assert model.get_input_embeddings().weight.dtype is base


@pytest.mark.matrix(2)
@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_the_trainer_and_the_optimiser_keep_it_and_the_plan_counts_it(
    stories: Path, tmp_path: Path, load_in_4bit: bool, asked: str
) -> None:
    """TRL would round adapters of 4-bit bases to bfloat16."""
    if load_in_4bit:
        pytest.importorskip("bitsandbytes")
    dtype = getattr(torch, asked)
    rows = Dataset.from_dict({"input_ids": [[1, *range(5, 60 + 9 * i)] for i in range(8)]})
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=256, load_in_4bit=load_in_4bit)
    model = FastLanguageModel.get_peft_model(model, r=4, adapter_dtype=dtype)
    trainer = SFTTrainer(model, config(tmp_path, max_length=256), train_dataset=rows, tokenizer=tokenizer)
    before = [parameter.detach().clone() for parameter in adapters(model)]
    trainer.train()
    assert {parameter.dtype for parameter in adapters(model)} == {dtype}
    assert any(not torch.equal(*pair) for pair in zip(before, adapters(model), strict=True))
    states = trainer.optimizer.optimizer.state.values()
    assert {state["exp_avg"].dtype for state in states} == {dtype}
    resting = resting_bytes(dims_of(model), setup_of(model, 256))
    count = sum(parameter.numel() for parameter in adapters(model))
    assert (resting["gradients"], resting["optimizer"], resting["adapters"]) == tuple(
        dtype.itemsize * count * states for states in (1, 2, 1)
    )


def test_fused_layers_take_bfloat16_adapters() -> None:
    """Adapters of the same values in float32 and in bfloat16 give one loss, and gradients to bfloat16's rounding."""
    model = add_lora(tiny_model("llama").bfloat16(), r=4)
    torch.manual_seed(0)
    for parameter in adapters(model):
        parameter.data = (torch.randn_like(parameter) * 0.05).bfloat16().float()
    batch, found = packed_row([20, 1, 30], 64), []
    for dtype in (torch.float32, torch.bfloat16):
        trained = copy.deepcopy(model)
        cast_adapters(trained, dtype)
        attach(trained, layers="fused")
        loss = trained(**batch, use_cache=False).loss
        loss.backward()
        assert {parameter.grad.dtype for parameter in adapters(trained)} == {dtype}
        found.append((loss.item(), [parameter.grad.float() for parameter in adapters(trained)]))
    assert found[0][0] == found[1][0]
    for wide, narrow in zip(found[0][1], found[1][1], strict=True):
        assert (wide - narrow).norm() <= 2**-8 * wide.norm()


def test_a_recipe_saves_adapters_in_their_dtype(make: Make, tmp_path: Path) -> None:
    run(make("run", precision={"adapter_dtype": "bfloat16"}, train={"max_steps": 2}), QUIET)
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    again = {"model": {"name": str(tmp_path / "run" / "adapter")}, "precision": {"adapter_dtype": "float32"}}
    run(make("again", **again, train={"max_steps": 2}), QUIET)
    saved = load_file(tmp_path / "again" / "adapter" / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


def test_what_cannot_be_trained_is_refused_before_loading(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: no/model, max_seq_length: 8}}\n"
        f"data: {{train: {tmp_path}/rows.jsonl}}\ntrain: {{output: {tmp_path}/run}}\n"
    )
    with pytest.raises(ConfigError, match=r"adapter_dtype: float16: .*unscale"):
        Recipe.load(recipe, ["precision.adapter_dtype=fp16"])
    with pytest.raises(ConfigError, match=r"adapter_dtype: bfloat16 with adapter.method: full"):
        Recipe.load(recipe, ["precision.adapter_dtype=bf16", "adapter.method=full"])
    for dtype in (torch.float16, "int8"):
        with pytest.raises(ConfigError, match=r"adapter_dtype .* is not served"):
            add_lora(tiny_model("llama"), adapter_dtype=dtype)
