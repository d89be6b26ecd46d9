"""NF4 on load through the house's loader: transformers' own bits, and nothing where a file is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import DataError, UnsupportedError
from pronghorn.export.merged_weights import dense_weight
from pronghorn.loading.load import find_model, load_model
from pronghorn.loading.weights import bitsandbytes_config
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from pronghorn.models.report import LOADED_BY, render
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients
from support.loaded import differences, facts
from support.tiny import packed_row, tiny_model

FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss"]


def checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> None:
    model = tiny_model(family, eos_token_id=2, **changes).to(dtype)
    model.save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)


def by_the_house(folder: Path, dtype: str = "bfloat16") -> Any:
    return load_model(folder, dtype=dtype, max_seq_length=128, load_in_4bit=True)[0]


def by_transformers(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    asked = bitsandbytes_config(config, True, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=asked, device_map={"": "cpu"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_transformers(tmp_path: Path, family: str, dtype: str) -> None:
    checkpoint(tmp_path, family)
    ours = by_the_house(tmp_path, dtype)
    assert ours.__dict__[LOADED_BY] == ""
    assert differences(ours, by_transformers(tmp_path, getattr(torch, dtype))) == []


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "qwen3_next"])
def test_experts_that_lie_apart_are_joined_to_the_bits_of_transformers(tmp_path: Path, family: str) -> None:
    checkpoint(tmp_path, family)
    model = by_the_house(tmp_path)
    assert model.__dict__[LOADED_BY] == "" and differences(model, by_transformers(tmp_path)) == []


def test_an_expert_without_all_its_parts_is_an_error(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"each expert's part of model\.layers\.1\.mlp\.experts\.gate_up_proj once"):
        by_the_house(tmp_path)
    with pytest.raises(DataError, match="lacks parts of weights that are joined"):
        load_model(tmp_path, max_seq_length=128, device=torch.device("cpu"))  # by transformers


def test_the_report_names_the_house_loader(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    handle = attach(by_the_house(tmp_path), Plan.keep())
    [line] = [line for line in render(handle, None) if line.part == "quantising on load"]
    assert line.path == "Pronghorn's loader"


def test_adapters_over_both_are_saved_and_trained_alike(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base", "llama")
    results = []
    for number, model in enumerate((by_the_house(tmp_path / "base"), by_transformers(tmp_path / "base"))):
        torch.manual_seed(0)
        adapted = add_lora(model, r=4).train()
        attach(adapted, Plan.keep())
        results.append(loss_and_gradients(adapted, packed_row(LENGTHS, ROW)))
        adapted.save_pretrained(tmp_path / str(number))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "01")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


NAME = "model.layers.1.mlp.down_proj.weight"


def damage(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    if how == "cut short":
        file.write_bytes(file.read_bytes()[:-64])
        return
    tensors = load_file(file)
    weight = tensors.pop(NAME)
    if how == "of another dtype":
        tensors[NAME] = weight.to(torch.int8)
    elif how == "of another shape":
        tensors[NAME] = weight[:-1].contiguous()
    elif how == "of no place":
        tensors |= {NAME: weight, "model.layers.1.mlp.other.weight": weight}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})


@pytest.mark.parametrize("how", ["cut short", "missing", "of another dtype", "of another shape", "of no place"])
def test_a_damaged_checkpoint_is_told_by_tensor_and_file(tmp_path: Path, how: str) -> None:
    checkpoint(tmp_path, "llama")
    damage(tmp_path, how)
    with pytest.raises(DataError) as told:
        by_the_house(tmp_path)
    assert str(tmp_path) in str(told.value)
    assert how == "cut short" or "model.layers.1.mlp." in str(told.value)


def test_files_of_mixed_dtypes_are_quantised_from_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NAME] = tensors[NAME].float() * 1.001
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    made, right = facts(by_the_house(tmp_path)), facts(by_transformers(tmp_path))
    assert all(torch.equal(made[name], value) for name, value in right.items() if isinstance(value, torch.Tensor))


@pytest.mark.gpu
def test_the_device_holds_no_more_than_the_quantised_model_and_one_tensor(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=4096)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = by_the_house(tmp_path)
    resting, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    largest = max(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()) * 2
    assert model.device.type == "cuda" and peak <= resting + 1.1 * largest


def test_rows_that_bitsandbytes_misreads_on_a_cpu_are_refused_and_merged_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel there takes other blocks' scales where rows end 32 into a block: a quarter off, not a tenth."""
    checkpoint(tmp_path, "llama", intermediate_size=160)
    right = {name: each.weight for name, each in tiny_model("llama", intermediate_size=160).named_modules()
             if type(each) is torch.nn.Linear}  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"layers.0.mlp.down_proj, whose rows of 160 end inside a block of 64"):
        by_the_house(tmp_path)
    monkeypatch.setattr("pronghorn.loading.weights._is_misread", lambda *_: False)
    quantised = [
        (name, each) for name, each in by_the_house(tmp_path).named_modules() if type(each).__name__ == "Linear4bit"
    ]
    assert len(quantised) == 21
    for name, each in quantised:
        assert (dense_weight(each) - right[name]).norm() < 0.12 * right[name].norm(), name


