"""The configuration and the adapted model of the trainers' tests."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from trl import SFTConfig

from pronghorn import FastLanguageModel, SFTTrainer

ROW = 128


LINEARS = ["q_proj", "v_proj", "down_proj"]


class Noting(SFTTrainer):
    """Notes what this process computes: by step the documents with a label, and the micro-batches without any."""

    documents: dict[int, list[tuple[int, ...]]]
    unlabelled = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.documents = defaultdict(list)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids, labels = inputs["input_ids"][0], inputs["labels"][0]
        begins = [*(inputs["position_ids"][0] == 0).nonzero().flatten().tolist(), len(ids)]
        for begin, end in pairwise(begins):
            if (labels[begin:end] != -100).any():
                self.documents[self.state.global_step].append(tuple(ids[begin:end].tolist()))
        self.unlabelled += int((labels == -100).all())
        return super().training_step(model, inputs, *args, **kwargs)


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
