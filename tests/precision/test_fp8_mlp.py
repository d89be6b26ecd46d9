"""`fp8_mlp`: MLPs and experts multiply in 8 bits, and what mixes tokens in the model's dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import TrainSetup, resting_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.step_time import step_times
from pronghorn.memory.strategies import Strategy, choose
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.families import base_causal_lm
from pronghorn.precision.fp8 import as_codes
from pronghorn.precision.source import DenseSource
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, with_adapters
from support.tiny import SIZES_IN_8_BITS, in_4_bits, packed_row, tiny_model


def model_of(family: str, base: str = "bf16") -> Any:
    model = tiny_model(family, intermediate_size=128, **SIZES_IN_8_BITS.get(family, {})).bfloat16()
    return with_adapters(in_4_bits(model) if base == "nf4" else model)


def error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    pairs = [(found[name].double(), value.double()) for name, value in right.items()]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


@pytest.mark.parametrize(
    ("family", "base"),
    [
        *((each, "bf16") for each in ("llama", "gemma3_text", "qwen3_5_text", "gemma4_text", "qwen3_moe")),
        ("llama", "nf4"),
    ],
)
def test_what_is_in_8_bits(family: str, base: str) -> None:
    model, batch, found = model_of(family, base), packed_row(LENGTHS, ROW), {}
    for compute in ("dtype", "fp8", "fp8_mlp"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute)
        found[compute] = loss_and_gradients(model, batch)[1]
    names = {module: name for name, module in base_causal_lm(model).named_modules()}
    for linear in handle.layers.linears():
        of_mlp = ".mlp." in names[linear.bases[0]]
        assert linear.in_fp8 is of_mlp
        assert of_mlp or base == "nf4" or isinstance(linear.source, DenseSource)  # merged as without 8 bits
    [told] = [path.path for path in handle.report if path.part == "products of frozen weights"]
    coded, products = handle.layers.in_fp8()
    assert f"; {products - coded} of {products} in the model's dtype, outside MLPs" in told
    assert ("experts too" in told) is (family == "qwen3_moe")
    if family != "qwen3_moe":  # where rounding may send a token to other experts
        assert 0 < error(found["fp8_mlp"], found["dtype"]) < error(found["fp8"], found["dtype"])


def test_the_plan_counts_mlps_alone() -> None:
    setups = {}
    for compute in ("fp8", "fp8_mlp"):
        model = model_of("llama")
        attach(model, Plan.keep(), layers="fused", compute=compute)
        setups[compute] = setup_of(model, 8192)
    assert [(each.fp8, each.fp8_mixers) for each in setups.values()] == [(True, True), (True, False)]
    config = AutoConfig.for_model("llama", num_hidden_layers=4, hidden_size=4096, intermediate_size=14336)
    with torch.device("meta"):
        dims = dims_of(AutoModelForCausalLM.from_config(config))
    mlp = 4 * 3 * 4096 * 14336
    for method, more in (("lora", 2 * mlp), ("qlora", 0)):
        plain, of_mlp, every = (
            TrainSetup(8192, method=method, fp8=fp8, fp8_mixers=mixers)
            for fp8, mixers in ((False, True), (True, False), (True, True))
        )
        grown = resting_bytes(dims, of_mlp)["weights"] - resting_bytes(dims, plain)["weights"]
        assert 0 < grown - more < 0.01 * mlp
        times = [step_times(dims, each, device_spec("h200")).step([Policy.KEEP] * 4) for each in (every, of_mlp, plain)]
        assert times[0] < times[1] < times[2]


def test_processes_that_share_layers_keep_attention_in_16_bits() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=4, hidden_size=4096, intermediate_size=14336)
    with torch.device("meta"):
        dims = dims_of(AutoModelForCausalLM.from_config(config))
    attention = sum(layer.linear_weights - 3 * 4096 * 14336 for layer in dims.layers)
    every, of_mlp = (
        choose(dims, TrainSetup(2048, fp8=True, fp8_mixers=mixers), device_spec("h200"), 2, strategy=Strategy.SHARDED)
        for mixers in (True, False)
    )
    grown = of_mlp.chosen.plan.predicted["weights"] - every.chosen.plan.predicted["weights"]
    assert grown == pytest.approx(attention / 2, rel=0.05)  # one byte a number more, half of it here


def test_codes_of_mlps_alone_leave_attention_as_it_is() -> None:
    """As of shared layers, which keep no more of an MLP."""
    model = model_of("llama")
    for name, linear in base_causal_lm(model).named_modules():
        if name.endswith(".base_layer") and ".mlp." in name:
            linear.weight = torch.nn.Parameter(as_codes(linear.weight, torch.device("cpu")), requires_grad=False)
    handle = attach(model, Plan.keep(), layers="fused", compute="fp8_mlp")
    loss_and_gradients(model, packed_row(LENGTHS, ROW))
    setup = setup_of(model, 8192)
    assert setup.own_codes and setup.fp8 and not setup.fp8_mixers
    [told] = [path.path for path in handle.report if path.part == "products of frozen weights"]
    assert "the stored codes; 6 of 12 in the model's dtype, outside MLPs" in told
