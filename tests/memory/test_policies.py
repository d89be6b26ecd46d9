"""Policies by layer: equal bits whatever is kept, recomputed or offloaded, on real models; put on and taken off."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pronghorn.api import FastLanguageModel
from pronghorn.errors import ConfigError, TrainingError, UnsupportedError
from pronghorn.memory.plan import POLICY, Plan, Policy
from pronghorn.memory.recompute import install
from pronghorn.models.attach import attach, attached
from pronghorn.models.families import base_causal_lm, recompute_layers, recomputes_layers
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, with_adapters
from support.tiny import packed_row, tiny_model
from support.traces import trace

KEEP, NORMS, MLP, LAYER, OFFLOAD = Policy
PLANS = {
    "recompute": Plan.recompute(),
    "MLP": Plan(policies=(MLP,)),
    "offload": Plan.offload(),
    "one buffer": Plan.offload(1),
    "offload first": Plan(policies=(OFFLOAD, KEEP, LAYER)),
    "offload around": Plan(policies=(OFFLOAD, MLP, OFFLOAD)),
    "offload one": Plan(policies=(KEEP, OFFLOAD, KEEP)),
}


def activations(handle: Any) -> tuple[str, str]:
    return next((path.path, path.why) for path in handle.report if path.part == "activations")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_5_text"])
def test_every_plan_gives_the_same_bits(family: str, full: bool) -> None:
    """Dropout's, too: what is recomputed draws the same numbers again."""
    model = tiny_model(family)
    model = model if full else with_adapters(model, lora_dropout=0.2)
    batch, found = packed_row(LENGTHS, ROW), {}
    for name, plan in ({"keep": Plan.keep()} | PLANS).items():
        attach(model, plan)
        torch.manual_seed(5)
        found[name] = loss_and_gradients(model, batch)
    loss, grads = found["keep"]
    for name, (again, same) in found.items():
        assert again == loss and all(torch.equal(grads[each], same[each]) for each in grads), name


