"""Experts that `load_in_4bit` quantises: bitsandbytes' numbers, trained over as their dense weights are."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from torch import nn

from pronghorn.api import FastLanguageModel
from pronghorn.config.recipe import Recipe
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export import merge
from pronghorn.export.merge import save_merged
from pronghorn.kernels.nf4_experts import NF4Tensor, quantise_experts
from pronghorn.loading.load import load_model
from pronghorn.memory.estimate import resting_bytes
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.experts import weight_names, wrappers
from pronghorn.models.lora import add_lora
from pronghorn.train.documents import find
from pronghorn.train.weightless import weightless, work_of
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients
from support.nf4 import dequantised
from support.tiny import MOE_FAMILIES, packed_row, tiny_model
from support.tolerance import ThreeWay

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def checkpoint(folder: Path, family: str, **changes: Any) -> Any:
    model = tiny_model(family, eos_token_id=2, **changes)
    model.save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)
    return model


def loaded(folder: Path, dtype: str = "float32") -> Any:
    return load_model(folder, dtype=dtype, max_seq_length=128, load_in_4bit=True)[0]


def adapted(model: Any, targets: list[str]) -> Any:
    model = add_lora(model, r=4, target_modules=["q_proj", "v_proj", "o_proj"], target_parameters=targets)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def dense(model: Any) -> Any:
    """The same model, its experts written out."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, NF4Tensor):
                module._parameters[name] = nn.Parameter(parameter.dequantise(), requires_grad=False)
    return model


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_loading_quantises_experts_to_the_bits_of_bitsandbytes(tmp_path: Path, family: str) -> None:
    plain = checkpoint(tmp_path, family)
    packed = {name: p for name, p in loaded(tmp_path).named_parameters() if isinstance(p, NF4Tensor)}
    assert len(packed) == 2 * sum(name.endswith(".experts") for name, _ in plain.named_modules())
    for name, parameter in packed.items():
        weight = plain.get_parameter(name).detach()
        codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        assert torch.equal(parameter.dequantise(), dequantised(codes, state).view(weight.shape))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_a_slice_of_experts_is_that_slice_of_all(nested: bool, turned: bool) -> None:
    weight = quantise_experts(torch.randn(8, 64, 96), nested)  # 96 blocks an expert: 8 share outer statistics
    weight = weight.turned() if turned else weight
    small = quantise_experts(torch.randn(12, 64, 64), nested)  # 64 blocks an expert: 4 do
    assert weight.together == (8 if nested else 1) and small.together == (4 if nested else 1)
    assert torch.equal(small.experts(4, 8, torch.float32), small.dequantise()[4:8])
    assert torch.equal(weight.experts(0, 8, torch.float32), weight.dequantise())
    assert weight.shape == weight.dequantise().shape


@pytest.mark.matrix(4)
@pytest.mark.parametrize("targets", [[], EXPERTS])
@pytest.mark.parametrize("plan", [Plan.keep(), Plan.recompute()])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_training_over_nf4_experts_is_training_over_their_dense_weights(
    tmp_path: Path, family: str, plan: Plan, targets: list[str]
) -> None:
    checkpoint(tmp_path, family)
    packed = adapted(loaded(tmp_path), targets)
    results = []
    for model in (packed, dense(packed)):
        attach(model, plan)
        results.append(loss_and_gradients(model, packed_row(LENGTHS, ROW)))
    (loss, gradients), (right_loss, right) = results
    assert loss == right_loss
    assert gradients.keys() == right.keys() and all(torch.equal(gradients[name], right[name]) for name in right)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_transformers_own_experts_run_over_nf4_in_inference_mode(tmp_path: Path, family: str) -> None:
    checkpoint(tmp_path, family)
    model, ids = loaded(tmp_path).eval(), torch.arange(3, 23)[None]
    model.set_experts_implementation("eager")  # which takes an expert's weight as a view
    with torch.no_grad():
        right = dense(model)(ids).logits
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, right)
        weight = next(p for p in model.parameters() if isinstance(p, NF4Tensor))
        assert torch.equal(weight.detach().dequantise(), weight.dequantise())


