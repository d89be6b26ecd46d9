"""Checkpoints in few bits: loaded as they are, they compute what their dense weights compute."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pronghorn.errors import PronghornError, UnsupportedError
from pronghorn.export.merge import save_merged
from pronghorn.kernels.mxfp4 import MXFP4Tensor
from pronghorn.loading.load import load_model
from pronghorn.loading.packed_checkpoint import fetched
from pronghorn.memory.estimate import resting_bytes
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.families import base_causal_lm
from pronghorn.models.lora import add_lora
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients
from support.packed_checkpoints import change, mxfp4_checkpoint
from support.tiny import packed_row
from support.tolerance import ThreeWay

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
SCALES = f"{GATE_UP}_scales"


def loaded(folder: Path, dtype: str = "float32", **options: Any) -> Any:
    return load_model(folder, dtype=dtype, max_seq_length=128, **options)[0]


def adapted(model: Any, targets: list[str]) -> Any:
    model = add_lora(model, r=4, target_modules=["q_proj", "v_proj", "o_proj"], target_parameters=targets)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def dense(model: Any) -> Any:
    """The same model, its packed weights written out."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, MXFP4Tensor):
                module._parameters[name] = nn.Parameter(parameter.dequantise(), requires_grad=False)
    return model


def test_mxfp4_is_loaded_as_transformers_reads_it(tmp_path: Path) -> None:
    tensors = mxfp4_checkpoint(tmp_path)
    model = loaded(tmp_path)
    assert isinstance(model.get_parameter(GATE_UP), MXFP4Tensor) and model.get_parameter(GATE_UP).is_leaf
    right = convert_moe_packed_tensors(tensors[f"{GATE_UP}_blocks"], tensors[SCALES], dtype=torch.float32)
    assert torch.equal(model.get_parameter(GATE_UP).dequantise(), right)
    ids = torch.randint(3, 90, (1, 40))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    theirs.float()  # transformers 5.17 unpacks to bfloat16, whatever is asked for
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits)
    assert model.name_or_path == str(tmp_path) and not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("targets", [[], EXPERTS])
@pytest.mark.parametrize("layers", ["fused", "stock"])
def test_training_over_mxfp4_is_training_over_its_dense_weights(
    tmp_path: Path, targets: list[str], layers: str
) -> None:
    mxfp4_checkpoint(tmp_path)
    packed = adapted(loaded(tmp_path), targets)
    plain = dense(packed)
    results = []
    for model in (packed, plain):
        attach(model, Plan.keep(), layers=layers)
        results.append(loss_and_gradients(model, packed_row(LENGTHS, ROW)))
    (loss, gradients), (right_loss, right) = results
    assert loss == right_loss
    assert gradients.keys() == right.keys() and all(torch.equal(gradients[name], right[name]) for name in right)
    stored = sum(isinstance(p, MXFP4Tensor) for p in base_causal_lm(packed).parameters())
    assert stored == 2 * len(base_causal_lm(packed).model.layers)


@pytest.mark.parametrize("targets", [[], EXPERTS])
def test_merging_writes_the_dense_weights_with_the_adapter(tmp_path: Path, targets: list[str]) -> None:
    mxfp4_checkpoint(tmp_path / "base")
    model = adapted(loaded(tmp_path / "base"), targets)
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    ids = torch.randint(3, 90, (1, 40))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, model.eval()(ids).logits, atol=1e-4, rtol=1e-4)


def test_norms_stay_in_float32_where_transformers_keeps_them(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    model = loaded(tmp_path, "float16")
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype is torch.float32}
    assert wide == {name for name, _ in model.named_parameters() if "norm" in name} and len(wide) == 5


def test_a_saved_adapter_loads_over_its_packed_base(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path / "base")
    model = adapted(loaded(tmp_path / "base"), EXPERTS)
    model.save_pretrained(tmp_path / "adapter")
    again = loaded(tmp_path / "adapter")
    ids = torch.randint(3, 90, (1, 40))
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


