"""`compute="int8"`: frozen linears multiply in 8-bit integers of rotated rows, q, k and v forward in 16 bits."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pronghorn.config.recipe import Recipe
from pronghorn.errors import PronghornError
from pronghorn.kernels.int8 import quantise_rotated
from pronghorn.loading.share import share_layers
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import TrainSetup, resting_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.step_time import INT8, _layer_times, _rates
from pronghorn.models.attach import attach
from pronghorn.models.attach import attached as handle_of
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.parity.quantised import compared_products, quantised_products
from pronghorn.precision.compute import Compute, Numbers, check_device
from pronghorn.precision.int8 import Int8Source, RotatedWeight, WrittenInt8Source
from pronghorn.precision.source import Activation, DenseSource, LowRankGrad
from pronghorn.ranges import PREFIX, PRODUCTS
from support.documents import LENGTHS, ROW, check_by_documents, gradients
from support.fused import loss_and_gradients, with_adapters
from support.shapes import dims_of_shape
from support.tiny import SIZES_IN_8_BITS, in_4_bits, packed_row, tiny_model

COMPUTE: Any = "int8"
INTEGERS = TrainSetup(8192, fp8=True, fp8_forward=False, int8=True)
FAMILIES = ("llama", "gemma3_text", "qwen3_5_text", "phi3", "gemma4_text", "gemma4_unified_text")
SIZES: dict[str, dict[str, int]] = {**SIZES_IN_8_BITS, "gemma4_unified_text": {"num_global_key_value_heads": 2}}
BASES = [*((family, "bf16") for family in FAMILIES), ("llama", "nf4"), ("qwen3_5_text", "nf4"), ("llama", "fp16")]


def model_of(family: str = "llama", base: str = "bf16", **sizes: Any) -> Any:
    model = tiny_model(family, **{"intermediate_size": 128, **SIZES.get(family, {}), **sizes})
    model = model.half() if base == "fp16" else model.bfloat16()
    return with_adapters(in_4_bits(model) if base == "nf4" else model)


def attached(model: Any, policy: Policy = Policy.KEEP, **options: Any) -> Any:
    return attach(model, Plan((policy,)), **{"layers": "fused", "compute": COMPUTE, **options})


def integers(handle: Any) -> list[torch.Tensor]:
    """The codes (unless they are written out), scales and factors that an attached model's products hold."""
    coded = [linear.source for linear in handle.layers.linears() if linear.in_8_bits]
    sources = [each for source in coded for each in (source.plain, source.coded) if isinstance(each, Int8Source)]
    held = [tensor for source in sources for tensor in source.weight if tensor is not None]
    return held + [tensor for source in sources for tensor in getattr(source, "inverse", ())]


def same(found: tuple[Any, dict[str, Any]], right: tuple[Any, dict[str, Any]]) -> bool:
    alike = found[0] == right[0] and found[1].keys() == right[1].keys()
    return alike and all(torch.equal(found[1][name], gradient) for name, gradient in right[1].items())


