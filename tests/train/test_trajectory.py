"""Training on a real model and real text: the fused layers' losses follow float64's, step by step, to the end."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.models.attach import attach
from support.fused import with_adapters
from support.tolerance import ThreeWay

STEPS, HELD_OUT, ROW = 30, 4, 256


def batches(tokenizer: Any, file: Path, seed: int) -> list[dict[str, Any]]:
    """Packed rows of GSM8K's answers."""
    lines = file.read_text(encoding="utf-8").splitlines()[seed * 300 : (seed + 1) * 300]
    ids = [tokenizer(json.loads(line)["answer"])["input_ids"][:ROW] for line in lines]
    rows = PackedRows([{"input_ids": each, "labels": each} for each in ids], ROW)
    collate = Collator(ROW, pad_token_id=0)
    return [collate([rows[index]]) for index in range(STEPS + HELD_OUT)]


def train(model: Any, rows: list[dict[str, Any]], layers: Any) -> torch.Tensor:
    """[STEPS + 1]: the loss of every step, and the held-out loss after the last."""
    model = copy.deepcopy(model)
    attach(model, layers=layers)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-4)
    losses = []
    for batch in rows[:STEPS]:
        loss = model(**batch).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(torch.stack([model(**batch).loss for batch in rows[STEPS:]]).mean())
    return torch.stack(losses)


@pytest.mark.parametrize("runs", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_follow_float64(stories: Path, shared: Path, runs: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stories)
    model = with_adapters(AutoModelForCausalLM.from_pretrained(stories, attn_implementation="sdpa"))
    errors = ThreeWay()
    for seed in range(runs):
        rows = batches(tokenizer, shared / "data/gsm8k/train.jsonl", seed)
        exact = train(copy.deepcopy(model).double(), rows, "stock")
        ours, plain = train(model, rows, "fused"), train(model, rows, "stock")
        assert exact[-1] < 0.8 * exact[0]
        errors.add("losses", ours[:-1], plain[:-1], exact[:-1])
        errors.add("held-out loss", ours[-1], plain[-1], exact[-1])
    errors.check()


@pytest.mark.slow
def test_a_wrong_gradient_is_seen(stories: Path, shared: Path, monkeypatch: Any) -> None:
    """One adapter's gradient off by a percent leaves a plausible curve, which this comparison does not take."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pronghorn.layers.fused_linear import FusedLinear

    tokenizer = AutoTokenizer.from_pretrained(stories)
    model = with_adapters(AutoModelForCausalLM.from_pretrained(stories, attn_implementation="sdpa"))
    rows = batches(tokenizer, shared / "data/gsm8k/train.jsonl", 0)
    plain, exact = train(model, rows, "stock"), train(copy.deepcopy(model).double(), rows, "stock")
    right = FusedLinear.gradients

    def wrong(self: FusedLinear, *arguments: Any) -> list[torch.Tensor]:
        first, *others = right(self, *arguments)
        return [first * 1.01 + 1e-3 * first.abs().max(), *others]

    monkeypatch.setattr(FusedLinear, "gradients", wrong)
    ours = train(model, rows, "fused")
    assert ours[-1] < 0.8 * ours[0]
    errors = ThreeWay()
    errors.add("losses", ours, plain, exact)
    with pytest.raises(AssertionError, match="losses"):
        errors.check()
