"""Packed checkpoints as publishers name and group what is packed: lists of modules, groups, scales that aren't read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pronghorn.errors import UnsupportedError
from pronghorn.export.fp8_checkpoint import write_fp8_checkpoint
from pronghorn.kernels.packed import PackedTensor
from pronghorn.loading.load import load_model
from support.composites import stored_tensors, write_composite
from support.packed_checkpoints import change
from support.packed_linears import KINDS, packed_linears, stored_as
from support.tiny import tiny_model

LAYER = "model.layers.0"


def packed_in(folder: Path, dtype: str = "float32") -> dict[str, Any]:
    model = load_model(folder, dtype=dtype, max_seq_length=128)[0]
    return {name: each for name, each in model.named_parameters() if isinstance(each, PackedTensor)}


def again(folder: Path, right: dict[str, torch.Tensor], kind: str | None, names: list[str]) -> None:
    """Store these linears' weights anew: as another kind's, or in 16 bits."""
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        linear = name.removesuffix("weight")
        tensors = {key: each for key, each in tensors.items() if not key.startswith(linear)}
        parts = {"weight": right[name].bfloat16()}
        if kind is not None:
            parts, right[name] = stored_as(kind, right[name])
        else:
            del right[name]
        tensors |= {f"{linear}{part}": each.contiguous().clone() for part, each in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def quantisation(folder: Path, **fields: Any) -> None:
    table = json.loads((folder / "config.json").read_text())
    table["quantization_config"] = {**table.get("quantization_config", {}), **fields}
    (folder / "config.json").write_text(json.dumps(table))


def check(folder: Path, right: dict[str, torch.Tensor]) -> None:
    found = packed_in(folder)
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name].dequantise(), values) for name, values in right.items())


@pytest.mark.parametrize(
    "pattern",
    [r"model\.layers\.\d+\.mlp\.down_proj", r".*\.down_proj$", "n_proj", "model.layers.*.mlp.(down|up2)_proj"],
)
def test_what_is_left_out_of_fine_grained_fp8_may_be_an_expression(tmp_path: Path, pattern: str) -> None:
    """As transformers reads `modules_to_not_convert`, which says so on a CPU, too."""
    right = packed_linears(tmp_path, "fine-grained", hidden_size=128, intermediate_size=256)
    again(tmp_path, right, None, [name for name in right if "down_proj" in name])
    quantisation(tmp_path, modules_to_not_convert=["lm_head", "*.nothing", pattern])
    check(tmp_path, right)
    quantisation(tmp_path, modules_to_not_convert=["lm_head", pattern])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.allclose(theirs.get_parameter(name), values, rtol=1e-2) for name, values in right.items())


def test_scales_may_be_powers_of_two(tmp_path: Path) -> None:
    right = packed_linears(tmp_path, "fine-grained")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in right:
        scales = tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].to(torch.float8_e8m0fnu)
        n, k = right[name].shape
        wide = scales.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        right[name] = tensors[name].float() * wide
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check(tmp_path, right)


@pytest.mark.parametrize("targets", [["re:.*down_proj$"], [f"model.layers.{index}.mlp.down_proj" for index in (0, 1)]])
@pytest.mark.parametrize("first", ["Linear", "re:.*_proj"])
def test_the_group_that_says_most_of_a_linear_is_its_own(tmp_path: Path, first: str, targets: list[str]) -> None:
    """Whichever comes first, as compressed-tensors' `match_targets` sorts them."""
    if first != "Linear" and targets[0].startswith("re:"):
        pytest.skip("compressed-tensors goes by the alphabet there")
    right = packed_linears(tmp_path, "rows")
    again(tmp_path, right, "nvfp4", [name for name in right if "down_proj" in name])
    rows, four = (KINDS[kind]["config_groups"]["group_0"] for kind in ("rows", "nvfp4"))
    groups = {
        "group_0": {**rows, "targets": [first], "format": "float-quantized"},
        "group_1": {**four, "targets": targets, "format": "nvfp4-pack-quantized"},
        "group_2": {"targets": ["LlamaAttention"], "weights": None},  # of its activations
    }
    quantisation(tmp_path, format="mixed-precision", config_groups=groups)
    for name in ("self_attn.q_scale", "self_attn.k_proj.output_scale"):
        change(tmp_path, f"{LAYER}.{name}", torch.ones(1))
    check(tmp_path, right)


@pytest.mark.parametrize(("location", "served"), [("input", False), ("output", False), ("weight_input", True)])
def test_weights_that_need_rotated_activations_are_refused(tmp_path: Path, location: str, served: bool) -> None:
    right = packed_linears(tmp_path, "rows")
    apply = [{"targets": ["re:.*down_proj$"], "location": location}]
    quantisation(tmp_path, transform_config={"config_groups": {"R4": {"type": "hadamard", "apply": apply}}})
    if served:
        check(tmp_path, right)
        return
    with pytest.raises(UnsupportedError, match=rf"rotates activations \({location} of .*down_proj.* transform R4"):
        packed_in(tmp_path)


@pytest.mark.parametrize("kind", ["fine-grained", "nvfp4"])
def test_buffers_that_are_stored_are_read(tmp_path: Path, kind: str) -> None:
    """A layer's scalar of Gemma 4."""
    right = packed_linears(tmp_path, kind, "gemma4_text", intermediate_size=96, num_kv_shared_layers=0)
    for layer in range(2):
        change(tmp_path, f"model.layers.{layer}.layer_scalar", torch.full((1,), 0.75 + layer).bfloat16())
    model = load_model(tmp_path, dtype="float32", max_seq_length=128)[0]
    assert [layer.layer_scalar.item() for layer in model.model.layers] == [0.75, 1.75]
    check(tmp_path, right)


def test_buffers_that_are_stored_are_written_with_8_bits(tmp_path: Path) -> None:
    model = tiny_model("gemma4_text", eos_token_id=2).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    write_fp8_checkpoint(tmp_path / "base", tmp_path / "fp8")
    name = f"{LAYER}.layer_scalar"
    assert torch.equal(load_file(tmp_path / "fp8" / "model.safetensors")[name], model.get_buffer(name))


@pytest.mark.parametrize("kind", ["rows", "modelopt fp8"])
@pytest.mark.parametrize(
    ("targets", "left_out"),
    [
        (["Linear"], ["language_model.lm_head", "re:.*vision.*", "re:.*projector.*"]),
        (["re:.*language_model.*_proj$"], ["re:.*lm_head", "re:.*vision.*", "multi_modal_projector*"]),
        (["re:model[.]language_model[.]layers.*_proj$"], ["lm_head", "model.vision_tower.*"]),
    ],
)
def test_names_of_a_model_with_towers_may_be_the_files_or_the_models(
    tmp_path: Path, kind: str, targets: list[str], left_out: list[str]
) -> None:
    write_composite(tmp_path, "gemma3", torch.bfloat16)
    fields = json.loads(json.dumps({**KINDS[kind], "ignore": left_out, "exclude_modules": left_out}))
    if kind == "rows":
        fields["config_groups"]["group_0"]["targets"] = targets
    quantisation(tmp_path, **fields)
    tensors, right = {}, {}
    for name, tensor in stored_tensors(tmp_path).items():
        parts = {"": tensor}
        if "_proj." in name and name.startswith("language_model"):
            made, right[name.removeprefix("language_model.")] = stored_as(kind, tensor)
            parts = {part.removeprefix("weight"): each for part, each in made.items()}
        tensors |= {f"{name}{part}": each.contiguous().clone() for part, each in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check(tmp_path, right)