def test_both_products_are_those_of_the_integers() -> None:
    torch.manual_seed(0)
    x, dy, weight = torch.randn(7, 128).bfloat16(), torch.randn(7, 64).bfloat16(), torch.randn(64, 128).bfloat16()
    x[2] *= 100
    weight[:, 5] *= 50
    for given, across, exact in (
        (x, False, x.double() @ weight.double().t()),
        (dy, True, dy.double() @ weight.double()),
    ):
        source = Int8Source(RotatedWeight.of([weight[:32], weight[32:]], across, torch.bfloat16))
        found = source.input_grad(Activation(given), None) if across else source.forward(Activation(given), None)
        assert 1e-4 < (found - exact).norm() / exact.norm() < 0.015
    low = LowRankGrad(torch.randn(7, 4).bfloat16(), torch.randn(4, 128).bfloat16(), None)
    added = source.input_grad(Activation(dy), low).double()
    assert ((added - found.double() - low.dya.double() @ low.a.double()).abs() <= added.abs() * 2**-7 + 0.1).all()
    assert torch.equal(
        Int8Source(RotatedWeight.of([weight], False, torch.bfloat16)).forward(Activation(x * 0), None),
        x.new_zeros(7, 64),
    )
    assert source.input_grad(Activation(dy[:0]), None).shape == (0, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("across", [False, True])
def test_columns_and_weights_of_zeros_give_numbers(across: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(64, 64).to(dtype)
    x[:, 7] = 1000.0
    weight[:, 7] = weight[9] = 0
    exact = x.double() @ (weight if across else weight.t()).double()
    found = Int8Source(RotatedWeight.of([weight], across, dtype)).forward(Activation(x), None)
    assert (found - exact).norm() / exact.norm() < 0.015
    none = Int8Source(RotatedWeight.of([weight * 0], across, dtype)).forward(Activation(x), None)
    assert torch.equal(none, x * 0)


def test_a_profile_tells_its_products_from_what_else_a_layer_launches() -> None:
    source = Int8Source(RotatedWeight.of([torch.randn(64, 64).bfloat16()], False, torch.bfloat16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        source.forward(Activation(torch.randn(3, 64).bfloat16()), None)
    assert PREFIX + PRODUCTS in {event.name for event in profiled.events()}


@pytest.mark.parametrize(("family", "base"), BASES)
def test_gradients_are_those_of_the_same_operands(family: str, base: str) -> None:
    model, batch = model_of(family, base), packed_row(LENGTHS, ROW)
    handle = attached(model)
    loss, found = loss_and_gradients(model, batch)
    coded = [linear for linear in handle.layers.linears() if linear.in_8_bits]
    products = handle.layers.coded_products(torch.float16 if base == "fp16" else torch.bfloat16)
    layers = handle.layers.backbone.layers
    gates = sum(hasattr(layer, "linear_attn") for layer in layers)  # of delta nets: their a and b
    blocks = 3 if family == "gemma4_text" else 2
    assert len(coded) == len(products) == len(handle.layers.linears()) - gates == 2 * blocks * len(layers)
    assert [rule.backward for _, rule in products] == [Numbers.INT8] * len(coded)
    assert [rule.forward for _, rule in products[:4]] == [Numbers.DTYPE, *[Numbers.INT8] * 3]
    for linear in coded:
        compared = compared_products(linear, "product", fast=True)
        both = linear.rule.forward is Numbers.INT8
        assert [each.name for each in compared] == ["product (forward)"] * both + ["product (input gradient)"]
        assert all(each.excess <= 1 for each in compared)
    handle.detach()
    with quantised_products(products):
        check_by_documents(model, batch, loss, found, cosine=0.99)


@pytest.mark.parametrize("block", [64, 32])
def test_weights_in_4_bits_give_the_codes_of_what_they_stand_for(block: int) -> None:
    """By a kernel where groups of 64 lie in one block, else by way of 16 bits; none are kept."""
    from bitsandbytes.nn import Params4bit

    torch.manual_seed(0)
    few = [
        Params4bit(torch.randn(n, 192).bfloat16(), requires_grad=False, quant_type="nf4", blocksize=block).to("cpu")
        for n in (64, 128)
    ]
    for across in (False, True):
        want = RotatedWeight.of(few, across, torch.bfloat16)
        source = WrittenInt8Source(few, [64, 128], want._replace(codes=None), across)
        assert torch.equal(source.codes(), want.codes)
        x = torch.randn(5, 192).bfloat16()
        assert torch.equal(source.forward(Activation(x), None), Int8Source(want).forward(Activation(x), None))


@pytest.mark.parametrize("once", [False, True])
def test_weights_in_4_bits_have_their_codes_written_out_unless_they_are_kept(once: bool) -> None:
    model, batch = model_of(base="nf4"), packed_row(LENGTHS, ROW)
    handle = attach(model, replace(Plan.keep(), written_once=once), layers="fused", compute=COMPUTE)
    found = loss_and_gradients(model, batch)
    for linear in handle.layers.linears():
        sources = [each for each in (linear.source.plain, linear.source.coded) if isinstance(each, Int8Source)]
        assert [each.weight.codes is None for each in sources] == [not once] * len(sources)
    attach(model, replace(Plan.keep(), written_once=not once), layers="fused", compute=COMPUTE)
    assert same(loss_and_gradients(model, batch), found)


def test_it_is_nearer_to_16_bits_than_e4m3_in_both_passes() -> None:
    model, batch, found = model_of(), packed_row(LENGTHS, ROW), {}
    for compute in ("dtype", "fp8_both", COMPUTE):
        attach(model, Plan.keep(), layers="fused", compute=compute)
        found[compute] = torch.cat([g.double().flatten() for g in loss_and_gradients(model, batch)[1].values()])
    errors = [(found[compute] - found["dtype"]).norm() for compute in (COMPUTE, "fp8_both")]
    assert 0 < errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize(
    "policy", [Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD]
)
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_policy_changes_no_bit(base: str, policy: Policy) -> None:
    model, batch = model_of(base=base), packed_row(LENGTHS, ROW)
    attached(model)
    kept = loss_and_gradients(model, batch)
    attached(model, policy)
    assert same(loss_and_gradients(model, batch), kept)


def test_tiles_of_rows_sum_the_same_products() -> None:
    model, batch = model_of("gemma3_text"), packed_row(LENGTHS, ROW)
    attached(model)
    loss, kept = loss_and_gradients(model, batch)
    attach(model, Plan((Policy.KEEP,), mlp_rows=16), layers="fused", compute=COMPUTE)
    again, found = loss_and_gradients(model, batch)
    assert again == loss
    for name, gradient in kept.items():
        torch.testing.assert_close(found[name], gradient, rtol=0.01, atol=1e-3)


def test_adapters_and_a_reference_pass_read_the_same_codes() -> None:
    """As DPO's, which switches adapters off between a forward and its backward."""
    model, batch = model_of(base="nf4"), packed_row(LENGTHS, ROW)
    model.add_adapter("second", model.peft_config["default"])
    handle = attached(model)
    right = loss_and_gradients(model, batch)
    scales = [linear.source.coded.weight.scales.data_ptr() for linear in handle.layers.linears()]
    model.set_adapter("second")
    assert not same(loss_and_gradients(model, batch), right)
    assert [linear.source.coded.weight.scales.data_ptr() for linear in handle.layers.linears()] == scales
    model.set_adapter("default")
    loss = model(**batch).loss
    with torch.no_grad(), model.disable_adapter():
        assert model(**batch).loss != loss
    loss.backward()
    assert same((loss.item(), gradients(model)), right)


def test_documents_stay_apart_to_the_bit() -> None:
    model, batch = model_of(), packed_row(LENGTHS, ROW)
    attached(model)
    first = sum(LENGTHS[:2])
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, first:] = 7
    with torch.no_grad():
        logits = [model(**{k: v for k, v in row.items() if k != "labels"}).logits[0] for row in (batch, other)]
    assert torch.equal(logits[0][:first], logits[1][:first]) and not torch.equal(*logits)


def test_integers_follow_their_weight_and_another_compute_lets_them_go() -> None:
    model, batch = model_of(), packed_row(LENGTHS, ROW)
    handle = attached(model)
    before, _ = loss_and_gradients(model, batch)
    down = model.get_base_model().model.layers[0].mlp.down_proj.base_layer
    with torch.no_grad():
        down.weight.mul_(2)
    changed, _ = loss_and_gradients(model, batch)
    handle.detach()
    attached(model)
    assert loss_and_gradients(model, batch)[0] == changed != before
    for other in ("fp8", "dtype"):
        attached(model)
        loss_and_gradients(model, batch)
        codes = [weakref.ref(tensor) for tensor in integers(handle_of(model))]
        attached(model, compute=other)
        gc.collect()
        assert len(codes) == 7 * 3 * 3 and not any(code() is not None for code in codes)


@pytest.mark.parametrize("change", ["written", "merged"])
def test_integers_of_weights_that_are_gone_are_let_go(change: str) -> None:
    model, batch = model_of(), packed_row(LENGTHS, ROW)
    handle = attached(model)
    loss_and_gradients(model, batch)
    codes = [weakref.ref(tensor) for tensor in integers(handle)]
    if change == "merged":
        model.merge_adapter()
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    with torch.no_grad():
        model(**batch)
    gc.collect()
    assert codes and not any(code() is not None for code in codes)


def test_a_reference_pass_is_not_built_again_in_each_step() -> None:
    """PEFT freezes adapters that it switches off, and they are still written to in between."""
    model, batch = model_of(), packed_row(LENGTHS, ROW)
    handle, found = attached(model), []
    for _ in range(3):
        model(**batch).loss.backward()
        with torch.no_grad(), model.disable_adapter():
            model(**batch)
        found.append(handle.layers.generation)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01)
    assert found == [2, 2, 2]


@pytest.mark.parametrize("compute", ["fp8", COMPUTE])
def test_a_weight_that_is_trained_is_told(compute: str) -> None:
    model = model_of()
    model.get_base_model().model.layers[0].mlp.down_proj.base_layer.weight.requires_grad_(True)
    handle = attached(model, compute=compute)
    loss_and_gradients(model, packed_row(LENGTHS, ROW))
    [told] = [path.path for path in handle.report if path.part == "products of frozen weights"]
    assert told.endswith("; 1 of 12 in the model's dtype, whose weights are trained")


def test_autocast_changes_no_code() -> None:
    """Weights are quantised in a forward, which trainers run under it."""
    weight, factors = torch.randn(64, 128).half(), torch.rand(128) + 0.5
    right = quantise_rotated(weight, factors)
    with torch.autocast("cpu", torch.float16):
        found = quantise_rotated(weight, factors)
    assert torch.equal(found.codes, right.codes) and torch.equal(found.scales, right.scales)


def test_integers_follow_what_is_merged_by_turns() -> None:
    """PEFT merges through `.data`, and there may be no packed forward between two merges."""
    model, batch = model_of(), packed_row(LENGTHS, ROW)
    model.add_adapter("second", model.peft_config["default"])
    second = [parameter for name, parameter in model.named_parameters() if "lora_B.second" in name]
    attached(model)
    for name, std in (("default", 0.0), ("second", 0.3), ("second", 0.6)):
        model.unmerge_adapter()
        with torch.no_grad():
            for parameter in second:
                parameter.normal_(0, std)
            model.merge_adapter([name])
            anew = copy.deepcopy(model)
            handle_of(anew).detach()
            attached(anew)
            assert model(**batch).loss == anew(**batch).loss


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "base"), BASES)
def test_on_a_gpu(family: str, base: str) -> None:
    model, found = model_of(family, base).cuda(), {}
    batch = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    for compute in ("dtype", COMPUTE):
        handle = attached(model, compute=compute, graph="off")
        found[compute] = loss_and_gradients(model, batch)
    coded = [linear for linear in handle.layers.linears() if linear.in_8_bits]
    assert coded and all(each.excess <= 1 for linear in coded for each in compared_products(linear, "p", fast=True))
    assert found[COMPUTE][0] == pytest.approx(found["dtype"][0], rel=0.01)
    for name, gradient in found["dtype"][1].items():
        pair = (each.double().flatten() for each in (found[COMPUTE][1][name], gradient))
        assert torch.nn.functional.cosine_similarity(*pair, 0) > 0.98, name
    attached(model, Policy.RECOMPUTE_LAYER, graph="off")
    assert same(loss_and_gradients(model, batch), found[COMPUTE])


