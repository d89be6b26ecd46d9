"""Adapters of every name come back from a checkpoint, and what a checkpoint lacks is told of or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from pronghorn import SFTTrainer
from pronghorn.errors import ConfigError, DataError
from pronghorn.models.lora import cast_adapters
from pronghorn.train.saved_adapters import trained_beside
from support.trainers import LINEARS, config

ROWS = Dataset.from_list([{"prompt": "One day", "completion": f" a cat sat {n}."} for n in range(8)])
BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,
}


def one_of_another_name(base: Any) -> Any:
    return get_peft_model(base, LoraConfig(r=4, target_modules=LINEARS), adapter_name="mine")


def two(base: Any, second: LoraConfig | None = None) -> Any:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=LINEARS))
    model.add_adapter("second", second or LoraConfig(r=4, target_modules=LINEARS))
    return model


def second_of_two(base: Any) -> Any:
    model = two(base)
    model.set_adapter("second")
    return model


def two_at_once(base: Any) -> Any:
    model = two(base, LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


def by_transformers(base: Any) -> Any:
    base.add_adapter(LoraConfig(r=4, target_modules=LINEARS))
    return base


def in_bfloat16(base: Any) -> Any:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=LINEARS))
    cast_adapters(model, torch.bfloat16)
    return model


def trainer(stories: Path, folder: Path, adapt: Callable[[Any], Any], **args: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = adapt(base)
    asked = config(folder, save_strategy="steps", save_steps=2, **args)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    return SFTTrainer(model, asked, train_dataset=ROWS, eval_dataset=ROWS, tokenizer=tokenizer)


def adapters(of: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in of.model.named_parameters() if ".lora_" in name}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, each in expected.items():
        assert found[name].dtype is each.dtype
        assert torch.equal(found[name], each), name


def trained(of: Any) -> list[str]:
    return [name for name, each in of.model.named_parameters() if each.requires_grad]


def norms_beside(base: Any) -> Any:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=LINEARS))
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


WAYS = [one_of_another_name, second_of_two, two_at_once, by_transformers, in_bfloat16]


@pytest.mark.parametrize("adapt", WAYS)
def test_a_resumed_training_goes_on_with_its_adapters(
    stories: Path, tmp_path: Path, adapt: Callable[[Any], Any]
) -> None:
    straight, resumed = (trainer(stories, tmp_path, adapt) for _ in range(2))
    straight.train()
    active, asked = resumed.model.active_adapters, trained(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(adapters(resumed), adapters(straight))
    assert (resumed.model.active_adapters, trained(resumed)) == (active, asked)


@pytest.mark.parametrize("adapt", WAYS)
def test_the_best_checkpoint_s_adapters_are_kept(
    stories: Path, tmp_path: Path, adapt: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 4.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(losses))
    first = trainer(stories, tmp_path, adapt, **BEST)
    first.train()
    assert first.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    half = trainer(stories, tmp_path / "half", adapt, max_steps=2)
    half.train()
    assert_same(adapters(first), adapters(half))


def test_a_checkpoint_without_an_adapter_of_the_model_is_refused(stories: Path, tmp_path: Path) -> None:
    first = trainer(stories, tmp_path, second_of_two, max_steps=2)
    first.train()
    shutil.rmtree(tmp_path / "checkpoint-2/second")
    (tmp_path / "checkpoint-2/manifest.json").unlink()
    with pytest.raises(DataError, match="holds no adapter 'second', which the model has"):
        first.load_weights(tmp_path / "checkpoint-2")


def test_base_weights_that_are_trained_beside_an_adapter(
    stories: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = trainer(stories, tmp_path, norms_beside, max_steps=2)
    assert trained_beside(first.model) == ["base_model.model.model.norm.weight"]
    first.train()
    assert "1 weight of the base is trained beside the adapter (base_model.model.model.norm.weight" in caplog.text
    with pytest.raises(DataError, match=r"lacks 1 weight that is trained beside .*model\.norm\.weight"):
        trainer(stories, tmp_path, norms_beside).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="load_best_model_at_end, and checkpoints lack 1 weight"):
        trainer(stories, tmp_path, norms_beside, **BEST).train()


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["norm", "lm_head"]},
        {"trainable_token_indices": [5, 6]},
        {"use_dora": True},
        {"lora_bias": True},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
)
def test_what_peft_saves_is_not_beside(stories: Path, options: dict[str, Any]) -> None:
    base = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": LINEARS, **options}))
    assert trained_beside(model) == []
    assert trained_beside(base.train()) == []


def test_biases_that_peft_saves_are_not_beside() -> None:
    from support.tiny import tiny_model

    model = get_peft_model(
        tiny_model("llama", attention_bias=True), LoraConfig(r=4, target_modules=LINEARS, bias="all")
    )
    assert trained_beside(model) == []
