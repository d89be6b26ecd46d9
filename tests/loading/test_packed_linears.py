"""Dense models whose linears are stored in FP8 or NVFP4: loaded as they are, they compute what their dense weights
compute."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from pronghorn.api import FastLanguageModel
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, DataError, PronghornError, UnsupportedError
from pronghorn.export.merge import save_merged
from pronghorn.export.onto_original import adapter_on_original
from pronghorn.kernels.packed import PackedTensor
from pronghorn.layers.decoder import RUN
from pronghorn.loading.load import find_model, load_model
from pronghorn.memory.estimate import resting_bytes
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.lora import add_lora
from pronghorn.parity.quantised import compared_products
from pronghorn.precision.fp8 import BackwardSource, FP8Source
from pronghorn.precision.int8 import Int8Source
from pronghorn.precision.source import DenseSource, PackedSource
from pronghorn.train.documents import find
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, path_of_layers, with_adapters
from support.packed_checkpoints import change
from support.packed_linears import KINDS, packed_linears
from support.tiny import packed_row
from support.tolerance import ThreeWay

OF_64 = {"hidden_size": 192, "intermediate_size": 320}
"""Multiples of 64, and not of 128."""
QUERY = "model.layers.0.self_attn.q_proj"


def loaded(folder: Path, dtype: str = "float32") -> Any:
    return load_model(folder, dtype=dtype, max_seq_length=128)[0]


def dense(model: Any) -> Any:
    """The same model, its packed weights written out."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, PackedTensor):
                module._parameters[name] = nn.Parameter(parameter.dequantise(), requires_grad=False)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_was_published(tmp_path: Path, kind: str) -> None:
    right = packed_linears(tmp_path, kind)
    model = loaded(tmp_path)
    packed = {name: p for name, p in model.named_parameters() if isinstance(p, PackedTensor)}
    assert packed.keys() == right.keys() and len(right) == 14
    assert all(torch.equal(packed[name].dequantise(), right[name]) for name in right)
    assert not any(p.requires_grad for p in packed.values()) and type(model.lm_head.weight) is nn.Parameter
    ids = torch.randint(3, 90, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(model)(ids).logits)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("layers", ["fused", "stock"])
@pytest.mark.parametrize(
    ("kind", "family"),
    [(kind, "llama") for kind in KINDS] + [("fine-grained", "qwen3"), ("rows", "qwen2"), ("nvfp4", "gemma3_text")],
)
def test_training_over_packed_linears_is_training_over_their_dense_weights(
    tmp_path: Path, kind: str, family: str, layers: str
) -> None:
    packed_linears(tmp_path, kind, family)
    packed = with_adapters(loaded(tmp_path))
    results = []
    for model in (packed, dense(packed)):
        handle = attach(model, Plan.keep(), layers=layers)
        assert path_of_layers(handle)[0] == ("fused" if layers == "fused" else "transformers and PEFT")
        results.append(loss_and_gradients(model, packed_row(LENGTHS, ROW)))
    (loss, gradients), (right_loss, right) = results
    assert loss == right_loss
    assert gradients.keys() == right.keys() and all(torch.equal(gradients[name], right[name]) for name in right)
    assert sum(isinstance(p, PackedTensor) for p in packed.parameters()) == 14


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    ("kind", "compute"),
    [(kind, compute) for kind in KINDS for compute in ("dtype", "fp8", "fp8_both", "int8")],
)
def test_the_plan_counts_the_stored_bytes(tmp_path: Path, kind: str, compute: str) -> None:
    packed_linears(tmp_path, kind, **(OF_64 if compute == "int8" else {}))
    model = with_adapters(loaded(tmp_path, "bfloat16"))
    handle = attach(model, Plan.keep(), layers="fused", compute=compute)
    model(**packed_row(LENGTHS, ROW))
    own = [each for name, each in model.named_parameters() if "lora_" not in name]
    right = sum(p.stored_bytes if isinstance(p, PackedTensor) else p.nbytes for p in own)
    products = [product for run in runs(handle) for block in run.blocks for product in block.linears]
    copied = kind not in ("rows", "tensors", "modelopt fp8")
    source = {"dtype": PackedSource, "fp8_both": FP8Source}.get(compute, BackwardSource)
    assert all(isinstance(product.source, source) for product in products)
    sources = [each for product in products for each in vars(product.source).values() if isinstance(each, Int8Source)]
    held = [tensor for each in sources for tensor in (*each.weight, *getattr(each, "inverse", ()))]
    right += sum(tensor.nbytes for tensor in held if tensor is not None)  # codes are written out for each product
    in_floats = products if compute in ("fp8", "fp8_both") else []
    for weight in (getattr(each.source, "coded", each.source).weight for each in in_floats):
        right += weight.across.nbytes + weight.scales.nbytes + weight.columns.nbytes
        right += weight.codes.nbytes if copied and weight.codes is not None else 0
    assert handle.layers.in_8_bits() == (0 if compute == "dtype" else len(products), len(products))
    assert resting_bytes(dims_of(model), setup_of(model, 512))["weights"] == pytest.approx(right, rel=0.01)