@pytest.mark.parametrize(("family", "base"), [*BASES, ("glm4_moe", "nf4"), ("qwen3_5_moe_text", "nf4")])
def test_the_plan_counts_a_byte_a_product(family: str, base: str) -> None:
    model, batch = model_of(family, base), packed_row(LENGTHS, ROW)
    dims, handle = dims_of(model), attach(model, Plan.keep(), layers="fused")
    plain = resting_bytes(dims, setup_of(model, ROW, None))["weights"]
    handle = attached(model)
    loss_and_gradients(model, batch)
    setup, held = setup_of(model, ROW, None), sum(tensor.nbytes for tensor in integers(handle))
    assert setup.fp8 and setup.int8 and not setup.forward_in_fp8
    assert held == resting_bytes(dims, setup)["weights"] - plain
    if base != "nf4":
        return
    handle = attached(model, experimental={"written_out": "once"})
    loss_and_gradients(model, batch)
    sources = [
        each for linear in handle.layers.linears() for each in (linear.source, getattr(linear.source, "plain", None))
    ]
    held = sum(tensor.nbytes for tensor in integers(handle))  # none of shared experts, which transformers computes
    held += sum(each.storage.nbytes for each in sources if isinstance(each, DenseSource))
    assert held == resting_bytes(dims, setup_of(model, ROW, None))["weights"] - plain
    [told] = [path.path for path in handle.report if path.part == "products of frozen weights"]
    gates = {"qwen3_5_text": 14, "qwen3_5_moe_text": 8}.get(family)
    more = f"; 2 of {gates} in the model's dtype, whose weights are gates'" if gates else ""
    more += " (experts apart: their weights are in 4 bits)" if "moe" in family else ""
    assert told.endswith(f"values in the model's dtype, of weights written out once{more}")