@pytest.mark.parametrize("plan", [Plan.recompute(), Plan.offload()], ids=["recompute", "offload"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_fused_layers_are_recomputed_without_their_output(family: str, plan: Plan) -> None:
    """Nobody reads it: but for Gemma's norm after the product of down, whose backward does."""
    model, batch = with_adapters(tiny_model(family)), packed_row(LENGTHS, ROW)
    operations = {}
    for name, each in {"keep": Plan.keep(), "again": plan}.items():
        attach(model, each, layers="fused")
        forward, both = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with torch.no_grad(), forward:
            model.get_base_model().model(**{**batch, "labels": None})
        with both:
            model(**batch).loss.backward()
        operations[name] = both.get_total_flops()
    config = model.get_base_model().config
    down = 2 * ROW * config.hidden_size * config.intermediate_size * config.num_hidden_layers
    spared = 0 if family == "gemma3_text" else down
    more = operations["again"] - operations["keep"]
    assert more == pytest.approx(forward.get_total_flops() - spared, rel=1e-3)  # RoPE's angles aren't the layers'


def test_a_hook_on_a_layer_sees_what_was_computed_again() -> None:
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    attach(model, Plan.recompute(), layers="fused")
    seen: list[torch.Tensor] = []
    model.get_base_model().model.layers[1].register_forward_hook(lambda *given: seen.append(given[2].detach().clone()))
    model(**batch).loss.backward()
    assert all(torch.equal(each, seen[0]) for each in seen)  # transformers runs hooks again, or doesn't: by its version


@pytest.mark.parametrize("plan", [Plan.recompute(), Plan.offload()], ids=["recompute", "offload"])
def test_a_forward_of_its_own_computes_with_a_layers_output(plan: Plan) -> None:
    """By some versions of transformers it is recomputed with the layer."""
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    gate = torch.nn.Parameter(torch.full((64,), 1.5))
    found = []
    for each in (Plan.keep(), plan):
        attach(model, each, layers="fused")
        layer = model.get_base_model().model.layers[1]
        plain = layer.forward
        layer.forward = lambda *args, plain=plain, **kwargs: plain(*args, **kwargs) * gate
        found += torch.autograd.grad(model(**batch).loss, gate)
        del layer.forward
    assert found[0].any() and torch.equal(*found)


def test_what_else_is_recomputed_takes_keywords() -> None:
    model = tiny_model("llama")
    attach(model, Plan.recompute(), layers="fused")
    x = torch.ones(2, requires_grad=True)
    assert model.model._gradient_checkpointing_func(torch.mul, x, other=x).tolist() == [1, 1]


@pytest.mark.matrix(7)
@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("name", PLANS)
def test_detach_restores_and_evaluation_takes_the_plain_way(name: str, layers: Any) -> None:
    model, batch = with_adapters(tiny_model("qwen3")), packed_row(LENGTHS, ROW)
    base = model.get_base_model()
    recompute_layers(base, True)
    before, saved = trace(base), copy.deepcopy([layer._gradient_checkpointing_func for layer in base.model.layers])
    loss, _ = loss_and_gradients(model, batch)
    handle = attach(model, PLANS[name], layers=layers)
    engine = handle.offload_engine
    assert [layer.__dict__[POLICY] for layer in base.model.layers] == list(PLANS[name].by_layer(3))
    with torch.no_grad():
        model(**batch)
    model.eval()(**batch)
    assert engine is None or engine.host_bytes == 0
    model.train()(**batch).loss.backward()
    assert recomputes_layers(base)
    handle.detach()
    assert (trace(base) == before and engine is None) or engine.host_bytes == 0
    assert str([layer._gradient_checkpointing_func for layer in base.model.layers]) == str(saved)
    assert loss_and_gradients(model, batch)[0] == loss


@pytest.mark.parametrize("plan", [Plan.keep(), Plan.offload(), PLANS["offload around"]], ids=str)
def test_a_plan_survives_what_trainers_do(plan: Plan) -> None:
    """Trainer switches checkpointing on again when training starts; TRL off and on around generation."""
    model = with_adapters(tiny_model("llama"))
    base, batch = model.get_base_model(), packed_row(LENGTHS, ROW)
    handle = attach(model, plan)
    told, planned = activations(handle), [layer.gradient_checkpointing for layer in base.model.layers]
    functions = [layer._gradient_checkpointing_func for layer in base.model.layers]
    kind = "activation" if hasattr(base, "activation_checkpointing_enable") else "gradient"
    for _ in range(2):
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
        assert [layer.gradient_checkpointing for layer in base.model.layers] == planned
        assert [layer._gradient_checkpointing_func for layer in base.model.layers] == functions
        assert activations(handle)[0] == told[0]
        getattr(model, f"{kind}_checkpointing_disable")()
        assert not any(layer.gradient_checkpointing for layer in base.model.layers)
        model(**batch).loss.backward()
        engine = handle.offload_engine
        assert engine is None or engine.host_bytes == 0
    if plan.policies != (KEEP,):
        assert activations(handle)[1] == "gradient checkpointing was switched off"


def test_reports_tell_counts_buffers_and_memory() -> None:
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    handle = attach(model, PLANS["offload around"])
    model(**batch).loss.backward()
    counts = "2 of 3 layers: recompute with the input offloaded; 1 of 3 layers: recompute the MLP"
    assert activations(handle) == (counts, "two buffers, host memory")
    assert activations(attach(model, Plan.offload(1))) == ("recompute with the input offloaded", "one buffer")
    assert activations(attach(model, Plan.keep())) == ("keep", "the plan")


def test_memory_goes_back_when_the_plan_changes() -> None:
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    engine = attach(model, Plan.offload()).offload_engine
    model(**batch).loss.backward()
    assert engine.host_bytes > 0
    attach(model, Plan.recompute())
    assert engine.host_bytes == 0


def test_a_copied_model_is_a_model_of_its_own() -> None:
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    base = model.get_base_model()
    install(base, base.model.layers, PLANS["offload around"])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    batch = {name: batch[name] for name in ("input_ids", "labels")}
    loss, grads = loss_and_gradients(twin, batch)
    recompute = copy.deepcopy(twin)
    recompute.get_base_model()._pronghorn_installed.uninstall()
    assert loss_and_gradients(recompute, batch)[0] == loss
    engines = [each.get_base_model()._pronghorn_installed.engine for each in (model, twin)]
    assert engines[0].host_bytes == 0 < engines[1].host_bytes and grads


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(policies=(NORMS,)), "'recompute the norms' needs fused layers"),
        (Plan(policies=(KEEP, MLP)), "2 policies for a model of 3 layers"),
    ],
)
def test_plans_that_cannot_be_followed_change_nothing(plan: Plan, message: str) -> None:
    model = tiny_model("llama")
    before = trace(model)
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        attach(model, plan, layers="stock")
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        install(model, model.model.layers, plan)
    assert trace(model) == before