def runs(handle: Any) -> list[Any]:
    return [layer.__dict__[RUN] for layer in handle.layers.backbone.layers]


@pytest.mark.parametrize(
    ("kind", "told"),
    [("rows", "the stored codes"), ("tensors", "the stored codes")]
    + [(kind, "1[24] weights of .* quantised once more, by rows") for kind in ("fine-grained", "nvfp4")],
)
def test_products_in_floats_of_8_bits_over_packed_linears(tmp_path: Path, kind: str, told: str) -> None:
    right = packed_linears(tmp_path, kind)
    model, results = with_adapters(loaded(tmp_path, "bfloat16")), {}
    before = {name: p.dequantise() for name, p in model.named_parameters() if isinstance(p, PackedTensor)}
    for compute in ("dtype", "fp8_both"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        results[compute] = loss_and_gradients(model, packed_row(LENGTHS, ROW))
        [path] = [path.path for path in handle.report if path.part == "products of frozen weights"]
        assert re.search("written out of" if compute == "dtype" else told, path)
    weight = runs(handle)[1].blocks[1].linears[0].source.weight
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    published = torch.cat([right[name] for name in names])
    error = (weight.dequantise() - published).norm() / published.norm()
    assert error == 0 if kind in ("rows", "tensors") else 0.01 < error < 0.04
    for name, values in before.items():
        assert torch.equal(model.get_parameter(name).dequantise(), values)
    (loss, gradients), (near_loss, near) = results["dtype"], results["fp8_both"]
    assert loss != near_loss and near_loss == pytest.approx(loss, rel=0.05)
    cosines = [torch.nn.functional.cosine_similarity(near[n].flatten(), gradients[n].flatten(), 0) for n in near]
    assert min(cosines) > 0.9
    assert handle.layers.in_8_bits() == (8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_products_in_integers_over_packed_linears(tmp_path: Path, kind: str) -> None:
    """Whatever codes the checkpoint has, its weights are written out, and quantised anew."""
    packed_linears(tmp_path, kind, **OF_64)
    model, results = with_adapters(loaded(tmp_path, "bfloat16")), {}
    before = {name: p.dequantise() for name, p in model.named_parameters() if isinstance(p, PackedTensor)}
    for compute in ("dtype", "int8"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        results[compute] = loss_and_gradients(model, packed_row(LENGTHS, ROW))
    assert handle.layers.in_8_bits() == (8, 8)
    for linear in handle.layers.linears():
        assert all(compared.excess <= 1 for compared in compared_products(linear, "product", fast=True))
    [path] = [path.path for path in handle.report if path.part == "products of frozen weights"]
    assert re.search("14 weights of .* quantised once more, by rows", path)
    for name, values in before.items():
        assert torch.equal(model.get_parameter(name).dequantise(), values)
    (loss, gradients), (near_loss, near) = results["dtype"], results["int8"]
    assert loss != near_loss and near_loss == pytest.approx(loss, rel=0.005)
    cosines = [torch.nn.functional.cosine_similarity(near[n].flatten(), gradients[n].flatten(), 0) for n in near]
    assert min(cosines) > 0.99
    once = attach(model, Plan.keep(), layers="fused", compute="int8", experimental={"written_out": "once"})
    again, found = loss_and_gradients(model, packed_row(LENGTHS, ROW))
    assert again == near_loss and all(torch.equal(found[name], near[name]) for name in near)
    assert sum(isinstance(linear.source.plain, DenseSource) for linear in once.layers.linears()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_training_on_a_gpu_is_within_the_rule(tmp_path: Path, kind: str) -> None:
    """Against their dense weights in bfloat16, and in float32; recomputed and by a graph the bits are the same."""
    right = packed_linears(tmp_path, kind)
    rule, batch = ThreeWay(), {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    packed = with_adapters(loaded(tmp_path, "bfloat16").to("cuda"))
    stored = {name: p for name, p in packed.get_base_model().named_parameters() if isinstance(p, PackedTensor)}
    assert len(stored) == 14 and {p.device.type for p in stored.values()} == {"cuda"}
    models, results = (packed, dense(packed), dense(packed).float()), []
    for model in models:
        attach(model, Plan.keep(), layers="fused" if model is not models[2] else "stock", graph="off")
        results.append(loss_and_gradients(model, batch))
    (loss, ours), (_, plain), (_, exact) = results
    for name, gradient in exact.items():
        rule.add(name, ours[name], plain[name], gradient)
    rule.check()
    for plan, graph in ((Plan.recompute(), "off"), (Plan.keep(), "on"), (Plan.keep(), "on")):
        attach(packed, plan, layers="fused", graph=graph)
        again, gradients = loss_and_gradients(packed, batch)
        assert again == loss and all(torch.equal(gradients[name], ours[name]) for name in ours)
    by_path = {name.removesuffix(".base_layer.weight").removesuffix(".weight"): p for name, p in stored.items()}
    for name, values in right.items():
        written = by_path[name.removesuffix(".weight")].dequantise()
        assert torch.equal(written.cpu(), values.to(written.dtype)), name


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp8", "fp8_both", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_in_8_bits_on_a_gpu(tmp_path: Path, kind: str, compute: str) -> None:
    packed_linears(tmp_path, kind, **(OF_64 if compute == "int8" else {}))
    batch, results = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}, {}
    model = with_adapters(loaded(tmp_path, "bfloat16").to("cuda"))
    for each in ("dtype", compute):
        handle = attach(model, Plan.keep(), layers="fused", graph="off", compute=each)
        results[each] = loss_and_gradients(model, batch)
    assert handle.layers.in_8_bits() == (8, 8)
    for linear in handle.layers.linears():
        assert all(compared.excess <= 1 for compared in compared_products(linear, "product", fast=True))
    (loss, exact), (near_loss, near) = results.values()
    assert near_loss == loss if compute == "fp8" else near_loss == pytest.approx(loss, rel=0.05)
    cosines = [torch.nn.functional.cosine_similarity(near[n].flatten(), exact[n].flatten(), 0) for n in near]
    assert min(cosines) > (0.98 if compute == "fp8" else 0.9)
    attach(model, Plan.keep(), layers="fused", graph="on", compute=compute)
    for _ in range(2):
        again, gradients = loss_and_gradients(model, batch)
        assert again == near_loss and all(torch.equal(gradients[name], near[name]) for name in near)


@pytest.mark.parametrize("kind", ["fine-grained", "nvfp4"])
def test_a_saved_adapter_loads_over_its_packed_base(tmp_path: Path, kind: str) -> None:
    packed_linears(tmp_path / "base", kind)
    model = with_adapters(loaded(tmp_path / "base")).eval()
    model.save_pretrained(tmp_path / "adapter")
    again = loaded(tmp_path / "adapter").eval()
    ids = torch.randint(3, 90, (1, 40))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(UnsupportedError, match="--onto original of a checkpoint that is quantised itself"):
        adapter_on_original(tmp_path / "adapter", again)


@pytest.mark.parametrize("pattern", ["re:.*self_attn.*", "model.layers.*.self_attn", "self_attn.q_proj", QUERY])
def test_layers_that_are_left_out_stay_in_16_bits(tmp_path: Path, pattern: str) -> None:
    packed_linears(tmp_path, "rows")
    configure(tmp_path, ignore=["lm_head", pattern])
    with pytest.raises(DataError, match=r"safetensors: .*_proj.weight_scale has no place in the model"):
        loaded(tmp_path)
    packed_linears(tmp_path, "rows")
    configure(tmp_path, ignore=["lm_head", pattern])
    for layer in range(2):
        for name in ("q", "k", "v", "o") if "*" in pattern else ("q",):
            path = f"model.layers.{layer}.self_attn.{name}_proj"
            if layer == 0 or "layers.0" not in pattern:
                width = (64, 160) if name in "kv" else (160, 128) if name == "o" else (128, 160)
                change(tmp_path, f"{path}.weight", torch.randn(width).bfloat16())
                change(tmp_path, f"{path}.weight_scale", None)
    model = with_adapters(loaded(tmp_path))
    assert type(model.get_submodule(f"base_model.model.{QUERY}").base_layer.weight) is nn.Parameter
    handle = attach(model, Plan.keep(), layers="fused")
    loss_and_gradients(model, packed_row(LENGTHS, ROW))
    assert ("only some weights" in path_of_layers(handle)[1]) == ("*" not in pattern)


def configure(folder: Path, **changes: Any) -> None:
    """Change a checkpoint's quantization_config; None takes an entry out."""
    table = json.loads((folder / "config.json").read_text())
    stored = {**table["quantization_config"], **changes}
    table["quantization_config"] = {name: value for name, value in stored.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(table))


def scheme(**changes: Any) -> dict[str, Any]:
    weights = {**KINDS["rows"]["config_groups"]["group_0"]["weights"], **changes}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("rows", {"format": "pack-quantized"}, "compressed-tensors' 'pack-quantized', weights of 8 bits"),
        ("rows", scheme(num_bits=8, type="int"), r"weights of 8 bits \(int, a scale a channel\)"),
        ("rows", scheme(strategy="group", group_size=128), r"weights of 8 bits \(float, a scale a group\)"),
        ("rows", scheme(symmetric=False), "compressed-tensors' 'float-quantized'"),
        (
            "rows",
            scheme(strategy="block"),
            "quantization_config of a checkpoint in compressed-tensors .* can't be used",
        ),
        ("rows", scheme(strategy="tensor"), r"proj.weight_scale is \[[0-9]+, 1\], not \[1, 1\]"),
        ("rows", {"config_groups": None}, "has no config_groups"),
        ("rows", {"config_groups": {"group_0": {"targets": ["Linear"]}}}, r"can't be used \(KeyError\('weights'\)\)"),
        ("rows", {"ignore": ["re:("]}, "can't be used"),
        ("rows", {"ignore": []}, "lm_head is packed, which stays in 16 bits"),
        ("fine-grained", {"weight_block_size": [64, 64]}, r"weight_scale_inv is \[., .\], not \[., .\]"),
        ("fine-grained", {"weight_block_size": [128]}, "fine-grained FP8 can't be used"),
        ("fine-grained", {"weight_block_size": [0, 128]}, "blocks of 0 x 128"),
        ("fine-grained", {"weight_block_size": "128x128"}, "fine-grained FP8 can't be used"),
        ("fine-grained", {"fmt": "e5m2"}, "fmt 'e5m2' is not e4m3"),
        ("fine-grained", {"quant_method": "fbgemm_fp8"}, "the checkpoint is quantised by 'fbgemm_fp8'"),
        ("modelopt", {"quant_algo": "W4A8_AWQ"}, "ModelOpt's W4A8_AWQ"),
        ("modelopt", {"quant_algo": "FP8"}, "safetensors: .*weight_scale_2 has no place in the model"),
        ("modelopt", {"quant_algo": None}, "ModelOpt's None"),
    ],
)
def test_wrong_metadata_is_told(tmp_path: Path, kind: str, changes: dict[str, Any], problem: str) -> None:
    packed_linears(tmp_path, kind)
    configure(tmp_path, **changes)
    with pytest.raises(PronghornError, match=problem):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "problem"),
    [
        ("rows", "weight_scale", None, "lacks 1 of the model's weights .*q_proj.weight_scale"),
        ("rows", "weight_scale", torch.ones(64, 1), r"safetensors: .*q_proj.weight_scale is \[64, 1\], not \[128, 1\]"),
        ("rows", "weight_scale", torch.ones(128, 1).to(torch.uint8), "q_proj.weight_scale is torch.uint8"),
        ("rows", "weight", torch.ones(128, 160).bfloat16(), "safetensors: .*q_proj.weight is torch.bfloat16, not"),
        ("fine-grained", "weight_scale_inv", None, "lacks 1 of the model's weights .*q_proj.weight_scale_inv"),
        ("nvfp4", "weight_packed", torch.ones(128, 80), "q_proj.weight_packed is torch.float32, not torch.uint8"),
        ("nvfp4", "weight_global_scale", None, "lacks 1 of the model's weights .*q_proj.weight_global_scale"),
        ("nvfp4", "weight", torch.ones(128, 160), "q_proj.weight has no place in the model"),
        ("modelopt", "weight_scale_2", torch.ones(2), r"q_proj.weight_scale_2 is \[2\], not \[1\]"),
    ],
)
def test_tensors_that_do_not_fit_are_told(tmp_path: Path, kind: str, name: str, tensor: Any, problem: str) -> None:
    packed_linears(tmp_path, kind)
    change(tmp_path, f"{QUERY}.{name}", tensor)
    with pytest.raises(DataError, match=problem):
        loaded(tmp_path)