def test_the_plan_times_products_rotated_rows_and_what_is_written_out() -> None:
    (layer, *_), h200 = dims_of_shape("Llama-3.1-8B").layers, device_spec("h200")
    qkv, *others = layer.groups
    rate, of_byte = _rates(INTEGERS, h200)
    times, plain = (_layer_times(layer, each, h200) for each in (INTEGERS, replace(INTEGERS, fp8=False, int8=False)))
    saved = [2 * 8192 * rate * (1 - INT8) * sum(each.weights for each in linears) for linears in (qkv, sum(others, ()))]
    rotated = [3 * 8192 * of_byte * sum(group[0].inputs for group in others)]
    rotated += [3 * 8192 * of_byte * sum(each.out for each in layer.linears)]
    assert times.forward == pytest.approx(plain.forward - saved[1] + rotated[0])
    assert times.backward == pytest.approx(plain.backward - sum(saved) + rotated[1])
    assert times.gate_up == pytest.approx(INT8 * plain.gate_up)
    # of 4 bits codes are written, by a kernel as slow as four bytes a code; of a packed checkpoint 16 bits are written
    # and read twice, and then codes
    for few, moved in (({"method": "qlora"}, 0.5 + 4), ({"linear_bytes": 1.0}, 1 + 5)):
        found = _layer_times(layer, replace(INTEGERS, **few), h200)
        for ours, kept in ((found.forward, times.forward), (found.backward, times.backward)):
            assert ours - kept == pytest.approx(moved * layer.linear_weights * of_byte)
        once = _layer_times(layer, replace(INTEGERS, **few, written_out="once"), h200)
        assert (once.forward, once.backward) == pytest.approx((times.forward, times.backward))


