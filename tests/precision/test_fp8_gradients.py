"""`compute="fp8"`: input gradients are products in 8 bits, and the forward is as without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import TrainSetup, resting_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.step_time import step_times
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.parity.quantised import compared_products, quantised_products
from pronghorn.precision.fp8 import BackwardSource, as_codes
from support.documents import LENGTHS, ROW, check_by_documents
from support.fused import loss_and_gradients, with_adapters
from support.tiny import SIZES_IN_8_BITS, in_4_bits, packed_row, tiny_model

MODELS = [
    *((family, "bf16") for family in ("llama", "gemma3_text", "qwen3_5_text", "gemma4_text", "qwen3_moe", "gpt_oss")),
    ("llama", "nf4"),
]

POLICIES = Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD


def model_of(family: str, base: str = "bf16") -> Any:
    model = tiny_model(family, intermediate_size=128, **SIZES_IN_8_BITS.get(family, {})).bfloat16()
    return with_adapters(in_4_bits(model) if base == "nf4" else model)


def error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    pairs = [(found[name].double(), value.double()) for name, value in right.items()]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("family", "base"), MODELS)
def test_the_loss_is_that_without_8_bits_to_the_bit(family: str, base: str) -> None:
    model, batch, found = model_of(family, base), packed_row(LENGTHS, ROW), {}
    for compute in ("dtype", "fp8_both", "fp8"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        found[compute] = loss_and_gradients(model, batch)
    assert found["fp8"][0] == found["dtype"][0] != found["fp8_both"][0]
    coded, products = handle.layers.in_8_bits()
    assert coded == products > 0
    assert all(isinstance(linear.source, BackwardSource) for linear in handle.layers.linears())
    lent = [codes for each in handle.layers.lent_codes() for codes in each.codes]
    assert bool(lent) is (family in ("qwen3_moe", "gpt_oss")) and all(each.forward is None for each in lent)
    told = {path.part: path.path for path in handle.report}
    assert "for input gradients; the forward in the model's dtype" in told["products of frozen weights"]
    assert not lent or "input gradients' products in FP8" in told["experts"]
    if family not in ("qwen3_moe", "gpt_oss"):  # where rounding may send a token to other experts
        errors = [error(found[compute][1], found["dtype"][1]) for compute in ("fp8", "fp8_both")]
        assert 0 < errors[0] < 0.7 * errors[1]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("family", "base", "policy"),
    [("llama", base, policy) for base in ("bf16", "nf4") for policy in POLICIES]
    + [("qwen3_moe", "bf16", Policy.RECOMPUTE_LAYER)],
)
def test_a_policy_changes_no_bit(family: str, base: str, policy: Policy) -> None:
    model, batch = model_of(family, base), packed_row(LENGTHS, ROW)
    attach(model, Plan.keep(), layers="fused", compute="fp8")
    loss, kept = loss_and_gradients(model, batch)
    attach(model, Plan((policy,)), layers="fused", compute="fp8")
    again, other = loss_and_gradients(model, batch)
    assert again == loss and all(torch.equal(other[name], gradient) for name, gradient in kept.items())


@pytest.mark.parametrize(("family", "base"), [("qwen2", "bf16"), ("gemma3_text", "bf16"), ("llama", "nf4")])
def test_gradients_are_those_of_the_same_operands(family: str, base: str) -> None:
    """Against transformers' layers, one document at a time, whose input gradients have their operands rounded so."""
    model, batch = model_of(family, base), packed_row(LENGTHS, ROW)
    handle = attach(model, Plan.keep(), layers="fused", compute="fp8")
    products = handle.layers.coded_products(torch.bfloat16)
    loss, found = loss_and_gradients(model, batch)
    for linear in handle.layers.linears():
        [compared] = compared_products(linear, "product", fast=True)
        assert compared.name == "product (input gradient)" and compared.excess <= 1
    handle.detach()
    with quantised_products(products):
        check_by_documents(model, batch, loss, found, cosine=0.995)


def test_a_wrong_scale_would_show() -> None:
    model = model_of("llama")
    handle = attach(model, Plan.keep(), layers="fused", compute="fp8")
    loss_and_gradients(model, packed_row(LENGTHS, ROW))
    linear = handle.layers.linears()[0]
    linear.source.coded.weight.scales.mul_(1.03)
    linear.source.coded._ones.mul_(1.03)
    [compared] = compared_products(linear, "product", fast=True)
    assert compared.excess > 1


