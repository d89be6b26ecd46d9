"""Checkpoints whose `config.json` has unusual values: a packed row equals transformers with one document at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.errors import UnsupportedError
from pronghorn.models.attach import attach
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
