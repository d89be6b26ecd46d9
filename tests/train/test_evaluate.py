"""The held-out loss, against every document by itself."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.models.attach import attach
from pronghorn.train.evaluate import heldout_loss, worse_than_guessing
from support.tiny import VOCAB, tiny_model
from support.verified import documents

ROW = 48


def test_the_held_out_loss_is_the_mean_over_all_labels() -> None:
    """Of rows with unlike many labels, the last of them shorter: no row counts more than its labels."""
    model, rows = tiny_model("llama").eval(), documents(count=7)
    losses = []
    for each in rows:
        labels = torch.tensor(each["labels"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([each["input_ids"]])).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="none")[labels[1:] != -100])
    attach(model)
    packed = PackedRows(rows, ROW)
    assert len({sum(label != -100 for label in row["labels"]) for row in packed}) > 1  # type: ignore[attr-defined]
    found = heldout_loss(model, packed, Collator(ROW, pad_token_id=0))
    assert found == pytest.approx(torch.cat(losses).double().mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "told"), [(None, False), (math.nan, False), (2.0, False), (7.8, False), (8.0, True), (math.inf, True)]
)
def test_a_loss_far_above_guessing_is_told(loss: float | None, told: bool) -> None:
    """Guessing among 131 tokens costs 4.88 nats."""
    model: Any = SimpleNamespace(config=tiny_model("llama", num_hidden_layers=1).config)
    assert model.config.vocab_size == VOCAB
    found = worse_than_guessing(loss, model)
    assert (found is not None) is told and (found is None or "above that of guessing, 4.88" in found)