def test_a_head_that_is_not_the_embeddings_is_told(tmp_path: Path) -> None:
    """The configuration says that they are tied, and the files hold two."""
    packed_linears(tmp_path, "rows")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(
        DataError, match=r"lm_head\.weight is model\.embed_tokens\.weight .*: set tie_word_embeddings to f"
    ):
        loaded(tmp_path)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, "lm_head.weight", embeddings.clone())
    model = loaded(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_truncated_file_is_told(tmp_path: Path) -> None:
    packed_linears(tmp_path, "nvfp4")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"model\.safetensors: not a whole safetensors file"):
        loaded(tmp_path)


def test_sizes_and_models_that_are_not_served_are_refused_by_name(tmp_path: Path) -> None:
    packed_linears(tmp_path / "narrow", "rows", intermediate_size=328)
    configure(tmp_path / "narrow", quant_method="modelopt", quant_algo="NVFP4")
    with pytest.raises(UnsupportedError, match="down_proj has 328 inputs, and NVFP4 stores groups of 16"):
        loaded(tmp_path / "narrow")
    packed_linears(tmp_path / "experts", "fine-grained", "qwen3_moe")
    with pytest.raises(UnsupportedError, match=r"a model with experts .*one packed weight an expert"):
        loaded(tmp_path / "experts")


