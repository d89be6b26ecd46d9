"""A real model on real text: packed rows against the same trainer with padded batches, in one run.

Trains LoRA on GSM8K twice from the same weights, on the same documents in the same order of magnitude of tokens a step:
packed rows of `--row` tokens, and batches padded to their longest document with as many documents as fill such a row on
average. Reports real tokens/s (padding not counted) of both, and the held-out loss before and after.

    python -m benchmarks.packed_vs_padded --model SMOLLM2_FOLDER --data gsm8k/ --out FILE
    python -m benchmarks.packed_vs_padded --draw FILE --plot docs/packed-vs-padded.svg
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig

from benchmarks.counts import measure_ceilings
from benchmarks.program import gsm8k, parser_of, run, show
from benchmarks.record import Result, Workload, check_out, command_line, read_results, write_results
from pronghorn.api import FastLanguageModel
from pronghorn.errors import ConfigError
from pronghorn.train.trainer import SFTTrainer


def train(given: argparse.Namespace, packing: bool) -> dict[str, Any]:
    """Train and evaluate with packed rows or padded batches."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(given.model), max_seq_length=given.row, use_gradient_checkpointing=False
    )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)
    data = Dataset.from_list(gsm8k(given.data / "train.jsonl", tokenizer, given.row, given.train_rows))
    held_out = Dataset.from_list(gsm8k(given.data / "test.jsonl", tokenizer, given.row, 400))
    mean = statistics.mean(len(ids) for ids in data["input_ids"])
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            packing=packing,
            eval_packing=True,
            max_length=given.row,
            per_device_train_batch_size=1 if packing else round(given.row / mean),
            per_device_eval_batch_size=1,
            max_steps=given.steps,
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


def draw(results: Sequence[Result], file: Path) -> None:
    """Draw real tokens per second and peak memory of packed and padded batches; red gates are not drawn."""
    from matplotlib.figure import Figure

    green = [result for result in results if result.gate["green"]]
    candidates = [result.candidate.split(", ")[1] for result in green]
    panels = (
        ("real tokens per second", [statistics.median(r.extra["real_tokens_per_s"]) for r in green], "{:,.0f}"),
        ("peak memory, GiB", [r.memory_bytes["peak"] / 2**30 for r in green], "{:.1f}"),
    )
    figure = Figure(figsize=(7.6, 2.1), layout="constrained")
    for axes, (title, values, form) in zip(figure.subplots(1, 2), panels, strict=True):
        bars = axes.barh(candidates, values, color=["#1f5fc4", "#b9c3d3"][: len(green)], height=0.62)
        axes.bar_label(bars, [form.format(value) for value in values], padding=4)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlim(0, 1.25 * max(values))
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False)
    figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct as a safetensors folder")
    parser.add_argument("--data", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--row", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--train-rows", type=int, default=7473)
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing, draw these results into --plot")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Train both ways and compare, or draw results; tell whether both learnt."""
    if given.draw is not None and given.plot is not None:
        draw(read_results(given.draw), given.plot)
        return True
    if given.model is None or given.data is None:
        raise ConfigError("--model or --data is missing", "give both to measure, or --draw and --plot")
    check_out(given.out)
    ceilings, results = measure_ceilings(), []
    for candidate, packing in (("packed", True), ("padded", False)):
        outcome = train(given, packing)
        gc.collect()
        torch.cuda.empty_cache()
        green = outcome["after"] < outcome["before"] - 0.1
        results.append(
            Result(
                command=command_line(),
                candidate=f"pronghorn, {candidate}",
                workload=Workload("SmolLM2-135M-Instruct", "lora r16", given.row, "gsm8k", -1.0, 3407),
                gate={"heldout_before": outcome["before"], "heldout_after": outcome["after"], "green": green},
                timings_ms={"step": outcome["step_ms"]},
                memory_bytes=outcome["memory_bytes"],
                ceilings=ceilings,
                extra={key: outcome[key] for key in ("losses", "real_tokens_per_s", "real_tokens", "batch")},
                commit=given.commit,
            )
        )
    write_results(results, given.out)
    show(
        [
            {
                "batches": result.candidate,
                "held-out loss": f"{result.gate['heldout_before']:.3f} to {result.gate['heldout_after']:.3f}",
                "real tokens/s": f"{statistics.median(result.extra['real_tokens_per_s']):,.0f}",
                "step, ms": f"{result.median('step'):.1f}",
                "peak, GiB": f"{result.memory_bytes['peak'] / 2**30:.1f}",
            }
            for result in results if result.shown
        ],
        f"SmolLM2-135M on GSM8K, {results[0].device}",
    )  # fmt: skip
    return all(result.shown for result in results)


if __name__ == "__main__":
    run(arguments, main)