def test_one_layout_of_codes_is_kept_and_another_compute_makes_its_own() -> None:
    model, batch = model_of("llama"), packed_row(LENGTHS, ROW)
    kept = {}
    for compute in ("fp8", "fp8_both", "fp8"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        _, found = loss_and_gradients(model, batch)
        sources = [getattr(linear.source, "coded", linear.source) for linear in handle.layers.linears()]
        assert all((source.weight.codes is None) is (compute == "fp8") for source in sources)
        assert all(torch.equal(gradient, found[name]) for name, gradient in kept.get(compute, {}).items())
        kept[compute] = found


def test_codes_follow_their_weight() -> None:
    model, batch = model_of("llama"), packed_row(LENGTHS, ROW)
    attach(model, Plan.keep(), layers="fused", compute="fp8")
    before = loss_and_gradients(model, batch)[1]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name and "lora" not in name:
                parameter.mul_(2)
    after = loss_and_gradients(model, batch)[1]
    attach(model, Plan.keep(), layers="fused")
    right = loss_and_gradients(model, batch)[1]
    assert error(after, right) < 0.1 < error(before, right)


def test_the_plan_counts_one_layout_and_gradients_alone() -> None:
    setups = {}
    for compute in ("fp8_both", "fp8"):
        model = model_of("llama")
        attach(model, Plan.keep(), layers="fused", compute=compute)
        setups[compute] = setup_of(model, 8192)
    assert [(each.fp8, each.forward_in_fp8) for each in setups.values()] == [(True, True), (True, False)]
    config = AutoConfig.for_model("llama", num_hidden_layers=4, hidden_size=4096, intermediate_size=14336)
    with torch.device("meta"):
        dims = dims_of(AutoModelForCausalLM.from_config(config))
    linear = sum(layer.linear_weights for layer in dims.layers)
    for method, layouts in (("lora", (0, 1, 2)), ("qlora", (0, 0, 0))):
        plain = TrainSetup(8192, method=method)
        each = plain, replace(plain, fp8=True, fp8_forward=False), replace(plain, fp8=True)
        weights = [resting_bytes(dims, setup)["weights"] for setup in each]
        for size, count in zip(weights, layouts, strict=True):
            assert size - weights[0] == pytest.approx(count * linear, rel=0.01, abs=0.01 * linear)
        times = [step_times(dims, setup, device_spec("h200")) for setup in each]
        steps = [each.step([Policy.KEEP] * 4) for each in times]
        assert steps[0] > steps[1] > steps[2]
        assert [each.layers[0].forward for each in times[:2]] == [times[0].layers[0].forward] * 2


def test_codes_of_a_checkpoint_are_written_out_for_the_forward() -> None:
    model, batch = model_of("llama"), packed_row(LENGTHS, ROW)
    for name, linear in model.named_modules():
        if name.endswith(".base_layer"):
            linear.weight = torch.nn.Parameter(as_codes(linear.weight, torch.device("cpu")), requires_grad=False)
    found = {}
    for compute in ("dtype", "fp8"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        found[compute] = loss_and_gradients(model, batch)
    assert found["fp8"][0] == found["dtype"][0]
    assert 0 < error(found["fp8"][1], found["dtype"][1]) < 0.1
    setup = setup_of(model, 8192)
    assert setup.own_codes and setup.writes_forward and not setup.writes_backward
    [told] = [path.path for path in handle.report if path.part == "products of frozen weights"]
    assert "the stored codes" in told


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "base"), MODELS)
def test_on_a_gpu(family: str, base: str) -> None:
    model = model_of(family, base).cuda()
    batch, found = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}, {}
    for compute in ("dtype", "fp8_both", "fp8"):
        handle = attach(model, Plan.keep(), layers="fused", graph="off", compute=compute)
        found[compute] = loss_and_gradients(model, batch)
    assert found["fp8"][0] == found["dtype"][0]
    for linear in handle.layers.linears():
        [compared] = compared_products(linear, "product", fast=True)
        assert compared.excess <= 1
    if family not in ("qwen3_moe", "gpt_oss"):
        errors = [error(found[compute][1], found["dtype"][1]) for compute in ("fp8", "fp8_both")]
        assert 0 < errors[0] < 0.7 * errors[1]
    else:
        assert 0 < error(found["fp8"][1], found["dtype"][1]) < 0.1
