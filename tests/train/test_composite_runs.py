"""Runs of models with towers: the language model trains on text, and what a run leaves is the whole model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig
from trl import SFTConfig

import pronghorn
from pronghorn.config.recipe import Recipe
from pronghorn.errors import RunStopped, UnsupportedError
from pronghorn.loading.load import load_model
from pronghorn.train.chat import load_chat
from pronghorn.train.control import RunControl
from pronghorn.train.run import run
from support.composites import class_of, stored_tensors, write_composite
from support.runs import QUIET, stop_at

TOKENS = torch.arange(1, 30)[None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_composite(tmp_path / "base", "gemma3")
    return tmp_path / "base"


def recipe(base: Path, output: Path, method: str) -> Recipe:
    rows = base.parent / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"say {n}", "completion": f" {n} {n}"}) for n in range(40)))
    return Recipe.model_validate(
        {
            "model": {"name": str(base), "max_seq_length": 64},
            "adapter": {"r": 4, "method": method},
            "data": {"train": str(rows)},
            "train": {
                "output": str(output),
                "max_steps": 6,
                "learning_rate": 1e-2,
                "warmup_steps": 1,
                "save_steps": 2,
                "deterministic": True,
            },
            "report": {"html": False},
        }
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return result


@pytest.mark.matrix(1)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    method: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = "adapter" if method == "lora" else "model"
    run(recipe(base, tmp_path / "whole", method), QUIET)
    with monkeypatch.context() as patch:
        patch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 4))
        with pytest.raises(RunStopped):
            run(recipe(base, tmp_path / "stopped", method), QUIET)
    run(recipe(base, tmp_path / "stopped", method), QUIET)
    first, second = (stored_tensors(tmp_path / name / part) for name in ("whole", "stopped"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_adapter_of_a_run_is_the_whole_models(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run(recipe(base, tmp_path / "run", "lora"), QUIET)
    whole = class_of(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype=torch.float32)
    again, _ = load_model(tmp_path / "run" / "adapter", max_seq_length=64, dtype="float32")
    theirs = logits(PeftModel.from_pretrained(whole, tmp_path / "run" / "adapter"))
    torch.testing.assert_close(theirs, logits(again), rtol=1e-4, atol=1e-4)
    assert any(
        name.startswith("base_model.model.model.language_model.") for name in stored_tensors(tmp_path / "run/adapter")
    )
    assert load_chat(tmp_path / "run").models["trained"] is not None


def test_a_fully_trained_run_leaves_the_whole_model(base: Path, tmp_path: Path) -> None:
    run(recipe(base, tmp_path / "run", "full"), QUIET)
    original, written = stored_tensors(base), stored_tensors(tmp_path / "run" / "model")
    assert original.keys() == written.keys()
    assert all(torch.equal(original[name], written[name]) == ("language_model" not in name) for name in original)
    whole = class_of(AutoConfig.from_pretrained(base)).from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    again, _ = load_model(tmp_path / "run" / "model", max_seq_length=64, dtype="float32")
    assert torch.equal(logits(whole), logits(again))
    assert (tmp_path / "run" / "model" / "preprocessor_config.json").is_file()


def test_an_adapter_that_the_trainer_makes_is_saved_under_the_whole_models_names(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    model, tokenizer = pronghorn.FastLanguageModel.from_pretrained(str(base), max_seq_length=64, dtype="float32")
    args = SFTConfig(
        output_dir=str(tmp_path / "out"),
        packing=True,
        max_length=64,
        max_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    rows = Dataset.from_list([{"text": f"{n} is {n}" * 3} for n in range(20)])
    trainer = pronghorn.SFTTrainer(
        model, args, tokenizer=tokenizer, train_dataset=rows, peft_config=LoraConfig(r=4, target_modules=["q_proj"])
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    names = stored_tensors(tmp_path / "saved")
    assert names and all(".language_model.layers." in name for name in names)


PARTS = [{"type": "image", "text": None}, {"type": "text", "text": "what is it?"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "images": ["a.png"]}, r"train_dataset has images: training is text only for now"),
        ({"messages": [{"role": "user", "content": PARTS}]}, r"in its first row's messages, has image: training is"),
    ],
)
def test_data_with_images_are_refused_before_anything_trains(
    row: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    model, tokenizer = pronghorn.FastLanguageModel.from_pretrained(str(base), max_seq_length=64, dtype="float32")
    args = SFTConfig(output_dir=str(tmp_path), packing=True, max_length=64, report_to="none", use_cpu=True, bf16=False)
    with pytest.raises(UnsupportedError, match=message):
        pronghorn.SFTTrainer(model, args, tokenizer=tokenizer, train_dataset=Dataset.from_list([row]))
