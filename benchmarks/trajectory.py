"""Loss trajectories of the fast path: the same training by float32, by 16 bits, and by Pronghorn in 16 bits.

LoRA r16 on all linears over GSM8K, from the same adapters, on the same rows in the same order, one row a step:
    reference   transformers and PEFT in float32, no TF32
    plain       transformers and PEFT in bfloat16 (PEFT's adapters in float32): what 16 bits alone cost
    pronghorn   fused layers, packed rows and Pronghorn's loss in bfloat16
The first two take a row's documents side by side, padded and masked: the same step by other operations. A seed decides
rows, their order and the adapters' start; the spread of the reference's held-out loss over seeds is the noise. On the
CPU all three compute in float32. Ends with status 1 where the gate (`judge`) is red: for documents that see each other,
adapters scaled by 0.9 or untrained ones, say; gradients off by a few percent are for `tests/train/test_trajectory.py`.

    python -m benchmarks.trajectory --model SMOLLM2_FOLDER --data gsm8k/ --out FILE
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import program
from benchmarks.candidates.base import device, weights_dtype
from benchmarks.record import Result, Workload, check_out, command_line, keeper, write_results
from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import ConfigError
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from pronghorn.parity.parameters import trainable

HELD_OUT_ROWS, LEARNING_RATE, WARM_UP, SHOWN_EVERY = 20, 5e-4, 10, 25
LEAST_FALL, CURVE_FLOOR = 0.1, 1e-3
ROUNDING = 1e-5  # what float32 alone moves a held-out loss by; decides only where plain is float32 too
Batches = list[tuple[dict[str, Any], int]]  # a model's arguments, and how many labels they have


@dataclass(frozen=True)
class Run:
    """Hold a training from one seed, in nats a supervised token; held out before, halfway and at the end."""

    losses: list[float]
    heldout: list[float]
    seconds: float = 0.0


def judge(reference: Sequence[Run], plain: Sequence[Run], pronghorn: Sequence[Run]) -> dict[str, Any]:
    """Judge whether Pronghorn is as near to the reference as 16 bits and the noise allow; the runs are one a seed.

    For every seed: its held-out loss is off by at most twice what plain's is, or the spread of the reference's over
    seeds; its losses' root mean square distance is at most twice plain's + 0.001; and the reference learns.
    """
    ends = [run.heldout[-1] for run in reference]
    spread, root, seeds = max(ends) - min(ends), math.sqrt(len(reference[0].losses)), []
    for exact, stock, ours in zip(reference, plain, pronghorn, strict=True):
        off = {
            "heldout": abs(ours.heldout[-1] - exact.heldout[-1]),
            "heldout_limit": max(2 * abs(stock.heldout[-1] - exact.heldout[-1]), spread, ROUNDING),
            "curve": math.dist(ours.losses, exact.losses) / root,
            "curve_limit": 2 * math.dist(stock.losses, exact.losses) / root + CURVE_FLOOR,
            "fall": exact.heldout[0] - exact.heldout[-1],
        }
        near = off["heldout"] <= off["heldout_limit"] and off["curve"] <= off["curve_limit"]
        seeds.append(off | {"green": near and off["fall"] >= LEAST_FALL})
    return {"spread": spread, "seeds": seeds, "green": all(seed["green"] for seed in seeds)}


def batches(rows: PackedRows, collate: Collator | None) -> Batches:
    """Return batches on the device: packed by `collate`, or without one a row's documents side by side, padded."""
    fills, made = {"input_ids": 0, "labels": IGNORE_INDEX, "attention_mask": 0}, []
    for row in (rows[index] for index in range(len(rows))):
        masked = row | {"attention_mask": [1] * len(row["input_ids"])}
        columns = {name: torch.tensor(masked[name]).split(row["lengths"]) for name in fills}
        batch = {name: pad_sequence(column, True, fills[name]) for name, column in columns.items()}
        batch = batch if collate is None else collate([row])
        n_labels = len(row["labels"]) - row["labels"].count(IGNORE_INDEX)
        made.append(({name: value.to(device()) for name, value in batch.items()}, n_labels))
    return made