def test_the_plan_counts_the_stored_bytes(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    model = adapted(loaded(tmp_path, "bfloat16"), [])
    attach(model, Plan.keep(), layers="fused")
    right = sum(
        p.stored_bytes if isinstance(p, MXFP4Tensor) else p.nbytes
        for name, p in model.named_parameters()
        if "lora_" not in name
    )
    assert resting_bytes(dims_of(model), setup_of(model, 512))["weights"] == pytest.approx(right, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (SCALES, None, "lacks 1 of the model's weights .*gate_up_proj_scales"),
        (SCALES, torch.zeros(8, 64, 3, dtype=torch.uint8), r"gate_up_proj_scales is \[8, 64, 3\]"),
        (SCALES, torch.zeros(8, 64, 2, dtype=torch.bfloat16), "gate_up_proj_scales is torch.bfloat16, not torch.uint8"),
        ("model.layers.0.extra", torch.zeros(2), "extra has no place in the model"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.uint8), "model.norm.weight is torch.uint8"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, name: str, tensor: Any, problem: str) -> None:
    mxfp4_checkpoint(tmp_path)
    change(tmp_path, name, tensor)
    with pytest.raises(PronghornError, match=problem):
        loaded(tmp_path)


def test_a_truncated_file_is_told(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(PronghornError, match="not a whole safetensors file"):
        loaded(tmp_path)


def test_what_is_packed_is_not_quantised_again_nor_trained(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    with pytest.raises(PronghornError, match="load_in_4bit of a checkpoint in MXFP4"):
        loaded(tmp_path, load_in_4bit=True)
    mxfp4_checkpoint(tmp_path / "other", intermediate_size=24)
    with pytest.raises(UnsupportedError, match="MXFP4 stores groups of 32"):
        loaded(tmp_path / "other")
    with torch.no_grad(), pytest.raises(UnsupportedError, match="can't be written to"):
        loaded(tmp_path).get_parameter(GATE_UP).mul_(2)


@pytest.mark.gpu
@pytest.mark.parametrize("targets", [[], EXPERTS])
def test_4_bit_products_on_a_gpu_are_within_the_rule(tmp_path: Path, targets: list[str]) -> None:
    """Against the same weights written out to bfloat16, and to float32."""
    mxfp4_checkpoint(tmp_path)
    rule, batch = ThreeWay(), {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    packed, exact = (adapted(loaded(tmp_path, dtype), targets).to("cuda") for dtype in ("bfloat16", "float32"))
    results = []
    for model in (packed, dense(packed), dense(exact)):
        attach(model, Plan.keep(), layers="fused" if model is not exact else "stock", graph="off")
        results.append(loss_and_gradients(model, batch))
    for name, right in results[2][1].items():
        rule.add(name, results[0][1][name], results[1][1][name], right)
    rule.check()
    attach(packed, Plan.keep(), layers="fused", graph="on")
    for _ in range(2):
        loss, gradients = loss_and_gradients(packed, batch)
        assert loss == results[0][0] and all(torch.equal(gradients[name], results[0][1][name]) for name in gradients)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("more", "weights"), [([INDEX], ["model-1.safetensors", "model-2.safetensors"]), ([], ["model.safetensors"])]
)
def test_of_a_hub_model_only_transformers_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], weights: list[str]
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    there = ["config.json", *weights, "consolidated.safetensors", "model.fp32.safetensors", "original/x.safetensors"]
    there += ["a.bin", *more]
    asked: list[str] = []

    def download(name: str, allow_patterns: Any, ignore_patterns: Any, **_: Any) -> str:
        found = list(filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        if INDEX in found:
            (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict(zip("abc", weights * 2, strict=False))}))
        asked.extend(found)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert fetched("owner/model", {}) == tmp_path
    assert asked == ["config.json", *more, *weights]