@pytest.mark.parametrize("targets", [[], EXPERTS])
def test_merging_writes_the_dense_weights_with_the_adapter(tmp_path: Path, targets: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint(tmp_path / "base", "qwen3_moe")
    model = adapted(loaded(tmp_path / "base"), targets)
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    ids = torch.randint(3, 90, (1, 40))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, model.eval()(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_plan_counts_the_stored_bytes(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3_moe")
    model = adapted(loaded(tmp_path, "bfloat16"), [])
    attach(model, Plan.keep())
    setup = setup_of(model, 512)
    stored = sum(p.stored_bytes for p in model.parameters() if isinstance(p, NF4Tensor))
    numbers = sum(p.numel() for p in model.parameters() if isinstance(p, NF4Tensor))
    assert setup.method == "qlora" and setup.expert_bytes == pytest.approx(stored / numbers, rel=0.05)
    assert resting_bytes(dims_of(model), setup)["weights"] > stored


@pytest.mark.parametrize("dense", [False, True])
def test_a_plan_without_weights_counts_experts_as_loading_will_store_them(tmp_path: Path, dense: bool) -> None:
    checkpoint(tmp_path / "model", "qwen3_moe")
    (tmp_path / "rows.jsonl").write_text('{"text": "Once"}\n')
    recipe = Recipe.model_validate(
        {
            "model": {
                "name": str(tmp_path / "model"), "max_seq_length": 128, "load_in_4bit": True, "experts_in_16bit": dense,
            },
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "precision": {"dtype": "bfloat16", "compute": "fp8"},
            "train": {"output": str(tmp_path / "run")},
        }
    )  # fmt: skip
    handle = weightless(recipe, find(recipe, weights=False))
    in_8_bits = work_of(recipe, handle, None)
    assert in_8_bits.fp8 and in_8_bits.fp8_experts is dense  # those of 4 bits multiply in 16
    planned = replace(in_8_bits, fp8=False, fp8_experts=False)
    model = add_lora(find(recipe).model(torch.bfloat16, torch.device("cpu")), r=recipe.adapter.r)
    right = setup_of(model, 128)
    assert (planned.method, planned.expert_bytes is None) == (right.method, dense) == ("qlora", dense)
    weights = [
        resting_bytes(dims_of(each), setup)["weights"] for each, setup in ((handle.model, planned), (model, right))
    ]
    assert weights[0] == pytest.approx(weights[1], rel=0.05)  # of small experts a second scale weighs more


def test_experts_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3_moe", hidden_size=68, moe_intermediate_size=12)
    with pytest.raises(UnsupportedError, match="NF4 stores blocks of 64"):
        loaded(tmp_path)


def test_experts_in_16bit_leaves_them_dense_and_says_so_in_the_plan(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path, "qwen3_moe")
    options: dict[str, Any] = {"max_seq_length": 128, "load_in_4bit": True, "experts_in_16bit": True}
    model = FastLanguageModel.from_pretrained(str(tmp_path), dtype="float32", **options)[0]
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    for name in weight_names(model):
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name))
    setup = setup_of(adapted(model, []), 512)
    assert setup.method == "qlora" and setup.expert_bytes is None


@pytest.mark.parametrize(
    ("family", "load_in_4bit", "problem"),
    [("qwen3", True, "qwen3, which has no experts"), ("qwen3_moe", False, "without load_in_4bit")],
)
def test_experts_in_16bit_is_refused_where_it_says_nothing(
    tmp_path: Path, family: str, load_in_4bit: bool, problem: str
) -> None:
    checkpoint(tmp_path, family)
    with pytest.raises(ConfigError, match=f"experts_in_16bit .*{problem}"):
        load_model(tmp_path, max_seq_length=128, load_in_4bit=load_in_4bit, experts_in_16bit=True)


@pytest.mark.parametrize("targets", [[], EXPERTS])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_saved_adapter_over_nf4_experts_loads_to_the_same_numbers(
    tmp_path: Path, family: str, targets: list[str]
) -> None:
    checkpoint(tmp_path / "base", family)
    model = adapted(loaded(tmp_path / "base"), targets)
    model.save_pretrained(tmp_path / "adapter")
    again = loaded(tmp_path / "adapter").train()
    assert any(isinstance(parameter, NF4Tensor) for parameter in again.parameters())
    results = []
    for each in (model, again):
        attach(each, Plan.keep())
        results.append(loss_and_gradients(each, packed_row(LENGTHS, ROW)))
    (loss, gradients), (other_loss, others) = results
    assert loss == other_loss
    assert gradients.keys() == others.keys() and all(torch.equal(gradients[name], others[name]) for name in others)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_merged_expert_is_rounded_once(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path / "base", "qwen3_moe")
    model = adapted(loaded(tmp_path / "base", "bfloat16"), EXPERTS)
    base, path = model.get_base_model(), f"model.layers.0.mlp.experts.{name}"
    [written] = [tensor.read() for tensor in merge.merged_tensors(base, torch.bfloat16) if tensor.name == path]
    wrapper = next(wrapper for wrapper in wrappers(base) if wrapper.parameter_name == name)
    experts = len(wrapper.get_param())
    a = wrapper.lora_A["default"].weight.detach().double().unflatten(0, (experts, -1))
    b = wrapper.lora_B["default"].weight.detach().double().unflatten(1, (-1, experts))
    delta = torch.einsum("ore,eri->eoi", b, a) * wrapper.scaling["default"]
    exact = wrapper.get_param().dequantise().double() + delta
    assert written.dtype == torch.bfloat16
    assert ((written.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()  # half a unit in the last place


@pytest.mark.gpu
@pytest.mark.parametrize("targets", [[], EXPERTS])
def test_nf4_experts_on_a_gpu_are_within_the_rule(tmp_path: Path, targets: list[str]) -> None:
    """Against the same weights written out to bfloat16, and to float32; and their graphs give the same bits."""
    checkpoint(tmp_path, "qwen3_moe", num_experts_per_tok=8)  # all of them: rounding moves no token to another
    rule, batch = ThreeWay(), {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    packed = adapted(loaded(tmp_path, "bfloat16"), targets).to("cuda")
    exact = dense(packed).float()
    results = []
    for model in (packed, dense(packed), exact):
        attach(model, Plan.keep(), layers="fused" if model is not exact else "stock", graph="off")
        results.append(loss_and_gradients(model, batch))
    for name, right in results[2][1].items():
        rule.add(name, results[0][1][name], results[1][1][name], right)
    rule.check()
    attach(packed, Plan.keep(), layers="fused", graph="on")
    for _ in range(2):
        loss, gradients = loss_and_gradients(packed, batch)
        assert loss == results[0][0] and all(torch.equal(gradients[name], results[0][1][name]) for name in gradients)
