"""Models with towers: which tensors are the language model's, and how it is loaded alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pronghorn.errors import DataError, PronghornError, UnsupportedError
from pronghorn.export.fp8_checkpoint import write_fp8_checkpoint
from pronghorn.export.merge import save_merged
from pronghorn.export.towers import keep_names
from pronghorn.families.registry import FAMILIES
from pronghorn.kernels.packed import PackedTensor
from pronghorn.loading.composite import Composite
from pronghorn.loading.load import find_model, load_model
from pronghorn.loading.weights import whole_model
from pronghorn.models.attach import attach
from pronghorn.precision.loader import StoredTensor
from support.composites import (
    COMPOSITES,
    SERVED,
    VOCAB,
    add_tensors,
    logits_of_whole,
    stored_tensors,
    write_composite,
)
from support.packed_linears import KINDS, stored_as

TOKENS = torch.arange(1, 30)[None]


def described(folder: Path) -> Composite:
    composite = Composite.of(folder, AutoConfig.from_pretrained(folder))
    assert composite is not None
    return composite


def alone(folder: Path, composite: Composite) -> Any:
    return whole_model(
        folder,
        composite,
        config=composite.text_config(),
        dtype=torch.float32,
        token=None,
        revision=None,
        device_map={"": "cpu"},
    )


@pytest.mark.parametrize("kind", COMPOSITES)
def test_the_language_model_alone_answers_as_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    whole = write_composite(tmp_path, kind)
    model = alone(tmp_path, described(tmp_path))
    assert torch.equal(model(input_ids=TOKENS).logits, logits_of_whole(whole, TOKENS))
    assert not any("vision" in name or "visual" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("kind", COMPOSITES)
def test_every_tensor_is_the_language_models_or_a_towers(kind: str, tmp_path: Path) -> None:
    write_composite(tmp_path, kind)
    composite = described(tmp_path)
    left = [name for name in stored_tensors(tmp_path) if composite.inside(name) is None]
    assert left and all(any(word in name for word in ("vision", "visual", "projector", "audio")) for name in left)


def test_tensors_of_towers_are_never_read(tmp_path: Path) -> None:
    write_composite(tmp_path, "gemma3")

    def unreadable(start: int, stop: int) -> torch.Tensor:
        raise AssertionError("read")

    source = [StoredTensor(name, (), torch.float32, "", unreadable) for name in stored_tensors(tmp_path)]
    names = [stored.name for stored in described(tmp_path).language(source)]
    assert "model.layers.0.self_attn.q_proj.weight" in names and not any("vision" in name for name in names)


@pytest.mark.parametrize("kind", SERVED)
def test_a_folder_of_several_files_loads_by_its_name(kind: str, tmp_path: Path) -> None:
    whole = write_composite(tmp_path, kind, shards="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, tokenizer = load_model(tmp_path, max_seq_length=64, dtype="float32")
    assert torch.equal(model(input_ids=TOKENS).logits, whole(input_ids=TOKENS).logits)
    assert model.name_or_path == str(tmp_path) and len(tokenizer) <= VOCAB


@pytest.mark.parametrize("kind", SERVED)
def test_a_plan_needs_the_configuration_only(kind: str, tmp_path: Path) -> None:
    write_composite(tmp_path, kind)
    (tmp_path / "model.safetensors").unlink()
    found = find_model(tmp_path, max_seq_length=64, weights=False)
    assert found.config.model_type in FAMILIES and found.config.vocab_size == VOCAB


def test_heads_for_several_tokens_are_left_in_the_file(tmp_path: Path) -> None:
    whole = write_composite(tmp_path, "qwen3_5")
    add_tensors(tmp_path, {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)})
    composite = described(tmp_path)
    assert composite.inside("mtp.fc.weight") is None
    assert torch.equal(alone(tmp_path, composite)(input_ids=TOKENS).logits, whole(input_ids=TOKENS).logits)


def test_a_head_that_the_files_hold_is_not_tied(tmp_path: Path) -> None:
    write_composite(tmp_path, "mistral3")
    add_tensors(tmp_path, {"language_model.lm_head.weight": torch.randn(VOCAB, 32)})
    model = alone(tmp_path, described(tmp_path))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    write_composite(tmp_path, "gemma3")
    add_tensors(tmp_path, {"surprise.weight": torch.ones(2)})
    with pytest.raises(DataError, match=r"holds surprise\.weight, which has no place in Gemma3"):
        find_model(tmp_path, max_seq_length=64)


def test_an_unexpected_tensor_of_a_layer_is_named(tmp_path: Path) -> None:
    write_composite(tmp_path, "gemma3")
    add_tensors(tmp_path, {"language_model.model.layers.0.surprise.weight": torch.ones(2)})
    with pytest.raises(DataError, match=r"no place in the model \(model\.layers\.0\.surprise\.weight"):
        load_model(tmp_path, max_seq_length=64, dtype="float32")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_composite(tmp_path, "gemma3")
    tensors = stored_tensors(tmp_path)
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"lacks 1 of the model's weights.*layers\.1\.mlp\.up_proj"):
        load_model(tmp_path, max_seq_length=64, dtype="float32")


def test_a_truncated_file_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    write_composite(tmp_path, "gemma3", shards="20KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=file.name):
        find_model(tmp_path, max_seq_length=64)


def changed(folder: Path, **fields: Any) -> None:
    table = json.loads((folder / "config.json").read_text())
    for key, value in fields.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"text_config": {"num_hidden_layers": 10**9}}, DataError, "text_config: num_hidden_layers 1000000000"),
        ({"vision_config": {"num_hidden_layers": 10**9}}, DataError, "vision_config: num_hidden_layers 1000000000"),
        (
            {"text_config": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}},
            DataError,
            "the weights hold 3 layers",
        ),
        ({"architectures": ["NobodyKnows"]}, UnsupportedError, "transformers has no NobodyKnows"),
        ({"architectures": None}, UnsupportedError, "transformers has no"),
        ({"text_config": {"model_type": "siglip_vision_model"}}, PronghornError, "siglip"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_composite(tmp_path, "gemma3")
    changed(tmp_path, **fields)
    with pytest.raises(error, match=message):
        find_model(tmp_path, max_seq_length=64)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", ["rows", "fine-grained", "modelopt fp8"])
@pytest.mark.parametrize(
    "named", ["model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"]
)
def test_packed_weights_of_the_language_model_are_loaded_as_they_are(kind: str, named: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_composite(tmp_path, "gemma3", torch.bfloat16)
    left_out = ("lm_head", named, "re:.*vision.*", "re:.*projector.*")
    left = "ignore" if kind == "rows" else "modules_to_not_convert" if kind == "fine-grained" else "exclude_modules"
    changed(tmp_path, quantization_config=json.loads(json.dumps({**KINDS[kind], left: left_out})))
    tensors, right = {}, {}
    for name, tensor in stored_tensors(tmp_path).items():
        linear = name.removesuffix("weight")
        if "_proj." in name and name.startswith("language_model") and ".layers.0.mlp.up_proj" not in name:
            parts, right[name.removeprefix("language_model.")] = stored_as(kind, tensor)
            tensors |= {f"{linear}{part}": each.contiguous().clone() for part, each in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = load_model(tmp_path, max_seq_length=64, dtype="bfloat16")
    packed = {name: each for name, each in model.named_parameters() if isinstance(each, PackedTensor)}
    assert packed.keys() == right.keys() and len(right) == 20
    assert all(torch.equal(packed[name].dequantise().float(), right[name].bfloat16().float()) for name in right)
    keep_names(model)
    save_merged(model, None, tmp_path / "merged")
    written = stored_tensors(tmp_path / "merged")
    assert written.keys() == {name for name in tensors if "_scale" not in name}
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    with pytest.raises(UnsupportedError, match="has towers, which aren't written in 8 bits"):
        write_fp8_checkpoint(tmp_path / "merged", tmp_path / "fp8")


def test_the_language_model_is_quantised_while_it_loads(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    write_composite(tmp_path, "gemma3", hidden_size=64, intermediate_size=128, num_attention_heads=8)
    model, _ = load_model(tmp_path, max_seq_length=64, dtype="float32", load_in_4bit=True)
    kinds = {type(module).__name__ for name, module in model.named_modules() if name.endswith("_proj")}
    assert kinds == {"Linear4bit"}
    keep_names(model)
    save_merged(model, None, tmp_path / "merged")
    assert stored_tensors(tmp_path / "merged").keys() == stored_tensors(tmp_path).keys()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_a_batch_with_images_is_refused(tmp_path: Path) -> None:
    write_composite(tmp_path, "gemma3")
    model, _ = load_model(tmp_path, max_seq_length=64, dtype="float32")
    attach(model)
    with pytest.raises(UnsupportedError, match=r"the batch has pixel_values: training is text only for now: leave out"):
        model(input_ids=TOKENS, pixel_values=torch.zeros(1, 3, 28, 28))