def test_an_mlp_whose_forward_was_replaced_is_not_replaced_again() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(UnsupportedError, match=r"LlamaDecoderLayer\.mlp was replaced"):
        attach(model, Plan(policies=(MLP,)))


def test_a_planned_mlp_is_not_taken_for_a_replaced_one() -> None:
    model = tiny_model("llama")
    handle = attach(model, Plan(policies=(MLP,)))
    assert handle.replan(Plan(policies=(MLP, KEEP, LAYER))).plan.policies == (MLP, KEEP, LAYER)  # type: ignore[union-attr]


@pytest.mark.parametrize("why", ["dropout", "padded"])
def test_fused_layers_that_go_the_plain_way_recompute_their_mlps_and_say_what_they_keep(why: str) -> None:
    model = with_adapters(tiny_model("llama"), lora_dropout=0.1 if why == "dropout" else 0.0)
    batch = packed_row(LENGTHS, ROW)
    if why == "padded":
        batch = {name: batch[name] for name in ("input_ids", "labels")}
    handle = attach(model, Plan(policies=(MLP, NORMS, KEEP)), layers="fused")
    runs = [0, 0, 0]
    for index, layer in enumerate(model.get_base_model().model.layers):
        projection = layer.mlp.gate_proj.base_layer
        projection.register_forward_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
    model(**batch).loss.backward()
    assert runs == [2, 1, 1]
    if why == "dropout":
        counts = "1 of 3 layers: recompute the MLP; 2 of 3 layers: keep"
        assert activations(handle) == (counts, "LoRA dropout")


def test_buffers_are_one_or_two() -> None:
    with pytest.raises(ConfigError, match="buffers = 3: use 2, or 1"):
        Plan.offload(3)


@pytest.mark.parametrize("packing", [True, False], ids=["attached", "plain"])
def test_the_switch(stories: Path, packing: bool) -> None:
    """`use_gradient_checkpointing` by all its values, one after the other, on one model."""
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, packing=packing)
    base = base_causal_lm(model)
    assert recomputes_layers(model) and (attached(model) is not None) == packing
    for value, policy in ((False, KEEP), ("offload", OFFLOAD), (True, LAYER), ("unsloth", OFFLOAD), ("auto", LAYER)):
        FastLanguageModel.for_training(model, use_gradient_checkpointing=value)  # type: ignore[arg-type]
        assert recomputes_layers(model) == (policy is not KEEP)
        if packing:
            assert attached(model).plan.policies == (policy,)  # type: ignore[union-attr]
        assert ("_pronghorn_installed" in base.__dict__) == (packing or policy is OFFLOAD)
        ids = torch.arange(3, 35)[None]
        model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(ConfigError, match="use_gradient_checkpointing = 1 is unknown"):
        FastLanguageModel.for_training(model, use_gradient_checkpointing=1)  # type: ignore[arg-type]