@pytest.mark.parametrize("kind", ["fine-grained", "nvfp4", "modelopt"])
def test_a_model_with_experts_is_refused_by_its_configuration_alone(tmp_path: Path, kind: str) -> None:
    packed_linears(tmp_path, kind, "qwen3_moe")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match=r"a model with experts .*one packed weight an expert"):
        find_model(tmp_path, max_seq_length=64, weights=False)


@pytest.mark.parametrize("kind", ["modelopt", "modelopt fp8"])
def test_modelopts_own_file_says_how_weights_are_stored(tmp_path: Path, kind: str) -> None:
    right = packed_linears(tmp_path, kind)
    in_own_file(tmp_path, {"quantization": {"quant_algo": KINDS[kind]["quant_algo"], "exclude_modules": ["lm_head"]}})
    packed = {name: p for name, p in loaded(tmp_path).named_parameters() if isinstance(p, PackedTensor)}
    assert packed.keys() == right.keys()
    assert all(torch.equal(packed[name].dequantise(), right[name]) for name in right)


def test_modelopts_own_file_that_is_damaged_is_told(tmp_path: Path) -> None:
    packed_linears(tmp_path, "modelopt")
    for damaged in ({}, {"quantization": ["NVFP4"]}):
        in_own_file(tmp_path, damaged)
        with pytest.raises(DataError, match=r"hf_quant_config\.json: .*quantization"):
            loaded(tmp_path)


