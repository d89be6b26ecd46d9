"""Models of unknown families that train unpacked: padded batches must mean what they say; indexers' choices, too."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pronghorn
from pronghorn.errors import DataError, UnsupportedError
from pronghorn.loading.load import load_model
from pronghorn.models.families import decoder_layers
from pronghorn.models.generic import Way
from pronghorn.models.padded_probe import require_padded
from pronghorn.models.probe import probe
from support.causal_lms import tiny
from support.generic import generic_model


@pytest.mark.parametrize("model_type", ["mamba2", "gpt_neox", "qwen2_moe"])
def test_a_causal_model_trains_unpacked_and_keeps_its_state(model_type: str) -> None:
    model = generic_model(model_type) if model_type != "qwen2_moe" else tiny(model_type)
    pronghorn.attach(model)
    modes, before = [module.training for module in model.modules()], torch.get_rng_state()
    require_padded(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_encoder_that_reads_both_ways_is_refused_packed_and_unpacked() -> None:
    model = generic_model("bert", is_decoder=False)
    pronghorn.attach(model)
    assert not probe(model).clean
    with pytest.raises(UnsupportedError, match="a token sees one that comes after it") as refused:
        require_padded(model)
    assert "is_decoder" in refused.value.remedy


def test_a_model_that_counts_padding_is_refused() -> None:
    model = generic_model("gpt_neox")
    mlp = decoder_layers(model)[0].mlp
    own = type(mlp).forward
    mlp.forward = types.MethodType(lambda self, x: own(self, x) * x.shape[1], mlp)
    pronghorn.attach(model)
    with pytest.raises(UnsupportedError, match="of 9 tokens has other logits in a padded batch than alone"):
        require_padded(model)


def test_a_model_that_passes_no_gradient_on_is_refused() -> None:
    model = generic_model("gpt_neox")
    head = model.get_output_embeddings()
    head.forward = types.MethodType(lambda self, x: torch.nn.functional.linear(x, self.weight).detach(), head)
    pronghorn.attach(model)
    with pytest.raises(UnsupportedError, match="passes no gradient on to what is trained"):
        require_padded(model)


def test_an_indexers_choice_goes_by_a_mask_and_is_named_where_it_is_not_crossed() -> None:
    """By bounds alone every token of a document would be looked at, and short documents can't tell."""
    model = tiny("deepseek_v32")
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 400
    model.config.index_topk = 400
    pronghorn.attach(model)
    found = probe(model)
    assert found.clean
    assert found.way is Way.MASK
    assert "not crossed: index_topk 400" in str(found)


def _changed(folder: Path, change: Any) -> Path:
    generic_model("gpt_neox").save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return folder


def test_a_tensor_that_a_checkpoint_lacks_or_has_beside_is_named(tmp_path: Path, stories: Path) -> None:
    from transformers import AutoTokenizer

    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    lacking = _changed(tmp_path / "lacking", lambda tensors: tensors.pop(name))
    beside = _changed(tmp_path / "beside", lambda tensors: tensors.update({"visual.stem.weight": torch.ones(2)}))
    for folder in (lacking, beside):
        AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
    options: dict[str, Any] = {"max_seq_length": 64}
    with pytest.raises(DataError, match=rf"lacks 1 of the model's weights.*{name}"):
        load_model(lacking, **options)
    with pytest.raises(DataError, match=r"holds 1 tensor that has no place in the model \(visual.stem.weight"):
        load_model(beside, **options)
