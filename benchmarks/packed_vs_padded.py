"""A real model on real text: packed rows against the same trainer with padded batches, in one run.

Trains LoRA on GSM8K twice from the same weights, on the same documents in the same order of magnitude of tokens a step:
packed rows of `--row` tokens, and batches padded to their longest document with as many documents as fill such a row on
average. Reports real tokens/s (padding not counted) of both, and the held-out loss before and after.

    python -m benchmarks.packed_vs_padded --model SMOLLM2_FOLDER --data gsm8k/ --out DIR
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from trl import SFTConfig

from benchmarks.counts import measure_ceilings
from benchmarks.record import Result, Workload, check_out, command_line, write_results
from pronghorn.api import FastLanguageModel
from pronghorn.data.labels import label_rows
from pronghorn.data.overflow import fit
from pronghorn.data.sources import read_rows
from pronghorn.train.trainer import SFTTrainer

COLUMNS = {"prompt": "question", "completion": "answer"}


def documents(path: Path, tokenizer: Any, row: int, limit: int) -> Dataset:
    rows = read_rows(path, COLUMNS)[:limit]
    made = fit(label_rows(rows, tokenizer).documents, row, "truncate").documents
    return Dataset.from_dict({"input_ids": [d.input_ids for d in made], "labels": [d.labels for d in made]})


def train(arguments: argparse.Namespace, packing: bool, train_rows: int) -> dict[str, Any]:
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(arguments.model), max_seq_length=arguments.row, use_gradient_checkpointing=False
    )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)
    data = documents(arguments.data / "train.jsonl", tokenizer, arguments.row, train_rows)
    held_out = documents(arguments.data / "test.jsonl", tokenizer, arguments.row, 400)
    mean = statistics.mean(len(ids) for ids in data["input_ids"])
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            packing=packing,
            eval_packing=True,
            max_length=arguments.row,
            per_device_train_batch_size=1 if packing else round(arguments.row / mean),
            per_device_eval_batch_size=1,
            max_steps=arguments.steps,
            learning_rate=5e-4,
            warmup_steps=10,
            lr_scheduler_type="linear",
            logging_steps=5,
            gradient_checkpointing=False,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=3407,
            accelerator_config={"dispatch_batches": False, "non_blocking": True},
        )
        trainer = SFTTrainer(model, config, train_dataset=data, eval_dataset=held_out, tokenizer=tokenizer)
        before = trainer.evaluate()["eval_loss"]
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        peak = torch.cuda.max_memory_allocated()
        after = trainer.evaluate()["eval_loss"]
    logs = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry][2:]
    return {
        "before": before,
        "after": after,
        "losses": [entry["loss"] for entry in logs],
        "real_tokens_per_s": [entry["tokens_per_second"] for entry in logs],
        "step_ms": [entry["step_seconds"] * 1e3 / config.logging_steps for entry in logs],
        "real_tokens": sum(entry["tokens"] for entry in logs),
        "memory_bytes": {"resting": resting, "peak": peak},
        "batch": config.per_device_train_batch_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct as a safetensors folder")
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--row", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--train-rows", type=int, default=7473)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    out = arguments.out / "packed-vs-padded-smollm2.json"
    check_out(out)
    ceilings = measure_ceilings()
    results = []
    for candidate, packing in (("packed", True), ("padded", False)):
        found = train(arguments, packing, arguments.train_rows)
        gc.collect()
        torch.cuda.empty_cache()
        results.append(
            Result(
                command=command_line(),
                candidate=f"pronghorn, {candidate}",
                workload=Workload("SmolLM2-135M-Instruct", "lora r16", arguments.row, "gsm8k", -1.0, 3407),
                gate={
                    "heldout_before": found["before"],
                    "heldout_after": found["after"],
                    "green": found["after"] < found["before"] - 0.1,
                },
                timings_ms={"step": found["step_ms"]},
                memory_bytes=found["memory_bytes"],
                ceilings=ceilings,
                extra={key: found[key] for key in ("losses", "real_tokens_per_s", "real_tokens", "batch")},
                commit=arguments.commit,
            )
        )
    write_results(results, out)
    table = Table(title=f"SmolLM2-135M on GSM8K, {results[0].device}")
    for column in ("batches", "held-out loss", "real tokens/s (median)", "step ms", "peak GiB"):
        table.add_column(column)
    for result in results:
        table.add_row(
            result.candidate,
            f"{result.gate['heldout_before']:.3f} to {result.gate['heldout_after']:.3f}",
            f"{statistics.median(result.extra['real_tokens_per_s']):,.0f}",
            f"{result.median('step'):.1f}",
            f"{result.memory_bytes['peak'] / 2**30:.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
