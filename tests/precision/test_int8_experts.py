"""Experts under `compute="int8"`: both products of frozen ones in 8-bit integers of rotated rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.kernels.grouped_codes import Codes, multiply_codes_reference
from pronghorn.kernels.int8 import hadamard
from pronghorn.layers.expert_codes import coded
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import TrainSetup, resting_bytes, width_of, working_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.step_time import step_times
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.experts import expert_modules
from pronghorn.parity.quantised import quantised_products
from pronghorn.parity.quantised_experts import compared_experts, quantised_experts
from pronghorn.precision.compute import Compute
from pronghorn.precision.int8 import column_factors
from support.documents import LENGTHS, ROW, check_by_documents
from support.fused import loss_and_gradients, with_adapters
from support.tiny import packed_row, tiny_model

COMPUTE: Any = "int8"
FAMILIES = ("gpt_oss", "mixtral", "qwen3_moe")
BATCH = packed_row(LENGTHS, ROW)


def model_of(family: str = "qwen3_moe", adapted: bool = False, **sizes: Any) -> Any:
    """A tiny model whose experts have integers; all experts are chosen: rounding moves no token."""
    sizes = {"intermediate_size": 128, "num_experts_per_tok": 8, **sizes}
    if family == "qwen3_moe":
        sizes = {"moe_intermediate_size": 64, **sizes}
    model = tiny_model(family, **sizes).bfloat16()
    on = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]} if adapted else {}
    return with_adapters(model, **on)


def attached(model: Any, policy: Policy = Policy.KEEP, compute: Any = COMPUTE) -> Any:
    return attach(model, Plan((policy,)), layers="fused", compute=compute)


def told(handle: Any, part: str) -> str:
    [path] = [path for path in handle.report if path.part == part]
    return path.path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_stand_for_the_weights_with_one_factor_a_column(dtype: torch.dtype, transposed: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 128, 64).to(dtype)
    weight[1] = 0
    weight[:, 7] *= 30
    made = coded(weight.mT.contiguous().mT if transposed else weight, Compute.INT8)
    for side, right in ((made.forward, weight.mT), (made.backward, weight)):
        columns = right.reshape(-1, right.shape[2])
        lengths = columns.double().norm(dim=0)
        assert side.codes.dtype is torch.int8 and side.codes.shape == right.shape
        torch.testing.assert_close(side.factors, (lengths / lengths.max()).to(dtype), rtol=0.01, atol=0)
        rotated = side.dequantise().reshape(-1, 64) @ hadamard(weight.device)
        back = rotated.view(right.shape) * side.factors.float()
        assert 0 < (back - right.float()).norm() / right.float().norm() < 0.015
        assert not back[1].any()


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_same_operands(family: str, adapted: bool, nan_memory: None) -> None:
    model = model_of(family, adapted)
    handle = attached(model)
    loss, found = loss_and_gradients(model, BATCH)
    lent, layers = handle.layers.lent_codes(), handle.layers
    assert [codes.module for codes in lent] == list(expert_modules(model)) == layers.coded_experts(torch.bfloat16)
    for codes in lent:
        compared = compared_experts(codes, "experts", fast=True)
        ways = [(what, way) for what in ("gate and up", "down") for way in ("forward", "input gradient")]
        assert [each.name for each in compared] == [f"experts.{what} ({way})" for what, way in ways]
        assert all(each.excess <= 1 for each in compared), [each for each in compared if each.excess > 1]
    products = layers.coded_products(torch.bfloat16)
    handle.detach()
    with quantised_products(products), quantised_experts([codes.module for codes in lent], Compute.INT8.rule):
        check_by_documents(model, BATCH, loss, found, cosine=0.99)


def test_they_are_nearer_to_16_bits_than_e4m3() -> None:
    model, found = model_of("mixtral", adapted=True), {}
    for compute in ("dtype", "fp8_both", COMPUTE):
        attached(model, compute=compute)
        found[compute] = torch.cat([g.double().flatten() for g in loss_and_gradients(model, BATCH)[1].values()])
    errors = [(found[compute] - found["dtype"]).norm() for compute in (COMPUTE, "fp8_both")]
    assert 0 < errors[0] < 0.7 * errors[1]


def test_experts_alone_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    handle = attached(model)
    right, _ = loss_and_gradients(model, BATCH)
    assert told(handle, "experts") == "routed once, products in 8-bit integers by loop"
    assert told(handle, "products of frozen weights").endswith("; experts both ways")
    monkeypatch.setattr("pronghorn.layers.build.LayerBuilder._codes", lambda *_: None)
    handle.layers.forget()
    assert loss_and_gradients(model, BATCH)[0] != right and not handle.layers.lent_codes()


@pytest.mark.parametrize("policy", [Policy.RECOMPUTE_LAYER, Policy.OFFLOAD])
def test_a_policy_changes_no_bit(policy: Policy) -> None:
    model = model_of("gpt_oss", adapted=True)
    attached(model)
    loss, kept = loss_and_gradients(model, BATCH)
    attached(model, policy)
    again, other = loss_and_gradients(model, BATCH)
    assert again == loss and all(torch.equal(other[name], gradient) for name, gradient in kept.items())


def test_codes_follow_their_weights_and_another_compute_has_its_own() -> None:
    model = model_of()
    handle = attached(model)
    before, _ = loss_and_gradients(model, BATCH)
    made = handle.layers.lent_codes()
    assert all(a is b for a, b in zip(handle.layers.lent_codes(), made, strict=True))
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.experts.down_proj.mul_(2)
    changed, _ = loss_and_gradients(model, BATCH)
    assert changed != before
    handle = attached(model, compute="fp8_both")
    loss_and_gradients(model, BATCH)
    sides = [codes.forward for lent in handle.layers.lent_codes() for codes in lent.codes]
    assert all(side.factors is None and side.codes.dtype is torch.float8_e4m3fn for side in sides)
    attached(model)
    assert loss_and_gradients(model, BATCH)[0] == changed


@pytest.mark.parametrize(("width", "sizes"), [(24, "48 x 64"), (32, "64 x 32")])
def test_sizes_without_whole_groups_stay_in_the_models_dtype_and_are_told(width: int, sizes: str) -> None:
    model = model_of(moe_intermediate_size=width)
    handle = attached(model)
    loss_and_gradients(model, BATCH)
    why = f"their weights are {sizes}, and integers of rotated rows need multiples of 64, at most 133,120"
    assert told(handle, "products of frozen weights").endswith(f"(experts apart: {why})")
    assert told(handle, "experts") == "routed once, products by loop" and not handle.layers.lent_codes()
    assert handle.layers.coded_experts(torch.bfloat16) == [] and not setup_of(model, 512).fp8_experts
    attached(model, compute="fp8_both")
    assert setup_of(model, 512).fp8_experts  # e4m3 has them of any size


def test_the_plan_counts_codes_scales_and_factors_to_the_byte() -> None:
    model = model_of()
    handle = attached(model)
    loss_and_gradients(model, BATCH)
    setup, dims = setup_of(model, 8192), dims_of(model)
    assert setup.int8 and setup.fp8_experts and setup.expert_forward_in_8_bits
    lent = [
        side for each in handle.layers.lent_codes() for codes in each.codes for side in (codes.forward, codes.backward)
    ]
    held = sum(tensor.nbytes for side in lent for tensor in (side.codes, side.scales, side.factors))
    plain = replace(setup, fp8_experts=False)
    assert resting_bytes(dims, setup)["weights"] - resting_bytes(dims, plain)["weights"] == held


def test_the_plan_times_both_directions_and_a_pass_for_each_ones_rows() -> None:
    with torch.device("meta"):
        dims = dims_of(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", num_hidden_layers=1)))
    saved = {}
    for compute, setup in {
        COMPUTE: TrainSetup(8192, fp8=True, fp8_forward=False, int8=True),
        "fp8_both": TrainSetup(8192, fp8=True),
        "fp8": TrainSetup(8192, fp8=True, fp8_forward=False),
    }.items():
        (plain,), (in_8_bits,) = (
            step_times(dims, replace(setup, fp8_experts=each), device_spec("h200")).layers for each in (False, True)
        )
        saved[compute] = plain.forward - in_8_bits.forward, plain.backward - in_8_bits.backward
    assert saved["fp8"] == (0, saved["fp8_both"][1]) and all(time > 0 for time in saved[COMPUTE])
    assert all(integers < e4m3 for integers, e4m3 in zip(saved[COMPUTE], saved["fp8_both"], strict=True))
    # the kernel that makes dh writes its codes in e4m3; integers' are read, rotated and written
    assert saved[COMPUTE][0] > saved[COMPUTE][1] and saved["fp8_both"][0] < saved["fp8_both"][1]


def test_sums_of_integers_are_exact_beyond_24_bits() -> None:
    weight = Codes(torch.full((2, 3, 4096), 127, dtype=torch.int8), torch.ones(2, 3), torch.ones(4096))
    codes = torch.full((5, 4096), 127, dtype=torch.int8)
    codes[:, 0] = torch.arange(5)
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    found = multiply_codes_reference(codes, torch.ones(5, 1), weight, offsets, None, torch.float64)
    assert torch.equal(found, (codes.long() @ weight.codes[0].long().t()).double())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_plan_counts_codes_that_are_made_when_the_activation_is_gone(family: str) -> None:
    """Mixtral's experts are wider than its tokens, Qwen3's rows' gradients wider than the experts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=1))
    (layer,) = dims_of(model).layers
    setup = TrainSetup(8192, fp8=True, fp8_forward=False, int8=True)
    plain, in_8_bits = (working_bytes(layer, replace(setup, fp8_experts=each)) for each in (False, True))
    chosen, activation = layer.experts.chosen, 2 * width_of(layer)
    codes, rows = activation + 4 * chosen, 2 * chosen * layer.hidden
    assert in_8_bits - plain == 8192 * (max(codes + rows, activation) - max(rows, activation))


def test_factors_of_all_experts_are_those_of_their_rows_together() -> None:
    weight = torch.randn(5, 64, 128).bfloat16()
    torch.testing.assert_close(column_factors(weight), column_factors(weight.flatten(0, 1)), rtol=0.01, atol=0)
