"""One of several processes runs out of memory in a step (tests/train/test_oom_retry.py starts them).

torchrun --nproc-per-node 2 tests/support/short_of_memory.py TOKENIZER OUTPUT RANK TIMES cpu|cuda
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer
from trl import SFTConfig

from pronghorn import SFTTrainer
from pronghorn.models.attach import attached
from support.tiny import tiny_model

ROW, STEP = 48, 2


class ShortOfMemory(SFTTrainer):
    """Runs out of memory so many times in the second step of one rank, where the others wait for its gradients."""

    failing = times = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step + 1 == STEP and self.accelerator.process_index == self.failing and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss


def main(tokenizer: str, output: str, failing: int, times: int, device: str) -> None:
    torch.set_num_threads(1)
    cuda = device == "cuda"
    ids = [[3 + (7 * i + j) % 120 for j in range(40)] for i in range(16)]
    args = SFTConfig(
        output_dir=output,
        packing=True,
        max_length=ROW,
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not cuda,
        ddp_backend="nccl" if cuda else "gloo",
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = ShortOfMemory(
        model,
        args,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
    )
    trainer.failing, trainer.times = failing, times
    trainer.train()
    handle = attached(model)
    assert handle is not None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = {"losses": losses, "plan": handle.plan and handle.plan.policies}
    Path(output, f"rank-{trainer.accelerator.process_index}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()  # else gloo's threads may abort the process that ends last


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
