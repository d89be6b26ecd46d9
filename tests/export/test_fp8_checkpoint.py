"""A model's linears written in 8 bits: a published format, with the codes that products in 8 bits read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.export.fp8_checkpoint import write_fp8_checkpoint
from pronghorn.kernels.fp8_blocks import FP8Tensor
from pronghorn.loading.load import load_model
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.precision.fp8 import FP8Weight
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, with_adapters
from support.packed_checkpoints import write
from support.packed_linears import SIZES
from support.tiny import packed_row, tiny_model


def plain(folder: Path, family: str = "llama", **changes: Any) -> Any:
    """Write a tiny model's 16-bit checkpoint, and return the model."""
    model = tiny_model(family, **{**SIZES, **changes}).to(torch.bfloat16)
    tensors = {name: each.detach().contiguous() for name, each in model.named_parameters()}
    write(folder, model, tensors, {})
    table = json.loads((folder / "config.json").read_text())
    del table["quantization_config"]
    (folder / "config.json").write_text(json.dumps(table))
    return model


@pytest.mark.parametrize(("family", "shard_bytes"), [("llama", 10**9), ("gemma3_text", 100_000)])
def test_linears_are_written_with_a_scale_a_row(tmp_path: Path, family: str, shard_bytes: int) -> None:
    model = plain(tmp_path / "plain", family)
    folder = write_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", shard_bytes=shard_bytes)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(sizes) == 1 if shard_bytes == 10**9 else len(sizes) > 3 and max(sizes) < shard_bytes + 10_000
    assert not list(folder.glob("*.tmp")) and (folder / "tokenizer_config.json").is_file()
    again = load_model(folder, dtype="bfloat16", max_seq_length=128)[0]
    packed = {name: each for name, each in again.named_parameters() if isinstance(each, FP8Tensor)}
    assert len(packed) == 14 and not any("lm_head" in name or "embed" in name for name in packed)
    for name, parameter in model.named_parameters():
        if name not in packed:
            assert torch.equal(again.get_parameter(name), parameter)
            continue
        ours = FP8Weight.of([parameter])
        assert torch.equal(packed[name].parts[0].float(), ours.codes.float())
        assert torch.equal(packed[name].row_scales(), ours.scales)
        error = (packed[name].dequantise().float() - parameter.float()).norm() / parameter.float().norm()
        assert 0.01 < error < 0.04


def test_products_in_8_bits_are_those_over_the_16_bit_checkpoint(tmp_path: Path) -> None:
    plain(tmp_path / "plain")
    write_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    results = []
    for name in ("plain", "fp8"):
        model = with_adapters(load_model(tmp_path / name, dtype="bfloat16", max_seq_length=128)[0])
        attach(model, Plan.keep(), layers="fused", compute="fp8_both")
        results.append(loss_and_gradients(model, packed_row(LENGTHS, ROW)))
    (loss, gradients), (right_loss, right) = results
    assert loss == right_loss and all(torch.equal(gradients[name], right[name]) for name in right)


def test_the_configuration_says_what_was_written(tmp_path: Path) -> None:
    plain(tmp_path / "plain")
    folder = write_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stored["format"] == "float-quantized" and stored["ignore"] == ["lm_head"]
    weights = stored["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["type"], weights["strategy"]) == (8, "float", "channel")
    tensors = load_file(folder / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj"
    assert tensors[f"{query}.weight"].dtype is torch.float8_e4m3fn and tensors[f"{query}.weight_scale"].shape == (
        128,
        1,
    )


def test_transformers_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    plain(tmp_path / "plain")
    folder = write_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    ours = load_model(folder, dtype="bfloat16", max_seq_length=128)[0]
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, weight in ours.named_parameters():
        if isinstance(weight, FP8Tensor):
            module = theirs.get_submodule(name.removesuffix(".weight"))
            dense = module.weight.float() * (module.weight_scale.float() if module.weight.itemsize == 1 else 1)
            assert torch.equal(dense.bfloat16(), weight.dequantise())


def test_what_can_not_be_written_is_refused(tmp_path: Path) -> None:
    plain(tmp_path / "plain")
    folder = write_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    with pytest.raises(ConfigError, match="already exists"):
        write_fp8_checkpoint(tmp_path / "plain", folder)
    with pytest.raises(UnsupportedError, match="is quantised already"):
        write_fp8_checkpoint(folder, tmp_path / "again")
    with pytest.raises(ConfigError, match="is not a folder of a whole model"):
        write_fp8_checkpoint(tmp_path / "nowhere", tmp_path / "again")
    plain(tmp_path / "experts", "qwen3_moe")
    with pytest.raises(UnsupportedError, match="has experts"):
        write_fp8_checkpoint(tmp_path / "experts", tmp_path / "again")
    file = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(file)
    flat = {"model.layers.0.mlp.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"].flatten()}
    save_file(tensors | flat, file)
    with pytest.raises(DataError, match=r"up_proj\.weight is \[\d+\], not \["):
        write_fp8_checkpoint(tmp_path / "plain", tmp_path / "again")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match="not a whole safetensors file"):
        write_fp8_checkpoint(tmp_path / "plain", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_head_that_is_not_the_embeddings_is_not_left_out(tmp_path: Path) -> None:
    plain(tmp_path / "plain")
    file = tmp_path / "plain" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(DataError, match=r"lm_head\.weight is model\.embed_tokens\.weight .*, and the weights hold two"):
        write_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()
