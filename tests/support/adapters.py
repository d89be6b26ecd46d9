"""Saved adapters."""

from __future__ import annotations

from pathlib import Path

import torch

from pronghorn import FastLanguageModel


def adapter_that_shows(model: Path, folder: Path) -> Path:
    """Save an adapter of a model, with its tokenizer, that changes what the model says."""
    base, tokenizer = FastLanguageModel.from_pretrained(str(model), max_seq_length=64, dtype="float32")
    adapted = FastLanguageModel.get_peft_model(base, r=4, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.03)
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
