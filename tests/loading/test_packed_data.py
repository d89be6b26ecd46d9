"""Packed weights can't be replaced by dense ones: PEFT does so for adapters that change the base, and merging DoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from pronghorn.errors import UnsupportedError
from pronghorn.layers.watch import Watch
from pronghorn.loading.load import load_model
from pronghorn.models.lora import add_lora
from support.packed_linears import packed_linears


def loaded(folder: Path) -> Any:
    return load_model(folder, dtype="float32", max_seq_length=128)[0]


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_that_change_the_base_are_refused_over_packed_weights_alone(tmp_path: Path, init: str) -> None:
    """PEFT writes what is left of a weight into it: a packed one would stay, and count twice."""
    packed_linears(tmp_path / "base", "rows")
    mixed = loaded(tmp_path / "base")
    for layer in mixed.model.layers:
        query = layer.self_attn.q_proj
        query.weight = nn.Parameter(query.weight.dequantise(), requires_grad=False)
    ids = torch.randint(3, 90, (1, 40))
    config = LoraConfig(r=4, init_lora_weights=init, target_modules=["q_proj"])
    with torch.no_grad():
        before = mixed(ids).logits
        adapted = get_peft_model(mixed, config)
        torch.testing.assert_close(adapted(ids).logits, before, atol=1e-4, rtol=1e-4)
    adapted.save_pretrained(tmp_path / "adapter")
    told = r"a FP8Tensor('s data can't be replaced| can't be written to).* 16 bits"
    with pytest.raises(UnsupportedError, match=told):
        get_peft_model(loaded(tmp_path / "base"), config)
    with pytest.raises(UnsupportedError, match=told):
        add_lora(loaded(tmp_path / "base"), r=4, init_lora_weights=init)
    by_chance = "fits the very base" if init == "pissa_niter_4" else told  # over dense weights, too
    with pytest.raises(UnsupportedError, match=by_chance):
        loaded(tmp_path / "adapter")


def test_a_packed_weight_takes_the_data_of_another(tmp_path: Path) -> None:
    packed_linears(tmp_path, "rows")
    model = loaded(tmp_path)
    first, second = (layer.self_attn.q_proj.weight for layer in model.model.layers)
    assert not torch.equal(first, second)
    before = Watch([model.model.layers[0]])
    assert before.same()
    first.data = second.data.to(torch.bfloat16)
    assert not before.same()
    assert first.dtype is torch.bfloat16 and torch.equal(first.dequantise(), second.dequantise().to(first.dtype))


def test_merging_dora_into_packed_weights_is_refused(tmp_path: Path) -> None:
    packed_linears(tmp_path, "nvfp4")
    model = get_peft_model(loaded(tmp_path), LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="a NVFP4Tensor's data can't be replaced by a Tensor"):
        model.merge_and_unload()
