"""The longest packed row that trains within a GPU's memory under each policy: as predicted, and as met.

    python -m benchmarks.longest_row --shape Llama-3.1-8B --memory 80GiB --out longest-row.json

`tiled` offloads, too, and computes MLPs in tiles of rows. For each policy the longest row is computed from bytes alone
(`memory.estimate`). Then steps run on a row of that
length and on one 5 % longer: the prediction is met if the first trains and the second does not. If not, the search
goes on up or down by 5 %. Each row has a process of its own, as a training has: what earlier ones leave in torch's
allocator decides what still fits. LoRA r16 on all linears, AdamW, documents of `--document` tokens, random weights.
"""

from __future__ import annotations

import argparse
import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.candidates.base import lora_model
from benchmarks.program import parser_of, run, show
from benchmarks.record import Facts
from pronghorn.data.batch import Collator
from pronghorn.diagnose.shapes import SHAPES, shape_of
from pronghorn.environment import grow_segments
from pronghorn.errors import ConfigError
from pronghorn.memory.devices import parse_bytes
from pronghorn.memory.estimate import CONTEXT_BYTES, MemoryModel, ModelDims, TrainSetup
from pronghorn.memory.plan import TILE_ROWS, Plan, Policy
from pronghorn.models import auto_plan
from pronghorn.models.attach import attach
from pronghorn.train import weightless

POLICIES = {
    name: Plan((policy,))
    for name, policy in zip(("keep", "norms", "mlp", "layer", "offload"), list(Policy), strict=True)
} | {"tiled": Plan((Policy.OFFLOAD,), mlp_rows=TILE_ROWS)}
STEP = 64
"""Rows are multiples of so many tokens."""
MOST = 2**24
"""Tokens that no row reaches."""
APART = 5
"""Percent of the predicted row from one that is tried to the next."""
FARTHEST = 20
"""Percent from the predicted row at which the search is given up."""


def peak(shape: ModelDims, tokens: int, plan: Plan) -> tuple[int, int]:
    """Return the bytes at the peak as torch counts them, and of the process. CUDA graphs are off: they are for short
    steps."""
    step = MemoryModel.of(shape, TrainSetup(tokens, accumulates=False, mlp_rows=plan.mlp_rows))
    kinds = step.peak(plan.by_layer(len(shape.layers)))
    return sum(kinds.values()), step.process(kinds)


def longest(shape: ModelDims, plan: Plan, budget: int) -> int:
    """Return the most tokens, a multiple of STEP, within a budget: more tokens never take less."""
    lengths = range(STEP, MOST, STEP)
    return STEP * bisect_right(lengths, budget, key=lambda tokens: peak(shape, tokens, plan)[1])


def next_percent(trained: Sequence[int], failed: Sequence[int]) -> int | None:
    """Return the length to try next in percent of the predicted row, or None when enough is known."""
    if trained and failed:
        return None
    farther = max(trained) + APART if trained else min(failed) - APART if failed else 100
    return farther if abs(farther - 100) <= FARTHEST else None


def row_of(tokens: int, percent: int) -> int:
    """Return the tokens of a row that is at least so many percent of the predicted one, or, if shorter, at most."""
    parts = tokens * percent / (100 * STEP)
    return STEP * (math.ceil(parts) if percent > 100 else math.floor(parts))


@dataclass(frozen=True)
class Setting:
    """Hold what all rows have in common."""

    fields: dict[str, Any]
    """Of the model's configuration."""
    budget: int
    """Bytes of the process."""
    document: int
    steps: int
    tokens: int = 0
    """Of the only row that is tried; 0 for the longest and those around it."""


def train(setting: Setting, plan: Plan, tokens: int) -> tuple[int, float] | None:
    """Return the bytes at the peak and the last step's seconds, or None where the row is too long."""
    grow_segments()  # as the commands do, before torch starts with the GPU
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(min((setting.budget - CONTEXT_BYTES) / total, 1.0))
    model = lora_model(setting.fields, seed=0)
    attach(model, plan, graph="off")
    whole, rest = divmod(tokens, setting.document)
    lengths = [setting.document] * whole + [rest] * bool(rest)
    ids = torch.randint(10, model.config.vocab_size, (tokens,)).tolist()
    batch = Collator(tokens, pad_token_id=0)([{"input_ids": ids, "labels": ids, "lengths": lengths}])
    batch = {name: value.to("cuda") for name, value in batch.items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(setting.steps):
        began = time.perf_counter()
        try:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            return None
        optimizer.zero_grad()  # as a training does: no gradients when the next forward begins
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {loss.item()}")
    return torch.cuda.max_memory_allocated(), seconds


def meet(shape: ModelDims, name: str, setting: Setting) -> dict[str, Any]:
    """Train on the predicted length and on others around it, until it is known whether the prediction is met."""
    plan = POLICIES[name]
    tokens = setting.tokens or longest(shape, plan, setting.budget)
    row: dict[str, Any] = {"policy": name, "predicted_tokens": tokens, "tried": []}
    trained: list[int] = []
    failed: list[int] = []
    while (percent := next_percent(trained, failed)) is not None and (length := row_of(tokens, percent)):
        tried: dict[str, Any] = {"tokens": length, "predicted_bytes": peak(shape, length, plan)[0]}
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            outcome = process.submit(train, setting, plan, length).result()
        if outcome is None:
            tried["out_of_memory"] = True
        else:
            tried["peak_bytes"], tried["step_s"] = outcome
        row["tried"].append(tried)
        (failed if outcome is None else trained).append(percent)
        if setting.tokens:
            break
    row["longest_tokens"] = max(
        (row_tried["tokens"] for row_tried in row["tried"] if "peak_bytes" in row_tried), default=0
    )
    row["met"] = 100 in trained and (bool(setting.tokens) or min(failed, default=math.inf) <= 100 + APART)
    return row


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="Llama-3.1-8B", help="SHAPE@12: with its first 12 layers")
    parser.add_argument("--memory", help="as on a card of so much, like 80GiB; all there is if not given")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="some of them")
    parser.add_argument("--document", type=int, default=8192, help="tokens of each document")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=0, help="try this row alone (a multiple of 64), without a search")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Meet every policy's prediction, and show for each the longest row that trained; of a row that was asked for tell
    whether it trained."""
    fields = shape_of(given.shape)
    if fields is None:
        raise ConfigError(f"--shape {given.shape} is unknown", f"use one of {', '.join(SHAPES)}")
    total = torch.cuda.get_device_properties().total_memory
    budget = total if given.memory is None else parse_bytes(given.memory, "--memory")
    setting = Setting(fields, budget, given.document, given.steps, given.tokens)
    shape = auto_plan.dims_of(weightless.skeleton(AutoConfig.for_model(**fields)))
    with Facts(given) as facts:
        facts |= {"shape": given.shape, "layers": len(shape.layers), "memory_bytes": budget, "document": given.document}
        facts["policies"] = []
        for name in given.policies:
            facts["policies"].append(meet(shape, name, setting))
            facts.keep()
    show([{key: value for key, value in row.items() if key != "tried"} for row in facts["policies"]], given.shape)
    return not given.tokens or all(row["met"] for row in facts["policies"])


if __name__ == "__main__":
    run(arguments, main)