EQUAL_BITS = """
import sys, torch
sys.path[:0] = sys.argv[1:]
torch.use_deterministic_algorithms(True, warn_only=True)
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach
from support.fused import loss_and_gradients, with_adapters
from support.documents import LENGTHS, ROW
from support.tiny import packed_row, tiny_model
for layers in ("stock", "fused"):
    model = with_adapters(tiny_model("qwen3", num_hidden_layers=6))
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    model.to("cuda")
    batch = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    found = {}
    for plan in (Plan.recompute(), Plan.offload(), Plan.offload(1), Plan(policies=(Policy.OFFLOAD, Policy.KEEP) * 3)):
        with torch.autocast("cuda", torch.bfloat16, enabled=layers == "stock"):
            attach(model, plan, layers=layers, graph="off")
            found[plan.policies, plan.buffers] = loss_and_gradients(model, batch)
    (loss, grads), *others = found.values()
    for again, same in others:
        assert again == loss and all(torch.equal(grads[name], same[name]) for name in grads)
"""


@pytest.mark.gpu
def test_every_plan_gives_the_same_bits_on_a_gpu() -> None:
    """In a process of its own: deterministic algorithms stay on."""
    import os
    import subprocess
    import sys

    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    subprocess.run([sys.executable, "-c", EQUAL_BITS, *sys.path], check=True, env=environment, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["offload", "offload around", "one buffer"])
def test_a_planned_step_never_synchronises(name: str) -> None:
    model = with_adapters(tiny_model("llama").to("cuda", torch.bfloat16))
    attach(model, PLANS[name], graph="off")
    batch = {key: value.to("cuda") for key, value in packed_row(LENGTHS, ROW).items()}
    for _ in range(2):
        model(**batch).loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("policy", [Policy.KEEP, Policy.RECOMPUTE_MLP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD])
def test_adapters_that_are_switched_before_the_backward_give_their_own_gradients_or_an_error(
    policy: Policy, layers: Any
) -> None:
    """Never the gradients of something that was not computed."""
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    model.add_adapter("second", model.peft_config["default"])
    trained = [p for name, p in model.named_parameters() if "lora_B.default" in name]
    attach(model, Plan(policies=(policy,)), layers=layers)
    expected = torch.autograd.grad(model(**batch).loss, trained)
    loss = model(**batch).loss
    model.set_adapter("second")
    with torch.no_grad():
        model(**batch)
    for parameter in trained:
        parameter.requires_grad_(True)  # PEFT freezes what is off
    try:
        found = torch.autograd.grad(loss, trained)
    except TrainingError as error:
        assert policy is not Policy.KEEP and "switched" in str(error)
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("policy", [Policy.RECOMPUTE_LAYER, Policy.OFFLOAD])
def test_a_forward_without_adapters_may_come_before_a_recomputing_backward(policy: Policy, layers: Any) -> None:
    """As in preference training, whose reference is the model with its adapters off."""
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    attach(model, Plan(policies=(policy,)), layers=layers)
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    expected = torch.autograd.grad(model(**batch).loss, trained)
    loss = model(**batch).loss
    with torch.no_grad(), model.disable_adapter():
        model(**batch)
    torch.testing.assert_close(torch.autograd.grad(loss, trained), expected)


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("name", ["recompute", "offload first", "offload one"])
def test_generate_in_training_mode_has_its_cache(name: str, layers: Any) -> None:
    """transformers gives layers that recompute none: tokens were made of the last one alone, or shapes didn't fit."""
    model = with_adapters(tiny_model("llama"))
    ids = torch.randint(3, 131, (2, 14), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
    expected = model.generate(**given)
    attach(model, PLANS[name], layers=layers)
    for _ in range(2):  # before a step and after it
        assert torch.equal(model.generate(**given), expected)
        assert recomputes_layers(model)
        loss_and_gradients(model, packed_row(LENGTHS, ROW))
    with pytest.raises(ValueError):
        model.generate(**given | {"max_new_tokens": -1})
    assert recomputes_layers(model)
