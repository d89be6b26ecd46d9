"""Products in 8 bits: exact on what they are given, and layers whose frozen weights multiply so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.errors import PronghornError
from pronghorn.kernels.nf4 import NF4Weight, write_out
from pronghorn.kernels.quantise import quantise_rows
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import LayerBytes, TrainSetup, resting_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.step_time import step_times
from pronghorn.models.attach import attach, attached
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.lora import add_lora
from pronghorn.precision.fp8 import FP8Source, FP8Weight, WrittenCodesSource
from pronghorn.precision.source import Activation, LowRankGrad
from support.documents import LENGTHS, ROW, gradients
from support.tiny import in_4_bits, packed_row, tiny_model


def sources() -> list[tuple[str, Any, torch.Tensor]]:
    """Each kind of source with the weight that it stands for, in float64."""
    weights = [torch.randn(32, 64) * 0.02, torch.randn(16, 64)]
    dense = FP8Weight.of(weights)
    packed = [Params4bit(weight, quant_type="nf4").to("cpu") for weight in weights]
    written = [torch.empty(weight.shape) for weight in weights]
    for weight, out in zip(packed, written, strict=True):
        write_out(NF4Weight.of(weight), out)
    from_four = WrittenCodesSource(packed, True)
    codes = from_four.codes(False).double()
    assert torch.equal(from_four.codes(True).double(), codes.t())
    meant = codes * from_four._scales.double()[:, None]
    assert ((meant - torch.cat(written)).abs() <= torch.cat(written).abs() * 2**-4 + 1e-4).all()
    return [("resident", FP8Source(dense, True), dense.dequantise().double()), ("from NF4", from_four, meant)]


@pytest.mark.parametrize("index", [0, 1])
def test_products_are_exact_on_their_operands(index: int) -> None:
    _, source, weight = sources()[index]
    x, dy = torch.randn(7, 64).bfloat16(), torch.randn(7, 48).bfloat16()
    codes, scales = quantise_rows(x)
    bias = torch.randn(48).bfloat16()
    exact = (codes.double() * scales.double()) @ weight.t()
    assert ((source.forward(Activation(x), None).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert torch.equal(source.forward(Activation(x), bias), source.forward(Activation(x), None) + bias)
    assert torch.equal(source.forward(Activation(x, quantise_rows(x)), None), source.forward(Activation(x), None))

    by_columns = source.columns.float()
    codes, scales = quantise_rows(dy, by_columns)
    exact = (codes.double() * scales.double()) @ (weight / by_columns.double()[:, None])
    got = source.input_grad(Activation(dy), None)
    assert torch.equal(got, source.input_grad(Activation(dy, quantise_rows(dy, source.columns)), None))
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()
    given = LowRankGrad(torch.randn(7, 4).bfloat16(), torch.randn(4, 64).bfloat16(), None)
    added = source.input_grad(Activation(dy), given).double()
    assert ((added - exact - given.dya.double() @ given.a.double()).abs() <= added.abs() * 2**-7 + 0.05).all()


def adapted(family: str) -> Any:
    model = add_lora(tiny_model(family, intermediate_size=96).bfloat16(), r=4, lora_alpha=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return model.train()


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    return packed_row(LENGTHS, ROW)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_layers_learn_nearly_what_bf16_learns(family: str, batch: dict[str, Any]) -> None:
    model, found = adapted(family), {}
    for compute in ("dtype", "fp8_both"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found[compute] = loss.item(), {name: grad.double() for name, grad in gradients(model).items()}
        in_8_bits, products = handle.layers.in_8_bits()
        assert products and in_8_bits == (0 if compute == "dtype" else products)
        told = [path.path for path in handle.report if path.part == "products of frozen weights"]
        assert [text.split(",")[0] for text in told] == ([] if compute == "dtype" else ["FP8 by rows"])
    assert found["fp8_both"][0] != found["dtype"][0]
    assert found["fp8_both"][0] == pytest.approx(found["dtype"][0], rel=0.05)
    cosines = {
        name: torch.nn.functional.cosine_similarity(grad.flatten(), found["dtype"][1][name].flatten(), 0).item()
        for name, grad in found["fp8_both"][1].items()
    }
    assert min(cosines.values()) > 0.9, min(cosines.items(), key=lambda item: item[1])


def test_documents_stay_apart(batch: dict[str, Any]) -> None:
    """Scales are a row's own: no document's numbers depend on another's."""
    model = adapted("llama")
    attach(model, Plan.keep(), layers="fused", compute="fp8_both")
    other = dict(batch)
    first = sum(LENGTHS[:2])
    other["input_ids"] = batch["input_ids"].clone()
    other["input_ids"][0, first:] = 7
    with torch.no_grad():
        logits = [model(**{k: v for k, v in row.items() if k != "labels"}).logits[0] for row in (batch, other)]
    assert torch.equal(logits[0][:first], logits[1][:first]) and not torch.equal(*logits)