def build(folder: Path, dtype: torch.dtype, seed: int, start: dict[str, torch.Tensor]) -> Any:
    """Return the model with the adapters of `start`, which the first one built fills."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model = add_lora(model.to(device()), r=16, lora_alpha=32, random_state=seed)
    with torch.no_grad():
        for name, adapter in trainable(model).items():
            adapter.copy_(start.setdefault(name, adapter.detach().clone()))
    return model


@torch.no_grad()
def heldout_loss(model: Any, held_out: Batches) -> float:
    """Return the mean loss over all supervised tokens."""
    model.eval()
    total = sum(model(**batch, use_cache=False).loss.double() * labels for batch, labels in held_out)
    model.train()
    return float(total) / sum(labels for _, labels in held_out)


def train(model: Any, rows: Batches, held_out: Batches, name: str) -> Run:
    """Take a step a row, with a line of progress now and then; losses otherwise wait on the device."""
    adapters = list(trainable(model).values())
    optimiser = torch.optim.AdamW(adapters, lr=LEARNING_RATE, weight_decay=0.0, fused=device().type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARM_UP))
    began, losses, heldout = time.perf_counter(), [], [heldout_loss(model, held_out)]
    for step, (batch, _) in enumerate(rows, 1):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        heldout += [heldout_loss(model, held_out)] if step in (len(rows) // 2, len(rows)) else []
        if step % SHOWN_EVERY == 0 or step == len(rows):
            seconds = time.perf_counter() - began
            left = seconds / step * (len(rows) - step)
            print(f"{name}: step {step}, loss {loss:.4f}, {seconds:.0f} s, {left:.0f} s left", flush=True)
    return Run([float(loss) for loss in losses], heldout, time.perf_counter() - began)


def draw(runs: dict[str, list[Run]], file: Path) -> None:
    """Draw the first seed's losses, and every seed's distance from the reference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4), layout="constrained")
    losses, distances = figure.subplots(2, 1, sharex=True)
    for name, colour in {"reference": "#768088", "plain": "#e08a2e", "pronghorn": "#3b82e0"}.items():
        losses.plot(runs[name][0].losses, color=colour, label=name)
        for run, exact in zip(runs[name], runs["reference"], strict=True):
            distances.plot([a - b for a, b in zip(run.losses, exact.losses, strict=True)], color=colour, linewidth=0.7)
    losses.set(ylabel="training loss")
    losses.legend(frameon=False)
    distances.set(xlabel="step", ylabel="minus the reference's")
    figure.savefig(file, facecolor="white")


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = program.parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct as a safetensors folder")
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    for name, default in (("--steps", 200), ("--row", 2048), ("--seeds", 3)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--plot", type=Path, help="draw the losses into this file")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Train every candidate from every seed; tell whether the gate is green."""
    for needed in (given.model / "config.json", given.data / "train.jsonl", given.data / "test.jsonl"):
        if not needed.is_file():
            raise ConfigError(f"{needed} is missing", "give the model's folder as --model and GSM8K's as --data")
    check_out(given.out)
    torch.set_float32_matmul_precision("highest")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    texts = {name: program.gsm8k(given.data / f"{name}.jsonl", tokenizer, given.row) for name in ("train", "test")}
    held_out = PackedRows(texts["test"], given.row).first(HELD_OUT_ROWS)
    dtypes = {"reference": torch.float32, "plain": weights_dtype("lora"), "pronghorn": weights_dtype("lora")}
    runs: dict[str, list[Run]] = {name: [] for name in dtypes}
    by_seed = [PackedRows(texts["train"], given.row, seed).first(given.steps) for seed in range(given.seeds)]
    if (fewest := min(map(len, by_seed))) < given.steps:
        raise ConfigError(f"--steps {given.steps}, but the data fill {fewest} rows", "lower it or --row")
    paths: list[str] = []
    for seed, rows in enumerate(by_seed):
        start: dict[str, torch.Tensor] = {}
        for name, done in runs.items():
            model = build(given.model, dtypes[name], seed, start)
            handle = attach(model, layers="fused") if name == "pronghorn" else None
            collate = Collator(given.row, pad_token_id=0) if handle else None
            done.append(train(model, batches(rows, collate), batches(held_out, collate), f"seed {seed}, {name}"))
            paths = [f"{line.part}: {line.path} ({line.why})" for line in handle.report] if handle else []
        gate = judge(**runs)
        results = [
            Result(
                command=command_line(),
                candidate=f"{name}, {str(dtypes[name])[6:]}",
                workload=Workload(given.model.name, "lora r16", given.row, "gsm8k", -1.0, 0),
                gate=gate,
                timings_ms={"run": [run.seconds * 1e3 for run in done]},
                extra={"seeds": [asdict(run) for run in done], "paths": paths if name == "pronghorn" else []},
                commit=given.commit,
            )
            for name, done in runs.items()
        ]
        keeper(given.out)(results)
    write_results(results, given.out)
    if given.plot:
        draw(runs, given.plot)
    for name, done in runs.items():
        print(name, *(" -> ".join(f"{loss:.4f}" for loss in run.heldout) for run in done), sep="   ")
    print(gate)
    return gate["green"]


if __name__ == "__main__":
    program.run(arguments, main)
