"""Checkpoints whose `config.json` has unusual values: a packed row equals transformers with one document at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.errors import UnsupportedError
from pronghorn.loading.load import find_model, load_model
from pronghorn.models.attach import attach
from support.composites import logits_of_whole, write_composite
from support.documents import LENGTHS, ROW, compare
from support.tiny import packed_row, tiny_model

UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "another family's soft-cap": ("llama", {"final_logit_softcapping": 2.0}),
    "another family's auxiliary loss": ("llama", {"output_router_logits": True}),
}


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_values(name: str, layers: str) -> None:
    family, changes = UNUSUAL[name]
    compare(tiny_model(family, **changes), packed_row(LENGTHS, ROW), "cpu", torch.float32, layers=layers)


def test_a_window_that_transformers_has_in_its_flash_attention_alone_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sliding_window = 5"):
        attach(tiny_model("olmoe", sliding_window=5))


def test_dropout_of_a_published_checkpoint_is_refused_until_its_folder_says_otherwise(tmp_path: Path) -> None:
    """Seed-OSS has 0.1 of both kinds, unless its `config.json` says 0."""
    model = tiny_model("seed_oss")
    model.save_pretrained(tmp_path)
    file, options = tmp_path / "config.json", {"max_seq_length": 32}
    table = json.loads(file.read_text())
    for name in ("attention_dropout", "residual_dropout"):
        file.write_text(json.dumps({**table, name: 0.1}))
        with pytest.raises(UnsupportedError, match=rf"{name} = 0\.1 .*set {name} to 0 in its config\.json"):
            find_model(tmp_path, **options)
    file.write_text(json.dumps(table))
    attach(find_model(tmp_path, **options).model(torch.float32, torch.device("cpu")), layers="fused")


def test_the_text_of_a_composite_is_computed_by_its_own_fields(tmp_path: Path) -> None:
    """Qwen3-VL has no windows, whatever its `config.json` says."""
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    whole, tokens = write_composite(tmp_path, "qwen3_vl", **window), torch.arange(3, 23)[None]
    model, _ = load_model(tmp_path, max_seq_length=32, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, logits_of_whole(whole, tokens))