def in_own_file(folder: Path, table: dict[str, Any]) -> None:
    """Take quantization_config out of config.json, as older versions of ModelOpt write it."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(table))


def test_whole_blocks_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    packed_linears(tmp_path, "fine-grained", hidden_size=256, intermediate_size=384)
    ids, model = torch.randint(3, 90, (1, 40)), loaded(tmp_path, "bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)  # on the CPU it writes them out
    weights = {name: each.dequantise() for name, each in model.named_parameters() if isinstance(each, PackedTensor)}
    assert len(weights) == 14 and all(torch.equal(theirs.get_parameter(name), weights[name]) for name in weights)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs.eval()(ids).logits)


@pytest.mark.parametrize("lora", [{}, {"target_modules": ["q_proj", "down_proj"]}], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["rows", "modelopt"])
def test_merging_writes_the_dense_weights_with_the_adapter(tmp_path: Path, kind: str, lora: dict[str, Any]) -> None:
    packed_linears(tmp_path / "base", kind)
    model = with_adapters(loaded(tmp_path / "base"), **lora)
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    ids, merged = torch.randint(3, 90, (1, 40)), AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model.eval()(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["fine-grained", "nvfp4"])
def test_what_is_packed_is_neither_trained_nor_changed(tmp_path: Path, kind: str) -> None:
    """PiSSA would add to weights what it can't take out of them; a whole copy would be trained, and not saved."""
    packed_linears(tmp_path, kind)
    with pytest.raises(ConfigError, match=r"full_finetuning, but .* has its weights in few bits"):
        FastLanguageModel.from_pretrained(str(tmp_path), max_seq_length=64, full_finetuning=True)
    with pytest.raises(ConfigError, match="modules_to_save 'q_proj' is in few bits, which can't be trained"):
        add_lora(loaded(tmp_path), r=4, modules_to_save=["q_proj"])
    fields: Any = {"model": {"name": str(tmp_path), "max_seq_length": 64}, "data": {"train": "x.jsonl"}}
    fields["train"] = {"output": "out"}
    for adapter, problem in (
        ({"method": "full"}, "adapter.method: full, but .* has its weights in few bits"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: pissa_niter_4 changes the base's weights, and .*"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: olora changes the base's weights, and .* in few bits"),
    ):
        with pytest.raises(ConfigError, match=problem):
            find(Recipe.model_validate({**fields, "adapter": adapter}))
    assert find(Recipe.model_validate(fields)).is_quantised
