"""`compute="int8"`: frozen linears multiply in 8-bit integers of turned rows, q, k and v forward in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pronghorn.config.recipe import Recipe
from pronghorn.diagnose.verify_checks import verify
from pronghorn.diagnose.verify_report import Name
from pronghorn.errors import PronghornError
from pronghorn.loading.share import share_layers
from pronghorn.memory.estimate import resting_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.parity.quantised import compared_products, quantised_products
from pronghorn.precision.compute import Compute, Numbers
from pronghorn.precision.int8 import Int8Source, TurnedWeight, WrittenInt8Source
from pronghorn.precision.source import Activation, DenseSource, LowRankGrad
from support.documents import LENGTHS, ROW, gradients, one_document_at_a_time
from support.fused import loss_and_gradients, with_adapters
from support.tiny import in_4_bits, packed_row, tiny_model

COMPUTE: Any = "int8"
FAMILIES = ("llama", "gemma3_text", "qwen3_5_text", "phi3")


def model_of(family: str = "llama", **sizes: Any) -> Any:
    return with_adapters(tiny_model(family, **{"intermediate_size": 128, **sizes}).bfloat16())


def attached(model: Any, policy: Policy = Policy.KEEP) -> Any:
    return attach(model, Plan((policy,)), layers="fused", compute=COMPUTE)


def test_both_products_are_those_of_the_integers() -> None:
    torch.manual_seed(0)
    x, dy, weight = torch.randn(7, 128).bfloat16(), torch.randn(7, 64).bfloat16(), torch.randn(64, 128).bfloat16()
    x[2] *= 100
    weight[:, 5] *= 50
    for given, across, exact in (
        (x, False, x.double() @ weight.double().t()),
        (dy, True, dy.double() @ weight.double()),
    ):
        source = Int8Source(TurnedWeight.of([weight[:32], weight[32:]], across, torch.bfloat16))
        found = source.input_grad(Activation(given), None) if across else source.forward(Activation(given), None)
        assert 1e-4 < (found - exact).norm() / exact.norm() < 0.015
    low = LowRankGrad(torch.randn(7, 4).bfloat16(), torch.randn(4, 128).bfloat16(), None)
    added = source.input_grad(Activation(dy), low).double()
    assert ((added - found.double() - low.dya.double() @ low.a.double()).abs() <= added.abs() * 2**-7 + 0.1).all()
    assert torch.equal(
        Int8Source(TurnedWeight.of([weight], False, torch.bfloat16)).forward(Activation(x * 0), None),
        x.new_zeros(7, 64),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_same_operands(family: str) -> None:
    model, batch = model_of(family), packed_row(LENGTHS, ROW)
    handle = attached(model)
    loss, found = loss_and_gradients(model, batch)
    coded = [linear for linear in handle.layers.linears() if linear.in_fp8]
    products = handle.layers.fp8_products(torch.bfloat16)
    layers = handle.layers.backbone.layers
    gates = sum(hasattr(layer, "linear_attn") for layer in layers)  # of delta nets: their a and b
    assert len(coded) == len(products) == len(handle.layers.linears()) - gates == 4 * len(layers)
    assert [rule.backward for _, rule in products] == [Numbers.INT8] * len(coded)
    assert [rule.forward for _, rule in products[:4]] == [Numbers.DTYPE, *[Numbers.INT8] * 3]
    for linear in coded:
        compared = compared_products(linear, "product", fast=True)
        both = linear.rule.forward is Numbers.INT8
        assert [each.name for each in compared] == ["product (forward)"] * both + ["product (input gradient)"]
        assert all(each.excess <= 1 for each in compared)
    handle.detach()
    with quantised_products(products):
        _, right = one_document_at_a_time(model, batch)
        right.backward()
    assert loss == pytest.approx(right.item(), rel=0.01)
    for name, gradient in gradients(model).items():
        cosine = torch.nn.functional.cosine_similarity(found[name].double().flatten(), gradient.double().flatten(), 0)
        assert cosine > 0.99, (name, cosine)


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
        want = TurnedWeight.of(few, across, torch.bfloat16)
        source = WrittenInt8Source(few, [64, 128], want._replace(codes=None), across)
        assert torch.equal(source.codes(), want.codes)
        x = torch.randn(5, 192).bfloat16()
        assert torch.equal(source.forward(Activation(x), None), Int8Source(want).forward(Activation(x), None))


@pytest.mark.parametrize("once", [False, True])
def test_a_model_in_4_bits_multiplies_integers(once: bool) -> None:
    model = with_adapters(in_4_bits(tiny_model("llama", intermediate_size=128).bfloat16()))
    batch, dims = packed_row(LENGTHS, ROW), dims_of(model)
    attach(model, Plan.keep(), layers="fused")
    plain = resting_bytes(dims, setup_of(model, ROW, None))["weights"]
    handle = attach(model, replace(Plan.keep(), written_once=once), layers="fused", compute=COMPUTE)
    loss, found = loss_and_gradients(model, batch)
    held, products = 0, handle.layers.fp8_products(torch.bfloat16)
    for linear in handle.layers.linears():
        sources = [each for each in (linear.source.plain, linear.source.coded) if isinstance(each, Int8Source)]
        assert [each.weight.codes is None for each in sources] == [not once] * len(sources)
        assert all(each.excess <= 1 for each in compared_products(linear, "product", fast=True))
        held += sum(tensor.nbytes for each in sources for tensor in each.weight if tensor is not None)
        held += sum(tensor.nbytes for each in sources for tensor in getattr(each, "_inverse", ()))
        if once and isinstance(linear.source.plain, DenseSource):
            held += linear.source.plain.storage.nbytes
    setup = replace(setup_of(model, ROW, None), written_out="once" if once else "each")
    assert held == resting_bytes(dims, setup)["weights"] - plain > 0
    assert setup.writes_forward is setup.writes_backward is not once
    handle.detach()
    with quantised_products(products):
        _, right = one_document_at_a_time(model, batch)
        right.backward()
    assert loss == pytest.approx(right.item(), rel=0.01)
    for name, gradient in gradients(model).items():
        cosine = torch.nn.functional.cosine_similarity(found[name].double().flatten(), gradient.double().flatten(), 0)
        assert cosine > 0.99, (name, cosine)


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
def test_a_policy_changes_no_bit(policy: Policy) -> None:
    model, batch = model_of(), packed_row(LENGTHS, ROW)
    attached(model)
    loss, kept = loss_and_gradients(model, batch)
    attached(model, policy)
    again, other = loss_and_gradients(model, batch)
    assert again == loss and all(torch.equal(other[name], gradient) for name, gradient in kept.items())


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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_judges_it_and_sees_a_wrong_factor(family: str) -> None:
    from test_verify_fp8 import failed, planted, product, subject_of

    subject = subject_of(family, compute=COMPUTE)
    assert failed(verify(subject)) == set()

    def wrong(model: Any) -> None:
        source = product(model, 1, "mlp.down_proj").source
        source.coded.weight.scales[3] *= 1.5

    assert Name.PRODUCTS in failed(planted(subject, wrong))


def test_the_plan_counts_a_byte_a_product() -> None:
    model = model_of()
    dims, handle = dims_of(model), attach(model, Plan.keep(), layers="fused")
    plain = resting_bytes(dims, setup_of(model, ROW, None))["weights"]
    handle = attached(model)
    loss_and_gradients(model, packed_row(LENGTHS, ROW))
    setup, held = setup_of(model, ROW, None), 0
    assert setup.fp8 and setup.int8 and not setup.forward_in_fp8
    for linear in handle.layers.linears():
        sources = [each for each in (linear.source.plain, linear.source.coded) if isinstance(each, Int8Source)]
        held += sum(tensor.nbytes for each in sources for tensor in each.weight)
    assert held == resting_bytes(dims, setup)["weights"] - plain


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (lambda: model_of(intermediate_size=96), "multiples of 64"),
    ],
)
def test_what_has_no_integers_is_refused(model: Any, problem: str) -> None:
    with pytest.raises(PronghornError, match=problem) as caught:
        attached(model())
    assert "use compute = 'fp8'" in caught.value.remedy


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
