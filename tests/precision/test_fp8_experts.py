"""Experts whose frozen weights multiply in 8 bits: which do, when, and what the plan and the report say of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.kernels import launch
from pronghorn.kernels.grouped_codes import CodedExperts, choose_coded
from pronghorn.kernels.launch import uses_tma
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import TrainSetup, resting_bytes, width_of, working_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.step_time import step_times
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.experts import expert_modules
from pronghorn.models.lora import add_lora
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, with_adapters
from support.tiny import in_4_bits, packed_row, tiny_model

ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BATCH = packed_row(LENGTHS, ROW)


def adapted(family: str, **sizes: Any) -> Any:
    """A tiny model with adapters on linears and experts; all experts are chosen: rounding moves no token."""
    model = tiny_model(family, num_experts_per_tok=8, **sizes).bfloat16()
    return with_adapters(model, target_parameters=ON_EXPERTS)


def told(handle: Any, part: str) -> str:
    [path] = [path for path in handle.report if path.part == part]
    return path.path


def loss_of(model: Any) -> float:
    with torch.no_grad():
        return model(**BATCH).loss.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_stand_for_the_weights_in_both_layouts(dtype: torch.dtype, transposed: bool) -> None:
    weight = torch.randn(3, 48, 33).to(dtype)
    weight[1] = 0
    made = CodedExperts.of(weight.mT.contiguous().mT if transposed else weight, False)
    assert (made.forward.codes.shape, made.backward.codes.shape) == ((3, 33, 48), (3, 48, 33))
    for back in (made.forward.dequantise().mT, made.backward.dequantise()):
        assert ((back - weight.float()).abs() <= weight.float().abs() * 2**-4 + 1e-4 * weight.abs().max()).all()
    held = (made.forward, made.backward)
    assert sum(each.codes.nbytes + each.scales.nbytes for each in held) == 2 * 3 * 48 * 33 + 4 * 3 * (48 + 33)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "mixtral", "gemma4_text with experts", "qwen3_next"])
def test_experts_of_every_kind_multiply_in_8_bits(family: str) -> None:
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 16} if family == "qwen3_next" else {}
    model, found = with_adapters(tiny_model(family, intermediate_size=96, **heads).bfloat16()), {}
    for compute in ("dtype", "fp8_both"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        found[compute] = loss_and_gradients(model, BATCH)
        assert ("in FP8" in told(handle, "experts")) is (compute == "fp8_both")
    assert [codes.module for codes in handle.layers.lent_codes()] == list(expert_modules(model))
    assert told(handle, "products of frozen weights").endswith("experts too")
    assert found["fp8_both"][0] == pytest.approx(found["dtype"][0], rel=0.05)


def test_experts_alone_change_the_numbers_and_only_in_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("gpt_oss")
    handle = attach(model, Plan.keep(), layers="fused", compute="fp8_both")
    right, ids = loss_of(model), torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask).logits
    monkeypatch.setattr("pronghorn.layers.build.LayerBuilder._codes", lambda *_: None)
    handle.layers.forget()
    assert loss_of(model) != right and not handle.layers.lent_codes()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, padded)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_codes_follow_the_weights_and_go_with_detaching(family: str) -> None:
    model = adapted(family)
    names = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    handle = attach(model, Plan.keep(), layers="fused", compute="fp8_both")
    before = loss_of(model)
    made = handle.layers.lent_codes()
    with model.disable_adapter():
        assert loss_of(model) != before
    assert loss_of(model) == before
    assert all(a is b for a, b in zip(handle.layers.lent_codes(), made, strict=True))  # not made again
    [weight] = [
        p for name, p in model.named_parameters() if "layers.1.mlp.experts" in name and name.endswith("down_proj")
    ]
    with torch.no_grad():
        weight.mul_(2.0)
    assert loss_of(model) != before
    with torch.no_grad():
        weight.mul_(0.5)
    assert loss_of(model) == before
    model.merge_adapter()
    assert loss_of(model) == pytest.approx(before, rel=0.02)
    merged = [codes.codes[0].forward.codes for codes in handle.layers.lent_codes()]
    assert not any(torch.equal(a.float(), b.codes[0].forward.codes.float()) for a, b in zip(merged, made, strict=True))
    model.unmerge_adapter()
    handle.detach()
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_pronghorn")]
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, names[name], atol=1e-2), name  # PEFT rounds what it merges


def test_a_policy_changes_no_bit() -> None:
    model, found = adapted("gpt_oss"), []
    for policy in (Policy.KEEP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD):
        attach(model, Plan((policy,)), layers="fused", compute="fp8_both")
        found.append(loss_and_gradients(model, BATCH))
    for loss, gradients in found[1:]:
        assert loss == found[0][0] and all(torch.equal(gradients[name], right) for name, right in found[0][1].items())


def test_experts_that_can_not_are_told() -> None:
    packed = add_lora(in_4_bits(tiny_model("qwen3_moe", moe_intermediate_size=64).bfloat16()), r=4)
    loop = add_lora(tiny_model("qwen3_moe").bfloat16(), r=4)
    cases = (
        (packed, {}, "their weights are in 4 bits"),
        (loop, {"experimental": {"moe_routing": "loop"}}, "they go transformers' way"),
    )
    for model, options, why in cases:
        handle = attach(model.train(), Plan.keep(), layers="fused", compute="fp8_both", **options)
        loss_and_gradients(model, BATCH)
        assert told(handle, "products of frozen weights").endswith(f"(experts apart: {why})")
        assert not handle.layers.lent_codes() and "FP8" not in told(handle, "experts")
        assert not setup_of(model, 512).fp8_experts


@pytest.mark.parametrize(("in_8_bits", "layouts"), [("fp8", 1), ("fp8_both", 2)])
def test_the_plan_counts_each_layout_to_the_byte(in_8_bits: str, layouts: int) -> None:
    model, setups = adapted("qwen3_moe"), {}
    for compute in ("dtype", in_8_bits):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        setups[compute] = setup_of(model, 8192)
    assert not setups["dtype"].fp8_experts and setups[in_8_bits].fp8_experts
    loss_of(model)
    held = [
        side
        for lent in handle.layers.lent_codes()
        for codes in lent.codes
        for side in (codes.forward, codes.backward)
        if side is not None
    ]
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=4)
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(config)
    for dims, exactly in (
        (dims_of(model), sum(each.codes.nbytes + each.scales.nbytes for each in held)),
        (dims_of(large), None),
    ):
        forward = setups[in_8_bits].fp8_forward
        plain, experts = (TrainSetup(8192, fp8=True, fp8_forward=forward, fp8_experts=fp8) for fp8 in (False, True))
        grown = resting_bytes(dims, experts)["weights"] - resting_bytes(dims, plain)["weights"]
        weights = sum(layer.expert_weights for layer in dims.layers)
        assert grown == exactly if exactly else layouts * weights < grown < 1.01 * layouts * weights
    times = [step_times(dims, setup, device_spec("h200")).step([Policy.KEEP] * 4) for setup in (plain, experts)]
    assert times[1] < times[0]


@pytest.mark.parametrize("compute", ["fp8", "fp8_both"])
def test_the_plan_counts_no_codes_of_shared_experts(compute: Any) -> None:
    """Transformers computes these."""
    model = adapted("glm4_moe", intermediate_size=96)
    plain = resting_bytes(dims_of(model), setup_of(model, 8192))["weights"]
    handle = attach(model, Plan.keep(), layers="fused", compute=compute)
    loss_of(model)
    linears = [getattr(linear.source, "coded", linear.source).weight for linear in handle.layers.linears()]
    held = [each for weight in linears for each in (weight.codes, weight.across, weight.scales, weight.columns)]
    setup = replace(setup_of(model, 8192), fp8_experts=False)
    counted = resting_bytes(dims_of(model), setup)["weights"] - plain
    assert counted == sum(tensor.nbytes for tensor in held if tensor is not None)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_plan_counts_codes_that_are_made_while_the_activation_is_there(family: str) -> None:
    """The kernel of the activation's backward writes them; Mixtral's experts are wider than its tokens."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=1))
    (layer,) = dims_of(model).layers
    plain, in_8_bits = (working_bytes(layer, TrainSetup(8192, fp8=True, fp8_experts=each)) for each in (False, True))
    assert in_8_bits - plain == 8192 * (2 * width_of(layer) + 4 * layer.experts.chosen)


@pytest.mark.parametrize(
    ("capability", "sizes", "fetched", "why"),
    [
        ((9, 0), (2880, 5760), True, "TMA fetches tiles"),
        ((9, 0), (2880, 24), True, "needs multiples of 16"),
        ((8, 9), (2880, 5760), False, "read in place"),
        ((10, 0), (2880, 5760), False, "read in place"),
    ],
)
def test_which_product_a_card_takes(
    capability: tuple[int, int], sizes: tuple[int, ...], fetched: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen, reason = choose_coded(torch.device("cuda"), sizes)
    assert chosen == "triton" and why in reason
    of_integers = choose_coded(torch.device("cuda"), sizes, integers=True)[1]
    assert ("or gathered" in of_integers) is (fetched and not any(each % 16 for each in sizes))
    assert uses_tma(torch.device("cuda")) is fetched
    monkeypatch.setattr(launch, "TensorDescriptor", None)  # another Triton
    assert not uses_tma(torch.device("cuda"))
