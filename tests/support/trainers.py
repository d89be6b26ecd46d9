"""The configuration and the adapted model of the trainers' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import SFTConfig

from pronghorn import FastLanguageModel

ROW = 128


LINEARS = ["q_proj", "v_proj", "down_proj"]


def config(folder: Path, **changes: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "packing": True,
        "max_length": ROW,
        "max_steps": 4,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }
    return SFTConfig(**(settings | changes))


def adapted(stories: Path, **changes: Any) -> tuple[Any, Any]:
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(stories), max_seq_length=ROW, use_gradient_checkpointing=False
    )
    return FastLanguageModel.get_peft_model(model, r=4, target_modules=LINEARS, **changes), tokenizer