def test_integers_of_16_bits_are_kept_whatever_is_asked_of_codes_in_floats() -> None:
    for setup in (INTEGERS, replace(INTEGERS, codes="written"), replace(INTEGERS, method="qlora")):
        assert not setup.writes_codes
    assert replace(INTEGERS, unshared="whole").in_fp8 == replace(INTEGERS, int8=False, codes="written")
    packed = replace(INTEGERS, linear_bytes=1.0)  # whose codes in floats are kept
    assert packed.in_fp8 == replace(packed, int8=False)


@pytest.mark.parametrize(
    ("model", "problem", "remedy"),
    [
        (
            lambda: model_of(intermediate_size=96),
            "for weights of 64 x 96: .* multiples of 64",
            "use compute = 'fp8', or",
        ),
        (lambda: model_of(intermediate_size=88), "for weights of 88 x 64, 88 x 64: .* of 64", "leave compute out"),
        (lambda: model_of(base="nf4", intermediate_size=96), "multiples of 64", "leave compute out"),
        (
            lambda: model_of(intermediate_size=66_624),
            "for weights of 66624 x 64, .* and at most 133,120",
            "use compute =",
        ),
        (lambda: with_adapters(tiny_model("llama")), "for a model in float32", "load it in bfloat16"),
    ],
)
def test_what_has_no_integers_is_refused(model: Any, problem: str, remedy: str) -> None:
    """And `fp8` is named where it would do."""
    with pytest.raises(PronghornError, match=problem) as caught:
        attached(model())
    assert caught.value.remedy.startswith(remedy)


def test_fp8_is_not_named_where_the_card_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.layers.fused_linear.has_products", lambda compute, device: compute is Compute.INT8)
    with pytest.raises(PronghornError, match="multiples of 64") as caught:
        attached(model_of(intermediate_size=96))
    assert caught.value.remedy.startswith("leave compute out")


def test_other_choices_of_codes_are_refused_and_float16_needs_no_products_of_floats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(base="fp16")
    with pytest.raises(PronghornError, match="codes = 'written' needs compute = 'fp8', and compute is 'int8'"):
        attached(model, codes="written")

    def refuse(*operands: Any, **options: Any) -> None:
        raise ValueError("Only bf16 high precision output types are supported for row-wise scaling.")

    monkeypatch.setattr("pronghorn.precision.fp8.scaled_product", refuse)
    attached(model)
    loss_and_gradients(model, packed_row(LENGTHS, ROW))


def test_layers_that_processes_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PronghornError, match="processes share"):
        share_layers(model_of(), torch.device("cpu"), Compute.INT8)
    path = tmp_path / "recipe.yaml"
    sections = {
        "model": {"name": "owner/x", "max_seq_length": 64},
        "data": {"train": __file__},
        "train": {"output": "z"},
        "precision": {"compute": COMPUTE},
        "launch": {"strategy": "sharded"},
    }
    path.write_text(yaml.safe_dump(sections))
    with pytest.raises(PronghornError, match="one process holds whole"):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("compute", "capability", "remedy"),
    [
        ("int8", (7, 5), "leave compute out"),
        ("fp8", (7, 5), "leave compute out"),
        ("fp8", (8, 6), "use compute = 'int8'"),
    ],
)
def test_cards_without_such_products_are_refused(
    compute: str, capability: tuple[int, int], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    with pytest.raises(PronghornError, match=rf"or newer, and a card has {capability[0]}\.{capability[1]}") as caught:
        check_device(Compute.of(compute), torch.device("cuda"))
    assert caught.value.remedy.startswith(remedy)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_device(Compute.INT8, torch.device("cuda"))