def test_another_version_s_insides_leave_it_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise AttributeError("no _get_dtype_plan")

    checkpoint(tmp_path, "llama")
    monkeypatch.setattr("pronghorn.loading.one_by_one.Skeleton.why_not", gone)
    [told] = [path for path in attach(by_the_house(tmp_path)).report if path.part == "quantising on load"]
    assert told.path == "transformers" and "without weights (no _get_dtype_plan)" in told.why


def quantised(folder: Path, source: Path, **asked: Any) -> Path:
    """Save a checkpoint of bitsandbytes', as its publishers do."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    asked = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **asked}
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**asked)
    )
    model.save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("asked", [{}, {"bnb_4bit_quant_storage": torch.bfloat16}, {"bnb_4bit_quant_type": "fp4"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_quantised_checkpoint_has_the_dtype_that_was_asked_for(
    tmp_path: Path, dtype: torch.dtype, asked: dict[str, Any]
) -> None:
    """transformers 5 leaves its other weights in the checkpoint's, and 4 bits are written out in it."""
    checkpoint(tmp_path / "plain", "qwen2")
    folder = quantised(tmp_path / "4bit", tmp_path / "plain", **asked, bnb_4bit_compute_dtype=torch.bfloat16)
    model = load_model(folder, dtype=str(dtype), max_seq_length=128)[0]
    floating = {n: p.dtype for n, p in model.named_parameters() if not hasattr(p, "quant_state")}
    assert floating.keys() >= {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias"}
    assert set(floating.values()) == {dtype} and model.dtype is dtype
    linear = model.model.layers[0].mlp.up_proj
    packed = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(linear.weight.data.view(torch.uint8).flatten(), packed.view(torch.uint8).flatten())
    x = torch.randn(5, linear.in_features, dtype=dtype)
    with torch.no_grad():
        y, right = linear(x), x.double() @ dense_weight(linear).double().t()
    assert y.dtype is dtype and (y - right).norm() / right.norm() < 2 * torch.finfo(dtype).eps


def test_weights_that_stay_in_float32_do_so_in_a_quantised_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path / "plain", "gpt_oss")
    model = load_model(
        quantised(tmp_path / "4bit", tmp_path / "plain"), dtype="float16", max_seq_length=128
    )[0]  # fmt: skip
    assert model.model.norm.weight.dtype is torch.float32 and model.model.embed_tokens.weight.dtype is torch.float16


def test_a_checkpoint_in_8_bits_of_bitsandbytes_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    table = json.loads((tmp_path / "config.json").read_text())
    stored = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    (tmp_path / "config.json").write_text(json.dumps({**table, "quantization_config": stored}))
    with pytest.raises(UnsupportedError, match="quantised by bitsandbytes to 8 bits"):
        find_model(tmp_path, max_seq_length=128)


@pytest.fixture(scope="module")
def stored_in_4_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that bitsandbytes quantised, scales of scales and all."""
    folder = tmp_path_factory.mktemp("quantised")
    checkpoint(folder / "plain", "llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    by_transformers(folder / "plain").save_pretrained(folder / "4bit")
    byte_tokenizer(512).save_pretrained(folder / "4bit")
    return folder / "4bit"


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("part", "keeps", "message"),
    [
        (".nested_absmax", 0, r"nested_absmax of a 4-bit weight holds 0 numbers, and 1 are its own"),
        (".absmax", 0, r"\.absmax of a 4-bit weight holds 0 numbers, and \d+ are its own"),
        (".absmax", 5, r"\.absmax of a 4-bit weight holds 5 numbers"),
        (".quant_map", 15, r"\.quant_map of a 4-bit weight holds 15 numbers, and 16 are its own"),
        ("", 9, r"q_proj\.weight of a 4-bit weight holds 9 bytes"),
        (".quant_state.bitsandbytes__nf4", 9, "is not a description of a 4-bit weight"),
        (".quant_state.bitsandbytes__nf4", 0, r"lacks model\.layers\.0\.self_attn\.q_proj\.weight\.quant_state"),
        (None, 0, r"q_proj is plain in a checkpoint that bitsandbytes quantised otherwise"),
    ],
)
def test_a_weight_of_a_4_bit_checkpoint_lacks_a_part(
    stored_in_4_bits: Path, tmp_path: Path, part: str | None, keeps: int, message: str
) -> None:
    """bitsandbytes took codes of scales for scales, or read memory that wasn't its own."""
    folder = shutil.copytree(stored_in_4_bits, tmp_path / "model", copy_function=shutil.copyfile)
    file = folder / "model.safetensors"
    weights = load_file(file)
    if part is None:
        weights = {name: weight for name, weight in weights.items() if not name.startswith(QUERY)}
        weights[QUERY] = torch.zeros(64, 128)
    elif keeps:
        weights[QUERY + part] = weights[QUERY + part].flatten()[:keeps].clone()
    else:
        del weights[QUERY + part]
    load_model(stored_in_4_bits, max_seq_length=128)
    save_file(weights, file)
    with pytest.raises(DataError, match=message):
        load_model(folder, max_seq_length=128)
