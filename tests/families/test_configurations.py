"""Checkpoints whose `config.json` has unusual values: a packed row equals transformers with one document at a time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.errors import UnsupportedError
from pronghorn.loading.load import find_model, load_model
from pronghorn.models.attach import attach
from support.composites import logits_of_whole, write_composite
from support.documents import LENGTHS, ROW, compare, one_document_at_a_time
from support.tiny import packed_row, tiny_model

UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "another family's soft-cap": ("llama", {"final_logit_softcapping": 2.0}),
    "another family's auxiliary loss": ("llama", {"output_router_logits": True}),
    "RoPE of no columns": (
        "glm4_moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.0}},
    ),
}


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_values(name: str, layers: str) -> None:
    family, changes = UNUSUAL[name]
    compare(tiny_model(family, **changes), packed_row(LENGTHS, ROW), "cpu", torch.float32, layers=layers)


def test_a_window_that_transformers_has_in_its_flash_attention_alone_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sliding_window = 5"):
        attach(tiny_model("olmoe", sliding_window=5))


def test_windows_that_transformers_has_in_its_masks_alone_are_refused() -> None:
    """SmolLM3's attention has no window without `use_sliding_window`, and its masks have `layer_types`' anyway."""
    windows = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    with pytest.raises(UnsupportedError, match=r"sliding_window is None.*5, beside.*set use_sliding_window to true"):
        attach(tiny_model("smollm3", **windows))
    model = tiny_model("smollm3", **windows, use_sliding_window=True)
    compare(model, packed_row(LENGTHS, ROW), "cpu", torch.float32, layers="fused")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("seed_oss", {"attention_dropout": 0.3, "residual_dropout": 0.3}),
        ("seed_oss", {"residual_dropout": 0.3}),
        ("granite", {"attention_dropout": 0.3}),
        ("gpt_oss", {"attention_dropout": 0.3}),
    ],
)
def test_dropout_of_a_published_checkpoint_is_trained_with_or_left_out(
    family: str, fields: dict[str, float], tmp_path: Path
) -> None:
    """Seed-OSS's configuration has both kinds unless it says otherwise."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    batch, cpu = packed_row(LENGTHS, ROW), torch.device("cpu")

    found = find_model(tmp_path, max_seq_length=256)
    dropping = found.model(torch.float32, cpu)
    with pytest.warns(UserWarning, match=r"transformers' own: config\..*_dropout = 0\.3.*model\.dropout: false"):
        handle = attach(dropping)
    right = one_document_at_a_time(copy.deepcopy(model).eval(), batch)[1].float()
    torch.testing.assert_close(dropping.eval()(**batch).loss, right)
    losses = [float(dropping.train()(**batch).loss) for _ in range(3)]
    assert len({*losses}) == 3 and all(abs(loss - float(right)) < 1 for loss in losses)
    [told] = [path.why for path in handle.report if path.part == "decoder layers"]
    assert all(f"{name} = 0.3" in told for name in fields)
    with pytest.raises(UnsupportedError, match=r"transformers' own: config\..*leave layers and experimental out"):
        attach(found.model(torch.float32, cpu), layers="fused")

    plain = find_model(tmp_path, max_seq_length=256, dropout=False)
    assert found.is_generic and not plain.is_generic
    fused = plain.model(torch.float32, cpu)
    attach(fused, layers="fused")
    torch.testing.assert_close(fused.train()(**batch).loss, right)


def test_the_text_of_a_composite_is_computed_by_its_own_fields(tmp_path: Path) -> None:
    """Qwen3-VL has no windows, whatever its `config.json` says."""
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    whole, tokens = write_composite(tmp_path, "qwen3_vl", **window), torch.arange(3, 23)[None]
    model, _ = load_model(tmp_path, max_seq_length=32, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, logits_of_whole(whole, tokens))
