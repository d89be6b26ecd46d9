"""The scripts of docs/preference-training.md run as printed, on a small model and for two steps."""

from __future__ import annotations

import json
import math
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from trl import DPOConfig, DPOTrainer

from pronghorn import FastLanguageModel
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.models.lora import add_lora
from support.forked import forked
from support.tiny import tiny_model

PAGE = Path(__file__).parents[2] / "docs/preference-training.md"
SCRIPTS = dict(re.findall(r"## (\w+)\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
ROWS: dict[str, list[dict[str, Any]]] = {
    "pairs": [{"prompt": "One day", "chosen": " a cat sat.", "rejected": " no."}] * 8,
    "labels": [{"prompt": "One day", "completion": f" cat {i}.", "label": bool(i % 2)} for i in range(8)],
    "prompts": [{"prompt": "One day a cat"}] * 8,
}


def test_the_page_has_a_script_for_each_task() -> None:
    assert list(SCRIPTS) == ["DPO", "KTO", "ORPO", "GRPO"]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("task", SCRIPTS)
def test_a_script_trains_as_printed(task: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = SCRIPTS[task]
    for printed, here in {
        '"Qwen/Qwen3-0.6B"': repr(str(stories)),
        "max_steps=100": "max_steps=2, use_cpu=True, report_to='none'",
        "max_seq_length=2048": "max_seq_length=256",
    }.items():
        assert printed in script, printed
        script = script.replace(printed, here)
    script = script.replace("max_length=1024", "max_length=128").replace(
        "max_completion_length=256", "max_completion_length=8"
    )
    (tmp_path / "script.py").write_text(script)
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = forked(tmp_path, partial(runpy.run_path, "script.py", run_name="__main__"))
    assert done.returncode == 0, done.stderr[-3000:]
    weights = load_file(tmp_path / f"runs/{task.lower()}/adapter/adapter_model.safetensors")
    trained = [tensor for name, tensor in weights.items() if "lora_B" in name]
    assert trained and all(torch.isfinite(tensor).all() for tensor in trained)
    assert any(tensor.any() for tensor in trained)  # they begin at zero


def first_loss(model: Any, tokenizer: Any, out: Path) -> float:
    """Return the loss of DPO's first step."""
    args = DPOConfig(str(out), max_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no")
    rows = Dataset.from_list(ROWS["pairs"])
    trainer = DPOTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=rows)
    loss: float = trainer.train().training_loss
    return loss


@pytest.mark.parametrize("tied", [True, False])
def test_trained_rows_of_embeddings_are_merged_first_as_the_page_says(tied: bool, tmp_path: Path) -> None:
    """If TRL copies them to its reference, or reads such a head, the page can leave that out."""
    tiny_model("llama", vocab_size=264, tie_word_embeddings=tied, eos_token_id=1).save_pretrained(tmp_path / "base")
    byte_tokenizer(256).save_pretrained(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=256)
    model = add_lora(model, r=2, trainable_token_indices={"embed_tokens": list(range(264))})
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.05
    FastLanguageModel.save_pretrained_merged(model, tmp_path / "merged", tokenizer)
    if tied:
        with pytest.raises(AttributeError, match="object has no attribute 'bias'"):
            first_loss(model, tokenizer, tmp_path)
    else:
        assert abs(first_loss(model, tokenizer, tmp_path) - math.log(2)) > 1e-4
    merged, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path / "merged"), max_seq_length=256)
    assert first_loss(add_lora(merged, r=2), tokenizer, tmp_path) == pytest.approx(math.log(2), abs=1e-6)
