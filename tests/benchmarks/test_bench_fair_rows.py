"""benchmarks.fair_rows: batches of documents, and the loss of one."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import fair_rows
from benchmarks.program import run
from support.tiny import tiny_model


@pytest.mark.parametrize("way", fair_rows.WAYS)
def test_every_document_is_in_one_batch(way: str) -> None:
    lengths = [1 + 37 * index % 190 for index in range(300)]
    rows = fair_rows.WAYS[way](lengths, 400, 0)
    assert sorted(index for row in rows for index in row) == list(range(300))
    assert rows == fair_rows.WAYS[way](lengths, 400, 0) != fair_rows.WAYS[way](lengths, 400, 1)


def test_ways_differ_in_what_shares_a_batch() -> None:
    lengths = [1 + 37 * index % 190 for index in range(3000)]
    spreads = {
        way: statistics.pstdev(statistics.mean(lengths[index] for index in row) for row in make(lengths, 2000, 0))
        for way, make in fair_rows.WAYS.items()
    }
    assert max(spreads["fair"], spreads["padded"]) < 0.5 * spreads["longest first"]


def test_a_batch_s_loss_and_gradients_are_its_documents_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_rows, "MICRO_BATCH", 40)
    model = tiny_model("llama")
    documents = [([3 + (7 * n + at) % 60 for at in range(length)], 2) for n, length in enumerate((9, 3, 50, 12, 5))]
    found = fair_rows.loss_of(model, documents, "cpu", backward=True)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total: Any = 0
    for tokens, prompt in documents:
        logits = model(input_ids=torch.tensor([tokens])).logits[0, prompt - 1 : -1]
        total = total + functional.cross_entropy(logits, torch.tensor(tokens[prompt:]), reduction="sum")
    loss = total / sum(len(tokens) - prompt for tokens, prompt in documents)
    loss.backward()
    assert found == pytest.approx(loss.item(), rel=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)


def test_the_program_trains_in_every_way(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"instruction": f"Say {n}", "input": "", "output": "a cat " * (1 + n % 9)} for n in range(40)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    files = ["--train", str(tmp_path / "rows.json"), "--held-out", str(tmp_path / "rows.json")]
    more = ["--held-rows", "5", "--tokens", "128", "--seeds", "2", "--rank", "2", "--out", str(tmp_path / "out.json")]
    run(fair_rows.arguments, fair_rows.main, ["--model", str(stories), *files, *more])
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert [(part["seed"], part["way"]) for part in parts] == [(s, way) for s in (0, 1) for way in fair_rows.WAYS]
    assert all(0 < part["held_out"] < 9 and part["updates"] > 3 for part in parts)
    assert len({part["held_out"] for part in parts}) == 6
    assert "held_out - padded" in capsys.readouterr().out