def test_codes_follow_the_weights(batch: dict[str, Any]) -> None:
    model = adapted("llama")
    attach(model, Plan.keep(), layers="fused", compute="fp8_both")

    def loss() -> float:
        with torch.no_grad():
            return model(**batch).loss.item()

    before = loss()
    with model.disable_adapter():
        assert loss() != before
    assert loss() == before
    weight = model.model.model.layers[1].mlp.down_proj.base_layer.weight
    with torch.no_grad():
        weight.mul_(2.0)
    after = loss()
    assert after != before
    with torch.no_grad():
        weight.mul_(0.5)
    assert loss() == before
    merged_before = loss()
    model.merge_adapter()
    assert loss() == pytest.approx(merged_before, rel=0.05)
    model.unmerge_adapter()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_codes_follow_what_is_merged_by_turns(family: str, batch: dict[str, Any]) -> None:
    """PEFT merges through `.data`, and there may be no packed forward between two merges."""
    model = adapted(family)
    model.add_adapter("second", model.peft_config["default"])
    second = [parameter for name, parameter in model.named_parameters() if "lora_B.second" in name]
    attach(model, Plan.keep(), layers="fused", compute="fp8_both")

    def losses() -> tuple[float, float]:
        """With the codes that there are, and with all of them made anew."""
        anew = copy.deepcopy(model)
        attached(anew).detach()
        attach(anew, Plan.keep(), layers="fused", compute="fp8_both")
        with torch.no_grad():
            return model(**batch).loss.item(), anew(**batch).loss.item()

    before = losses()[0]
    for name, std in (("default", 0.0), ("second", 0.3), ("second", 0.6)):
        model.unmerge_adapter()
        with torch.no_grad():
            for parameter in second:
                parameter.normal_(0, std)
        model.merge_adapter([name])
        found, anew = losses()
        assert found == anew != before
        before = found


@pytest.mark.parametrize(
    ("changes", "options", "problem"),
    [
        ({}, {"layers": "stock", "compute": "fp8_both"}, "needs fused layers"),
        ({}, {"layers": "fused", "compute": "fp4"}, "compute 'fp4' is unknown"),
        (
            {"intermediate_size": 88},
            {"layers": "fused", "compute": "fp8_both"},
            "for weights of 88 x 64, 88 x 64: .* 16: ",
        ),
        ({"dtype": torch.float32}, {"layers": "fused", "compute": "fp8_both"}, "for a model in float32"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_changes(
    changes: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    dtype = changes.pop("dtype", torch.bfloat16)
    model = tiny_model("llama", **{"intermediate_size": 96, **changes}).to(dtype)
    before = type(model), type(model.model.layers[0])
    with pytest.raises(PronghornError, match=problem):
        attach(model, Plan.keep(), **options)
    assert (type(model), type(model.model.layers[0])) == before


def test_weights_in_4_bits_are_told_what_rows_they_need() -> None:
    pytest.importorskip("bitsandbytes")
    model = in_4_bits(tiny_model("llama", intermediate_size=96).bfloat16())
    needed = "64 x 96: sizes must be multiples of 16, and rows whole 4-bit blocks of 64 weights: leave"
    with pytest.raises(PronghornError, match=needed):
        attach(model, Plan.keep(), layers="fused", compute="fp8")


def test_float16_is_refused_where_products_give_bfloat16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def bfloat16_only(*operands: Any, **options: Any) -> None:
        raise ValueError("Only bf16 high precision output types are supported for row-wise scaling.\nMore.")

    attach(tiny_model("llama", intermediate_size=96).half(), Plan.keep(), layers="fused", compute="fp8_both")
    monkeypatch.setattr("pronghorn.precision.fp8.scaled_product", bfloat16_only)
    model = tiny_model("llama", intermediate_size=96).half()
    with pytest.raises(PronghornError, match=r"for a model in float16: Only bf16 .* row-wise scaling: load"):
        attach(model, Plan.keep(), layers="fused", compute="fp8_both")
    attach(model.bfloat16(), Plan.keep(), layers="fused", compute="fp8_both")


def test_the_plan_counts_codes() -> None:
    """Two bytes a weight over bf16, and less time; over NF4 no byte that counts."""
    model, setups = adapted("llama"), {}
    for compute in ("dtype", "fp8_both"):
        attach(model, Plan.keep(), layers="fused", compute=compute)
        setups[compute] = setup_of(model, 8192)
    assert (setups["dtype"].fp8, setups["fp8_both"].fp8, setups["fp8_both"].graph) == (False, True, True)
    config = AutoConfig.for_model("llama", num_hidden_layers=4, hidden_size=4096, intermediate_size=14336)
    with torch.device("meta"):
        dims = dims_of(AutoModelForCausalLM.from_config(config))
    weights = sum(layer.linear_weights for layer in dims.layers)
    for method, more in (("lora", 2 * weights), ("qlora", 0)):
        plain, fp8 = (TrainSetup(8192, method=method, fp8=fp8) for fp8 in (False, True))
        grown = resting_bytes(dims, fp8)["weights"] - resting_bytes(dims, plain)["weights"]
        assert 0 < grown - more < 0.01 * weights
        times = [step_times(dims, setup, device_spec("h200")).step([Policy.KEEP] * 4) for setup in (plain, fp8)]
        assert 0.6 < times[1] / times[0] < 0.75
    working = [LayerBytes.of(dims.layers[0], TrainSetup(8192, fp8=fp8)).working for fp8 in (False, True)]
    # d(gate·up)'s while the activation is still there; down's operand needs no copy with LoRA's part beside it
    assert working[1] - working[0] == 2 * 8192 * (14336 - 4096)


def test_blocks_that_are_not_fused_are_told(batch: dict[str, Any]) -> None:
    """They multiply in the model's dtype, and the plan doesn't count codes for them."""
    model = add_lora(tiny_model("llama", intermediate_size=96).bfloat16(), r=4, lora_dropout=0.1)
    handle = attach(model.train(), Plan.keep(), layers="fused", compute="fp8_both")
    model(**batch).loss.backward()
    [path] = [path for path in handle.report if path.part == "products of frozen weights"]
    assert path.path.startswith("the model's dtype in blocks that aren't fused") and path.why == "LoRA dropout"
    assert handle.layers.in_8_bits() == (0, 0) and not setup_of(model, 512).fp8
