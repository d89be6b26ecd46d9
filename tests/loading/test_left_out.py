"""Checkpoints that hold more than their models: layers that predict further tokens, buffers; sizes of each layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pronghorn.errors import DataError
from pronghorn.loading.load import find_model
from support.causal_lms import tiny
from support.packed_linears import packed_linears
from support.tiny import tiny_model

IDS = torch.arange(3, 23)[None]


def loaded(folder: Path) -> Any:
    return find_model(folder, max_seq_length=32).model(torch.float32, torch.device("cpu")).eval()


def add_layer(folder: Path, last: int) -> None:
    """Copy the last layer behind it, as checkpoints have those that predict further tokens."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    start, after = f"model.layers.{last}.", f"model.layers.{last + 1}."
    more = {name.replace(start, after): own.clone() for name, own in tensors.items() if name.startswith(start)}
    save_file(tensors | more | {f"{after}eh_proj.weight": torch.ones(64, 128)}, file, {"format": "pt"})


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_further_tokens_are_left_out(family: str, tmp_path: Path) -> None:
    """GLM-4.5-Air's published checkpoint holds a layer behind its 46, and DeepSeek-V3's behind its 61."""
    model = (tiny_model if family == "glm4_moe" else tiny)(family).eval()
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path)
    add_layer(tmp_path, 2)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path)(IDS).logits, model(IDS).logits)


def test_a_layer_more_than_the_configuration_says_is_refused(tmp_path: Path) -> None:
    model = tiny_model("glm4_moe")
    model.config.num_nextn_predict_layers = 0
    model.save_pretrained(tmp_path)
    add_layer(tmp_path, 2)
    with pytest.raises(DataError, match="num_hidden_layers 3, but the weights hold 4 layers"):
        loaded(tmp_path)


def test_layers_that_a_class_names_are_left_out(tmp_path: Path) -> None:
    """By their numbers, those of GLM-4.5-Air, where the configuration names none."""
    model = tiny_model("glm4_moe", num_hidden_layers=46, hidden_size=16, head_dim=4, intermediate_size=16).eval()
    model.config.num_nextn_predict_layers = 0
    model.save_pretrained(tmp_path)
    add_layer(tmp_path, 45)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("chosen", [0, 9])
def test_more_experts_a_token_than_there_are(tmp_path: Path, chosen: int) -> None:
    tiny_model("qwen3_moe", num_experts_per_tok=chosen).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=f"num_experts_per_tok {chosen} of 8 experts: fix config.json"):
        loaded(tmp_path)


def test_widths_of_each_layer(tmp_path: Path) -> None:
    """Gemma 3n's are a list."""
    model = tiny("gemma3n_text").eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    table = json.loads(file.read_text())
    assert table["intermediate_size"] == [88] * 5
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path)(IDS).logits, model(IDS).logits)
    file.write_text(json.dumps(table | {"intermediate_size": [88, 10**9]}))
    with pytest.raises(DataError, match=r"intermediate_size \[88, 1000000000\] is not an integer from 0"):
        loaded(tmp_path)


def test_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    """Llama 2's published files hold each layer's frequencies."""
    tiny_model("llama", intermediate_size=128, eos_token_id=2).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    packed_linears(tmp_path / "packed", "rows")
    for folder, options in ((tmp_path / "plain", {"load_in_4bit": True}), (tmp_path / "packed", {})):
        found = find_model(folder, max_seq_length=32, **options)
        right = found.model(torch.bfloat16, torch.device("cpu")).state_dict()
        file = folder / "model.safetensors"
        old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
        save_file(load_file(file) | old, file, {"format": "pt"})
        assert found.model(torch.bfloat16, torch.device("cpu")).state_dict().keys() == right.keys()
        save_file(load_file(file) | {"model.layers.0.position_ids": torch.ones(8)}, file, {"format": "pt"})
        with pytest.raises(DataError, match="position_ids has no place in the model"):
            found.model(torch.bfloat16, torch.device("cpu"))
