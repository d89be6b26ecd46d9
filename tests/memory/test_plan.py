"""The planner: bytes against what autograd saves and the allocator saw, choices against brute force, the command."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.data.batch import PackedBatch
from pronghorn.diagnose.shapes import SHAPES, write_checkpoint
from pronghorn.diagnose.shapes import shape_of as fields_of
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.families.qwen3_5 import MIXER_LINEARS
from pronghorn.families.qwen3_next import QWEN3_NEXT
from pronghorn.kernels import linear_cross_entropy
from pronghorn.memory.devices import DeviceSpec, device_spec, parse_bytes
from pronghorn.memory.estimate import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    GIB,
    LayerBytes,
    MemoryModel,
    TrainSetup,
    resting_bytes,
    rule_bytes,
    stored_bytes,
    working_bytes,
)
from pronghorn.memory.plan import Plan, Policy, followed
from pronghorn.memory.planner import SPARE, Frontier, PlanDoesNotFit, plan, plans_of
from pronghorn.memory.step_time import LayerTimes, StepTimes, step_times
from pronghorn.models import auto_plan, loss
from pronghorn.models.attach import attach, attached
from pronghorn.models.auto_plan import cuda_device_spec, dims_of, measured_times, plan_for, setup_of
from pronghorn.models.families import base_causal_lm
from pronghorn.models.lora import add_lora
from pronghorn.train.prepared_model import resolve_plan
from pronghorn.train.weightless import skeleton
from support.allocations import Allocations
from support.processes import together
from support.saved import TOKENS, saved_bytes
from support.tiny import DELTA_FAMILIES, FAMILIES, packed_row, tiny_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RANK = 4


def config_of(name: str) -> Any:
    from transformers import AutoConfig

    fields = fields_of(name)
    assert fields is not None
    return AutoConfig.for_model(**fields)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.matrix(13)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layers", ["stock", "fused", "padded"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in DELTA_FAMILIES])
def test_a_layer_saves_what_the_formula_says(family: str, layers: str, dtype: torch.dtype) -> None:
    """Exactly: a model of three layers against one of two. Stock is transformers' own SDPA, which is as on CUDA."""
    if family == "gemma3_text" and layers != "fused":
        pytest.skip("its norms save 1 + weight, too, which no token multiplies")
    if family.startswith("gemma4"):
        pytest.skip("its layers are unlike: the next test counts them")
    found, work = [], None
    for count in (2, 3):
        model = add_lora(
            tiny_model(family, num_hidden_layers=count, **plain_attention(family, count)).to(dtype), r=RANK
        )
        packed = PackedBatch.build([TOKENS], tokens=TOKENS) if layers == "fused" else None
        if packed:
            attach(model, layers="fused")
        found.append(saved_bytes(model, packed, None, layers == "padded"))
        work = setup_of(model, TOKENS, padded=int(layers == "padded"))
    assert work is not None and work.ranks is not None and set(work.ranks.values()) == {RANK}
    dims = dims_of(model)
    expected = stored_bytes(dims.layers[0], work)[Policy.KEEP]
    if layers == "fused":
        expected -= 4 * TOKENS * dims.layers[0].attention.heads  # on the CPU attention keeps no log-sum-exp
    if family == "ministral3" and layers != "fused":
        expected += dtype.itemsize * TOKENS  # by what queries are multiplied, which isn't counted
    if family == "phi3" and layers != "fused" and dtype is torch.float32:  # RoPE concatenates: SDPA's output is copied
        expected += 4 * TOKENS * dims.layers[0].attention.query
    assert found[1] - found[0] == expected


def plain_attention(family: str, layers: int) -> dict[str, Any]:
    """Return what leaves out windows, which SDPA serves with a mask and repeated keys."""
    if family in ("mistral", "phi3"):
        return {"sliding_window": None}
    if family in ("olmo3", "ministral"):
        return {"layer_types": ["full_attention"] * layers}
    return {"use_sliding_window": False} if family == "qwen2" else {}


S, F = "sliding_attention", "full_attention"
GEMMA4 = {
    # (layers, those that share), each with one more layer, or two, than one before
    "gemma4_text": [([S, F], 0), ([S, F, S, F], 2), ([S, F, F, S, F], 2), ([S, F, S, F, S, F], 4)],
    "gemma4_unified_text": [([S, F], 0), ([S, S, F], 0), ([S, F, F], 0)],
    "gemma4_text with experts": [([S, F], 0), ([S, S, F], 0), ([S, F, F], 0)],
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", GEMMA4)
def test_layers_that_share_and_those_with_their_own_inputs_save_what_their_kinds_say(
    family: str, dtype: torch.dtype
) -> None:
    """Exactly: models that differ in layers by what the formula says these keep."""
    found, expected = [], []
    for types, shared in GEMMA4[family]:
        changes = {"num_hidden_layers": len(types), "layer_types": types, "num_kv_shared_layers": shared}
        model = add_lora(tiny_model(family, **changes).to(dtype), r=RANK)
        attach(model, layers="fused")
        found.append(saved_bytes(model, PackedBatch.build([TOKENS], tokens=TOKENS), None))
        dims, work = dims_of(model), replace(setup_of(model, TOKENS), fused=True)
        assert dims.parameters == sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n)
        kept = [stored_bytes(layer, work)[Policy.KEEP] - 4 * TOKENS * layer.attention.heads for layer in dims.layers]
        inputs = sum(layer.per_layer_input.width for layer in dims.layers if layer.per_layer_input)
        expected.append(sum(kept) + TOKENS * inputs * dtype.itemsize)
    more = [bytes_ - found[0] for bytes_ in found[1:]]
    begins = 4 * 8 if "experts" in family else 0  # where each expert's rows begin
    assert more == [bytes_ - expected[0] + begins for bytes_ in expected[1:]]


def test_keys_and_values_that_are_shared_are_counted_under_every_policy() -> None:
    dims, setup = dims_of(tiny_model("gemma4_text")), TrainSetup(TOKENS)
    gives = [layer.attention.gives_kv for layer in dims.layers]
    assert gives == [True, False, True, False, False] and len(dims.kinds) == 5
    own, giving = dims.layers[1], dims.layers[2]
    shared = 2 * TOKENS * giving.attention.key_value * 2
    assert giving.attention.key_value == 64
    both = stored_bytes(own, setup), stored_bytes(giving, setup)
    assert {policy: both[1][policy] - both[0][policy] for policy in both[0]} == dict.fromkeys(both[0], shared)
    assert working_bytes(dims.layers[3], setup) > working_bytes(dims.layers[0], setup)
    memory = MemoryModel.of(dims, setup)
    peak = sum(memory.peak([Policy.RECOMPUTE_LAYER] * 5).values())
    alone = replace(giving, blocks=(replace(giving.blocks[0], gives_kv=False), *giving.blocks[1:]))
    other = replace(dims, layers=(*dims.layers[:2], alone, *dims.layers[3:]))
    assert peak - sum(MemoryModel.of(other, setup).peak([Policy.RECOMPUTE_LAYER] * 5).values()) == shared


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("family", "adapted", "dtype"),
    [
        ("qwen3_5_text", "mixers", torch.float32),
        ("qwen3_5_text", "all", torch.bfloat16),
        ("qwen3_5_text", "full", torch.bfloat16),
        ("qwen3_5_moe_text", "mixers", torch.float32),
        ("qwen3_5_moe_text", "all", torch.float32),
        ("qwen3_next", "mixers", torch.float32),
    ],
)
def test_layers_of_gated_delta_nets_and_gated_attention_save_what_the_formula_says(
    family: str, adapted: str, dtype: torch.dtype
) -> None:
    """Each kind of layer by a model that has one more of it; the last layer with the shared expert's adapters, too."""
    found, dims, work = [], None, None
    autocast = dtype if adapted == "full" and dtype is not torch.float32 else None
    for count in (2, 3, 4):
        model = tiny_model(family, num_hidden_layers=count)
        if adapted != "full":
            targets = list(QWEN3_NEXT.lora_targets or ()) if family == "qwen3_next" else list(MIXER_LINEARS)
            targets += [] if adapted == "mixers" else ["gate_proj", "down_proj"]
            model = add_lora(model.to(dtype), r=RANK, target_modules=targets)
        attach(model, layers="fused")
        found.append(saved_bytes(model, PackedBatch.build([TOKENS], tokens=TOKENS), autocast))
        dims, work = dims_of(model), setup_of(model, TOKENS, autocast)
    assert dims is not None and work is not None
    assert [layer.delta is not None for layer in dims.layers] == [True, False, True, False]
    delta, attention = (stored_bytes(layer, replace(work, fused=True))[Policy.KEEP] for layer in dims.layers[2:])
    spec = dims.layers[3].attention
    assert spec is not None and spec.gated
    attention -= 4 * TOKENS * spec.heads  # on the CPU attention keeps no log-sum-exp
    net = dims.layers[2].delta
    assert net is not None
    delta -= rule_bytes(net, work)  # nor the rule what its kernels do
    rows = 4 * 8 if dims.has_experts else 0  # where each expert's rows begin
    assert found[1] - found[0] == delta + rows
    assert found[2] - found[1] == attention + rows


@pytest.mark.parametrize(
    ("family", "dtype", "autocast"),
    [
        *((name, torch.float32, torch.bfloat16) for name in ("llama", "gemma3_text", "phi3", "olmo2", "granite")),
        ("llama", torch.float32, None),
        *((name, torch.bfloat16, None) for name in ("llama", "gemma3_text", "olmo2")),
    ],
)
def test_full_fine_tuning_saves_what_the_formula_says(
    family: str, dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    """float32 masters under bf16 autocast, weights' copies with them; without autocast there are no copies."""
    found = []
    for count in (2, 3):
        model = tiny_model(family, num_hidden_layers=count).to(dtype)
        attach(model, layers="fused")
        found.append(saved_bytes(model, PackedBatch.build([TOKENS], tokens=TOKENS), autocast))
    dims, work = dims_of(model), setup_of(model, TOKENS, autocast)
    resting, size = resting_bytes(dims, work), sum(parameter.nbytes for parameter in model.parameters())
    assert work.method == "full" and resting["weights"] == resting["gradients"] == size
    expected = stored_bytes(dims.layers[0], replace(work, fused=True))[Policy.KEEP]
    assert found[1] - found[0] == expected - 4 * TOKENS * dims.layers[0].attention.heads


@pytest.mark.matrix(4)
@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"])
def test_a_layer_with_experts_saves_what_the_formula_says(family: str, rank: int) -> None:
    """gpt-oss saves its own cosines and sines in each layer, and no probabilities of all experts."""
    found = []
    for count in (2, 4):
        model = tiny_model(family, num_hidden_layers=count, **({"first_k_dense_replace": 0} if "glm" in family else {}))
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if rank else None
        model = add_lora(model, r=RANK, target_modules=ATTENTION, target_parameters=targets)
        attach(model, layers="fused")
        found.append(saved_bytes(model, PackedBatch.build([TOKENS], tokens=TOKENS), None))
    dims, work = dims_of(model), setup_of(model, TOKENS)
    assert work.expert_rank == rank and work.method == "lora"
    assert all(layer.experts is not None and layer.experts.width == 24 for layer in dims.layers)
    stored = stored_bytes(dims.layers[0], replace(work, fused=True))
    assert set(stored) == {Policy.KEEP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD}
    expected = 2 * (
        stored[Policy.KEEP] - 4 * TOKENS * dims.layers[0].attention.heads + 4 * 8
    )  # and where each expert's rows begin
    assert found[1] - found[0] == pytest.approx(expected, rel=0.05 if family == "gpt_oss" else 0)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert resting_bytes(dims, replace(work, fused=False))["adapters"] == 4 * adapters


def test_unlike_layers_save_what_their_kinds_say() -> None:
    """A dense layer among layers with experts: each kind is counted exactly, by models with one more of it."""
    found, models = {}, {}
    for dense in ([], [0], [0, 1]):
        model = tiny_model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=dense)
        model = add_lora(model, r=RANK, target_modules=ATTENTION)
        attach(model, layers="fused")
        found[len(dense)] = saved_bytes(model, PackedBatch.build([TOKENS], tokens=TOKENS), None)
        models[len(dense)] = model
    dims, setup = dims_of(models[1]), setup_of(models[1], TOKENS)
    assert sorted(dims.kinds.values()) == [1, 2] and dims.layers[1] == dims.layers[2] != dims.layers[0]
    assert dims.parameters == sum(p.numel() for n, p in models[1].named_parameters() if "lora_" not in n)
    memory = MemoryModel.of(dims, setup)
    dense, routed = (layer.stored[Policy.KEEP] for layer in memory.layers[:2])
    assert set(memory.layers[0].stored) == {Policy.KEEP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD}
    routed += 4 * 8  # where each expert's rows begin
    assert found[1] - found[0] == found[2] - found[1] == dense - routed
    adapters = sum(p.numel() for p in models[1].parameters() if p.requires_grad)
    assert resting_bytes(dims, replace(setup, fused=False))["adapters"] == 4 * adapters
    made = plan(dims, setup, device_spec("h100"))
    assert attach(models[1], made).plan == made


NO_PLAN = "OLMoE-1B-7B", "LFM2-1.2B", "StarCoder2-3B", "DeepSeek-V2-Lite", "BLOOM-1B7", "Falcon-Mamba-7B"


@pytest.mark.matrix(10)
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in NO_PLAN])
def test_parameters_are_counted_without_weights(name: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    assert dims_of(model).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_biases_adapters_and_trained_modules_are_counted() -> None:
    model = tiny_model("qwen2")
    total = sum(parameter.numel() for parameter in model.parameters())
    adapted = add_lora(model, r=RANK, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    dims, work = dims_of(adapted), setup_of(adapted, TOKENS)
    assert dims.parameters == total
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    resting = resting_bytes(dims, replace(work, fused=False))
    assert resting["gradients"] == 4 * trained and resting["optimizer"] == 8 * trained


EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    "lora",
    [
        {"layers_to_transform": [2]},
        {"r": 2, "rank_pattern": {r"layers\.0\..*": 64}},
        {"target_modules": [*EVERY, "lm_head", "embed_tokens"]},
    ],
    ids=["some layers", "ranks by layer", "head"],
)
def test_adapters_are_counted_that_are_there(lora: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", **{"r": RANK, "target_modules": EVERY, **lora})
    model = get_peft_model(tiny_model("llama"), config)
    dims, work = dims_of(model), setup_of(model, TOKENS)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    resting = resting_bytes(dims, replace(work, fused=False))
    assert resting["gradients"] == resting["adapters"] == pytest.approx(4 * trained, rel=1e-3)
    half = replace(work, ranks={path: rank // 2 for path, rank in (work.ranks or {}).items()}, fused=False)
    assert resting_bytes(dims, half)["gradients"] == pytest.approx(2 * trained, rel=1e-3)


@pytest.mark.parametrize("frozen", ["layers.0.", "layers.2.", "embed_tokens", "lm_head"])
def test_what_is_frozen_in_full_fine_tuning_has_a_weight_but_no_gradient(frozen: str) -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    dims, work = dims_of(model), setup_of(model, TOKENS, torch.bfloat16)
    resting = resting_bytes(dims, work)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert work.method == "full" and resting["weights"] == 4 * dims.parameters
    assert resting["gradients"] == 4 * trained and resting["optimizer"] == 8 * trained


def test_nf4_takes_what_bitsandbytes_stores() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    dims = dims_of(tiny_model("llama", hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64))
    stored = 0
    for linear in dims.layers[0].linears:
        sizes = linear.out, linear.inputs
        packed, state = functional.quantize_4bit(torch.randn(sizes), quant_type="nf4", compress_statistics=True)
        stored += packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    others = dims.parameters - sum(layer.linear_weights for layer in dims.layers)
    assert resting_bytes(dims, TrainSetup(TOKENS, "qlora"))["weights"] == len(dims.layers) * stored + 2 * others


ANCHORS = [
    (result, work)
    for file in (
        "step-llama-3.1-8b",
        "step-llama-3.1-8b-recompute",
        "reports/step-llama-3.2-1b-graph-asked:1",
        "step-llama-3.2-1b-once",
        "step-qwen3-0.6b-once",
        "step-qwen3-30b-a3b",
        "step-qwen3-30b-a3b-experts",
        "reports/step-qwen3-30b-a3b-graph",
        "step-qwen3-30b-a3b-once",
        "step-llama-3.1-8b-once",
        "step-llama-3.1-8b-offload",
        "step-llama-3.1-8b-qlora-written-out",
        "step-mistral-7b",
        "step-gemma-3-4b",
        "step-gpt-oss-20b",
    )
    for name, _, number in [file.partition(":")]
    for result in [json.loads((RESULTS / f"{name}.json").read_text())[int(number or 0)]]
    for graph in [result["counts"]["launches"] < 200]
    for rank in [16 if result["extra"]["experts"] == "lora" else 0]
    for method in [result["workload"]["method"]]
    for work in [TrainSetup(8192, method, expert_rank=rank, graph=graph, accumulates=False, documents=200)]
]


@pytest.mark.parametrize(("result", "work"), ANCHORS, ids=[one["workload"]["shape"] for one, _ in ANCHORS])
def test_predictions_meet_what_was_measured(result: dict[str, Any], work: TrainSetup) -> None:
    """Peak as torch counts it: within 5 %, never under by more than 2 %. Step: within 10 %."""
    dims = dims_of(skeleton(config_of(result["workload"]["shape"])))
    policy = {"off": Policy.KEEP, "on": Policy.RECOMPUTE_LAYER, "offload": Policy.OFFLOAD}[result["extra"]["recompute"]]
    policies = [policy] * len(dims.layers)
    step = MemoryModel.of(dims, work)
    peak = sum(step.peak(policies).values()) + min(0, step.graph)  # steps that are timed all run as graphs, or none
    measured = result["memory_bytes"]["peak"]
    assert 0.98 * measured <= peak <= 1.05 * measured, peak / measured
    milliseconds = step_times(dims, work, device_spec("h200")).step(policies)
    timed = sorted(result["timings_ms"]["step"])
    assert abs(milliseconds / timed[len(timed) // 2] - 1) < 0.1, milliseconds


SIZES = st.lists(st.integers(1, 40), min_size=4, max_size=4)


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 5),
    sizes=SIZES,
    head=st.integers(0, 60),
    working=st.integers(0, 60),
    times=st.tuples(*[st.integers(1, 30)] * 5),
    shared=st.booleans(),
    pieces=st.integers(0, 20),
    norm=st.integers(0, 20),
)
def test_choices_equal_brute_force(
    layers: int,
    sizes: list[int],
    head: int,
    working: int,
    times: tuple[int, ...],
    shared: bool,
    pieces: int,
    norm: int,
) -> None:
    """For every budget no assignment of policies to layers, in any order, is faster than the one chosen for it."""
    names = (Policy.KEEP, Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP, Policy.RECOMPUTE_LAYER)
    stored = dict(zip(names, sorted(sizes, reverse=True), strict=True)) | {Policy.OFFLOAD: 0}
    # as `read_bytes` counts them: two are left out, each no larger than a layer's input
    norm = min(norm, (stored[Policy.KEEP] - stored[Policy.RECOMPUTE_NORMS]) // 2, stored[Policy.RECOMPUTE_LAYER])
    results = {Policy.KEEP: 0, Policy.RECOMPUTE_NORMS: 2}
    read = {policy: stored[Policy.KEEP] - results.get(policy, 1) * norm for policy in stored}
    step = MemoryModel(
        {"weights": 7, "gradients": 1}, [LayerBytes(stored, read, working)] * layers, head, 3, fragmentation=pieces
    )
    forward, backward, norms, gate_up, copy = times
    layer = LayerTimes(forward, backward, norms, gate_up, forward)
    speed = StepTimes((layer,) * layers, 0 if shared else copy, outside_layers=5)
    chosen = Frontier(step, speed)
    for budget in (made.predicted["process"] for made in chosen):
        best = next(made for made in chosen if made.predicted["process"] <= budget)
        assert best.predicted["process"] == step.process(step.peak(best.policies, best.buffers))
        for policies in itertools.product(stored, repeat=layers):
            if shared and Policy.OFFLOAD in policies:
                continue
            if step.process(step.peak(policies)) <= budget:
                assert best.predicted["step_ms"] <= speed.step(policies) + 1e-9, policies
    times_ms = [made.predicted["step_ms"] for made in chosen]
    assert times_ms == sorted(times_ms), "more memory is never slower"


def kinds_of(draw: Any) -> tuple[LayerBytes, LayerTimes]:
    """Draw a kind of layer, one in two without the policies that recompute parts."""
    keep, norms, mlp, whole = sorted((draw(st.integers(1, 40)) for _ in range(4)), reverse=True)
    stored = {Policy.KEEP: keep, Policy.RECOMPUTE_LAYER: whole, Policy.OFFLOAD: 0}
    if draw(st.booleans()):
        stored |= {Policy.RECOMPUTE_NORMS: norms, Policy.RECOMPUTE_MLP: mlp}
    read = {policy: max(0, keep - draw(st.integers(0, 10))) for policy in stored}
    read[Policy.OFFLOAD] = read[Policy.RECOMPUTE_LAYER]
    times = LayerTimes(*(draw(st.integers(1, 30)) for _ in range(5)))
    return LayerBytes(stored, read, draw(st.integers(0, 60))), times


@pytest.mark.matrix(1)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), shared=st.booleans(), coming=st.booleans())
@pytest.mark.parametrize("count", [4, 5, 8])
def test_choices_for_unlike_layers_equal_brute_force(count: int, data: Any, shared: bool, coming: bool) -> None:
    """Three kinds mixed in a drawn order: no assignment, in any order, beats the frontier at its memory."""
    kinds = [data.draw(st.composite(kinds_of)()) for _ in range(3)]
    order = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    grads = [5 * (count - i) for i in range(count)] if coming else []
    layers = [kinds[i][0] for i in order]
    memory = MemoryModel({"weights": 7}, layers, data.draw(st.integers(0, 60)), 3, 0, 2, grads, (4, 6))
    times = StepTimes(tuple(kinds[i][1] for i in order), 0 if shared else data.draw(st.integers(1, 30)), 5)
    chosen = Frontier(memory, times)
    front = [(made.predicted["process"], made.predicted["step_ms"]) for made in chosen]
    assert front == sorted(front, key=lambda point: (point[1], -point[0])) and len({p for p, _ in front}) == len(front)
    for made in chosen:
        assert made.predicted["process"] == memory.process(memory.peak(made.policies, made.buffers))
        assert made.predicted["step_ms"] == times.step(made.policies, made.buffers)
    # 8 unlike layers of five policies: every assignment of those that offload nothing, a sample of the others
    served = [[p for p in layer.stored if p is not Policy.OFFLOAD or not (shared or count == 8)] for layer in layers]
    choices = list(itertools.product(*served))
    if count == 8:
        choices = choices[:: max(1, len(choices) // 4000)]
        offers = [list(layer.stored) for layer in layers] if not shared else served
        choices += [tuple(data.draw(st.sampled_from(each)) for each in offers) for _ in range(20)]
    for policies in choices:
        process, step = memory.process(memory.peak(policies)), times.step(policies)
        assert any(p <= process and ms <= step + 1e-6 for p, ms in front), policies


def test_sixty_four_unlike_layers_are_planned_in_a_second() -> None:
    """Also a bound on the search's size: three kinds, one in four of the largest, as of real models."""
    small, large = (dims_of(skeleton(config_of(name))) for name in ("Llama-3.2-1B", "Llama-3.1-8B"))
    wide = replace(small.layers[0], norms=4)
    layers = (small.layers[0], wide, replace(large.layers[0], hidden=small.hidden), small.layers[0]) * 16
    mixed = replace(large, layers=layers)
    setup = TrainSetup(16384)
    times = step_times(mixed, setup, device_spec("rtx4090"))
    start = time.process_time()
    plans = plans_of(mixed, setup, times)
    made = plans.within(plans[len(plans) // 2].predicted["process"])
    assert time.process_time() - start < 1.0 and len(set(made.policies)) > 1, len(plans)


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_plan_fits_by_its_own_accounting(method: Any) -> None:
    dims, gpu = dims_of(skeleton(config_of("Llama-3.2-1B"))), device_spec("rtx4090")
    work = TrainSetup(8192, method)
    least = plans_of(dims, work, step_times(dims, work, gpu))[-1].predicted["process"]
    slower = 0.0
    for budget in range(60 * GIB, int(least), -4 * GIB):
        made = plan(dims, work, gpu, budget)
        assert made.predicted["process"] <= budget and len(made.policies) == len(dims.layers)
        assert made.predicted["step_ms"] >= slower
        slower = made.predicted["step_ms"]
        kinds = MemoryModel.of(dims, work).peak(made.policies, made.buffers)
        assert sum(kinds.values()) == made.predicted["peak"]
    told = f"needs {math.ceil(least / GIB * 10) / 10:.1f} GiB and the budget is 0.5"
    with pytest.raises(PlanDoesNotFit, match=told) as refused:
        plan(dims, work, gpu, GIB // 2)
    assert "rows of half as many tokens" in refused.value.remedy and isinstance(refused.value, ConfigError)
    assert ("load_in_4bit" in refused.value.remedy) is (method == "lora")
    assert ("adapter.method: lora" in refused.value.remedy) is (method == "full")


@pytest.mark.parametrize("tokens", [512, 2048, 4096, 8192, 100_000])
def test_the_budget_that_a_refusal_names_is_enough(tokens: int) -> None:
    """Rows of 8,192 tokens are shorter than tiles of rows, which take more there than MLPs as a whole."""
    dims, gpu = dims_of(skeleton(config_of("Llama-3.1-8B"))), device_spec("h100")
    for asked in (Plan.keep(), None):
        with pytest.raises(PlanDoesNotFit) as refused:
            plan(dims, TrainSetup(tokens), gpu, 17 * GIB, asked=asked)
        [gib] = re.findall(r"(?:smallest plan|auto) needs ([0-9.]+) GiB", str(refused.value))
        enough = int(float(gib) * GIB)
        assert plan(dims, TrainSetup(tokens), gpu, enough).predicted["process"] <= enough
    with pytest.raises(PlanDoesNotFit):
        plan(dims, TrainSetup(tokens), gpu, enough - GIB // 8)


def test_what_fits_nowhere_is_advised_4_bits_that_count_the_experts_too() -> None:
    dims, gpu = dims_of(skeleton(config_of("Qwen3-30B-A3B"))), device_spec("h200")
    with pytest.raises(PlanDoesNotFit) as refused:
        plan(dims, TrainSetup(2048), gpu, 4 * GIB)
    [gib] = re.findall(r"load_in_4bit: true needs ([0-9.]+) GiB", refused.value.remedy)
    assert 14 < float(gib) < 24  # 30.5 billion weights take 57 GiB in 16 bits and 15 in 4
    with pytest.raises(PlanDoesNotFit) as refused:
        plan(dims, TrainSetup(2048, "qlora", expert_bytes=0.516), gpu, 4 * GIB)
    assert "load_in_4bit" not in refused.value.remedy


def test_integers_that_have_no_room_are_advised_fp8() -> None:
    """Whose codes are written out for each product."""
    setup = TrainSetup(8192, fp8=True, fp8_forward=False, int8=True, accumulates=False)
    dims, device = dims_of(skeleton(config_of("Llama-3.1-8B"))), device_spec("rtx4090")
    with pytest.raises(PlanDoesNotFit) as refused:
        plan(dims, setup, device, device.memory_bytes)
    [needed] = re.findall(r"fits: .*precision\.compute: fp8 needs ([0-9.]+) GiB", refused.value.remedy)
    made = plan(dims, replace(setup, int8=False, codes="auto"), device, device.memory_bytes)
    assert made.predicted["process"] <= device.memory_bytes and float(needed) < 24
    with pytest.raises(PlanDoesNotFit) as refused:  # Ampere, which has none
        plan(dims, setup, device_spec("a10"), device.memory_bytes)
    assert "fp8" not in refused.value.remedy


def test_integers_over_4_bits_are_kept_where_there_is_room_and_else_written_out() -> None:
    setup = TrainSetup(8192, method="qlora", fp8=True, fp8_forward=False, int8=True, written_out="auto")
    dims, made = dims_of(skeleton(config_of("Qwen3-14B"))), {}
    for name in ("h200", "rtx4090"):
        device = device_spec(name)
        made[name] = plan(dims, setup, device, device.memory_bytes)
    assert made["h200"].written_once and not made["rtx4090"].written_once
    more = made["h200"].predicted["weights"] - made["rtx4090"].predicted["weights"]
    assert 2.0 < more / sum(layer.linear_weights for layer in dims.layers) < 2.2


def test_smaller_adapters_keep_the_optimiser_that_is_asked_for() -> None:
    dims, gpu = dims_of(skeleton(config_of("Llama-3.2-1B"))), device_spec("rtx4090")
    paths = {linear.path for layer in dims.kinds for linear in layer.linears}
    told = []
    for rank, pattern in ((256, r"adapter\.r: 128 needs ([0-9.]+) GiB"), (128, r"smallest plan needs ([0-9.]+) GiB")):
        with pytest.raises(PlanDoesNotFit) as refused:  # SGD has no states
            plan(dims, TrainSetup(8192, ranks=dict.fromkeys(paths, rank), optimizer_bytes=0), gpu, 3 * GIB)
        told += re.findall(pattern, str(refused.value))
    assert len(told) == 2 and told[0] == told[1]


def test_lora_is_advised_with_adapters_on_all_layers_whatever_is_frozen() -> None:
    dims, gpu, told = dims_of(skeleton(config_of("Llama-3.2-1B"))), device_spec("rtx4090"), set()
    for share in (1.0, 0.1):
        with pytest.raises(PlanDoesNotFit) as refused:
            plan(dims, TrainSetup(8192, "full", trained_share=share), gpu, 3 * GIB)
        told |= set(re.findall(r"adapter\.method: lora needs ([0-9.]+) GiB", refused.value.remedy))
    assert len(told) == 1


def test_everything_is_kept_where_it_fits_and_shared_memory_never_offloads() -> None:
    dims = dims_of(skeleton(config_of("Llama-3.2-1B")))
    assert set(plan(dims, TrainSetup(8192), device_spec("h200")).policies) == {Policy.KEEP}
    work = TrainSetup(65536)
    for made in plans_of(dims, work, step_times(dims, work, device_spec("gb10"))):
        assert Policy.OFFLOAD not in made.policies
    stock = replace(work, fused=False)
    for made in plans_of(dims, stock, step_times(dims, stock, device_spec("h100"))):
        assert not {Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP} & set(made.policies)


def test_graphs_are_captured_where_the_budget_has_their_memory() -> None:
    """Counted where they are likely; a method that has none is not refused them. Of long rows they take less than
    layers without, which keep their norms' results."""
    dims, work, gpu = dims_of(skeleton(config_of("Llama-3.2-1B"))), TrainSetup(512, graph=True), device_spec("h200")
    step, policies, known = MemoryModel.of(dims, work), [Policy.KEEP] * len(dims.layers), step_times(dims, work, gpu)
    both = step.process(step.peak(policies))
    assert step.graph > 0 > MemoryModel.of(dims, replace(work, tokens=8192)).graph
    for times, counted in ((known.scaled(2.0, 2.0, 1.0), 0), (known.scaled(1.0, 1.0, 1.0), step.graph)):
        for budget, graph in ((both, True), (both - 1, False)):
            made = plan(dims, work, gpu, budget, times)
            assert (set(made.policies), made.graph) == ({Policy.KEEP}, graph)
            assert made.predicted.get("CUDA graph", 0) == counted * graph
            assert made.predicted["process"] == both - step.graph + counted * graph
    for other in (replace(work, graph=False), replace(work, fused=False), replace(work, method="full")):
        kinds = MemoryModel.of(dims, replace(other, graph=False)).peak(policies)
        least = MemoryModel.of(dims, replace(other, graph=False)).process(kinds)
        assert plan(dims, other, gpu, least, asked=Plan.keep()).graph


def test_a_part_of_the_device_is_left_free_unless_nothing_else_fits() -> None:
    dims, work = dims_of(skeleton(config_of("Llama-3.1-8B"))), TrainSetup(8192)
    times = step_times(dims, work, device_spec("h200"))
    whole, least = (int(plans_of(dims, work, times)[i].predicted["process"]) for i in (0, -1))
    for memory, budget in ((whole, None), (whole, whole), (whole * SPARE // (SPARE - 1) + 1, None), (least, None)):
        card = replace(device_spec("h200"), memory_bytes=memory)
        made = plan(dims, work, card, budget, times)
        assert (set(made.policies) == {Policy.KEEP}) is (memory > whole)
        assert made.predicted["process"] <= (memory if memory == least else memory - memory // SPARE)
        if memory >= whole:
            assert set(plan(dims, work, card, budget, times, Plan.keep()).policies) == {Policy.KEEP}, "it is asked for"


def test_what_policies_cost() -> None:
    """Copies hide behind a layer's forward, and with two buffers behind the backward of the layer after it, but for a
    tenth. Measured times scale what wasn't measured."""
    layer = LayerTimes(forward=2.0, backward=4.0, norms=0.125, gate_up=0.5, recompute_layer=1.5)
    times = StepTimes((layer,) * 3, copy=10.0, outside_layers=3.0)
    costs = [layer.extra(copy, buffers)[Policy.OFFLOAD] for copy in (10.0, 1.0) for buffers in (2, 1)]
    assert costs == pytest.approx([1.5 + 8 + 4.5, 1.5 + 8 + 10, 1.5 + 0.1 + 0.1, 1.5 + 0.1 + 1])
    assert layer.extra(1, 2)[Policy.RECOMPUTE_MLP] == 0.625 and layer.extra(1, 2)[Policy.RECOMPUTE_NORMS] == 0.125
    last_stays = [Policy.OFFLOAD, Policy.OFFLOAD, Policy.KEEP]
    assert times.step(last_stays) == pytest.approx(3 * 6 + 3 + costs[0] + 1.5)
    scaled = times.scaled(1.0, 8.0, 5.0)
    assert scaled == StepTimes((LayerTimes(1.0, 8.0, 0.1875, 0.75, recompute_layer=0.75),) * 3, 5.0, 4.5)


def test_what_the_allocator_can_not_use_is_left_free() -> None:
    dims = dims_of(skeleton(config_of("Llama-3.1-8B")))
    for tokens, a_layer in (
        (8192, FRAGMENTATION),
        (16, 16 * 2 * 14336 * 2),
    ):  # of short rows no more than gate·up's bytes
        step = MemoryModel.of(dims, TrainSetup(tokens))
        kinds = step.peak([Policy.RECOMPUTE_MLP] * len(dims.layers))
        assert step.process(kinds) - sum(kinds.values()) == len(dims.layers) * a_layer + CONTEXT_BYTES


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_come_with_the_backward_unless_they_accumulate(tied: bool) -> None:
    dims = dims_of(skeleton(config_of("Llama-3.2-1B" if tied else "Llama-3.1-8B")))
    assert dims.tied is tied
    policies, whole = [Policy.KEEP] * len(dims.layers), 4 * dims.parameters
    at_once, there = (
        MemoryModel.of(dims, TrainSetup(8192, "full", accumulates=several)).peak(policies) for several in (False, True)
    )
    table = 4 * dims.vocab * dims.hidden
    assert there["gradients"] == whole + (
        0 if at_once.get("activations") else 2 * table
    )  # when the head's loss is made
    assert at_once.get("gradients", 0) == 0
    recomputed = MemoryModel.of(dims, TrainSetup(1024, "full", accumulates=False)).peak(
        [Policy.RECOMPUTE_LAYER] * len(dims.layers)
    )
    assert recomputed["gradients"] == whole + (table if tied else 0)  # at the end: the head's waits for the embedding's


def test_devices() -> None:
    assert device_spec("RTX4090").memory_bytes == device_spec("rtx4090").memory_bytes
    for name in ("RTX 4090", "NVIDIA GeForce RTX 4090", "rtx_4090"):
        assert (
            device_spec(name).memory_bytes == device_spec("rtx4090").memory_bytes
            and "estimate, with" not in device_spec(name).source
        )
    assert device_spec("24GiB").memory_bytes == 24 * GIB and "rtx4090" in device_spec("24GiB").source
    assert device_spec("NVIDIA H200", 150 * 10**9).matmul == device_spec("h200").matmul
    assert device_spec("NVIDIA A100-SXM4-40GB", 42 * 10**9).bandwidth == device_spec("a100-40").bandwidth
    assert device_spec("NVIDIA GeForce RTX 4090", 25 * 10**9).source == "datasheet estimate; this card was not measured"
    assert "rtx4090's rates" in device_spec("NVIDIA Unheard", 10**10).source
    assert parse_bytes("1.5 GiB", "x") == int(1.5 * GIB) and parse_bytes("900MB", "x") == 9 * 10**8
    with pytest.raises(ConfigError, match=r"'gtx1' is unknown: use a name like rtx4090, .*24GiB"):
        device_spec("gtx1")


def run_plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a model's folder that lost its weights, and a small data set; others' configurations beside it."""
    folder = tmp_path_factory.mktemp("plan")
    write_checkpoint(SHAPES["tiny"], folder / "model", seed=0)
    (folder / "model" / "model.safetensors").unlink()
    for name in ("Llama-3.1-8B", "Qwen3-14B"):
        config_of(name).save_pretrained(folder / name)
    foreign = config_of("tiny")
    foreign.quantization_config = {"quant_method": "gptq"}
    foreign.save_pretrained(folder / "gptq")
    (folder / "rows.jsonl").write_text('{"prompt": "a b", "completion": "c d e"}\n' * 40)
    (folder / "empty.jsonl").write_text('{"prompt": "a b", "completion": ""}\n')
    path = folder / "recipe.yaml"
    path.write_text(
        f"model: {{name: {folder / 'model'}, max_seq_length: 64}}\n"
        f"data: {{train: {folder / 'rows.jsonl'}}}\ntrain: {{output: {folder / 'out'}, epochs: 2}}\n"
    )
    return path


def large(recipe: Path, name: str) -> list[str]:
    """The recipe for a model of real size, with data that aren't here."""
    changes = f"model.name={recipe.parent / name}", "model.max_seq_length=8192", "data.train=someone/elsewhere"
    return [str(recipe), *changes]


def test_the_command_prints_a_plan(recipe: Path) -> None:
    done = run_plan(*large(recipe, "Llama-3.1-8B"), "--device", "24GiB")
    assert done.exit_code == 0, done.output
    for said in ("recompute the MLP", "memory at the peak", "datasheet", "a million tokens take"):
        assert said in done.stdout, said


def test_the_command_prints_json(recipe: Path) -> None:
    more = "model.load_in_4bit=true", "memory.budget=20GiB", "--device", "rtx4090", "--json"
    done = run_plan(*large(recipe, "Qwen3-14B"), *more)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    predicted = found["plan"]["predicted"]
    kinds = {kind: size for kind, size in predicted.items() if kind not in ("peak", "process", "step_ms")}
    assert sum(kinds.values()) == predicted["peak"] < predicted["process"] <= found["plan"]["budget_bytes"] == 20 * GIB
    assert predicted["process"] - predicted["peak"] == pytest.approx(40 * FRAGMENTATION + 0.6 * GIB, rel=1e-6)
    assert len(found["plan"]["policies"]) == 40 and found["measured"] is False and found["tokens_per_s"] > 0


def test_a_recipe_is_planned_without_weights_and_its_data_counted(recipe: Path) -> None:
    done = run_plan(str(recipe), "packing.rows_per_step=2", "memory.budget=8GiB", "--device", "rtx3090", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["plan"]["budget_bytes"] == 8 * GIB and found["work"]["tokens"] == 128
    assert set(found["plan"]["policies"]) == {"keep"}
    job = found["data"]
    assert job["documents"] == 40 and job["tokens"] == 360 and job["micro_batches"] == 6  # 6 rows, twice, by two
    assert found["seconds"] == pytest.approx(6 * found["plan"]["predicted"]["step_ms"] / 1e3)
    told = run_plan(str(recipe), "packing.rows_per_step=2", "--device", "rtx3090").stdout
    assert "40 documents, 360 tokens: 6 micro-batches" in told


@pytest.mark.parametrize(
    ("asked", "policy"),
    [("false", "keep"), ("true", "recompute the layer"), ("offload", "recompute with the input offloaded")],
)
def test_what_the_recipe_asks_for_is_planned(recipe: Path, asked: str, policy: str) -> None:
    changes = f"memory.gradient_checkpointing={asked}", "--device", "h200", "--json"
    found = json.loads(run_plan(*large(recipe, "Llama-3.1-8B"), *changes).stdout)["plan"]
    assert set(found["policies"]) == {policy} and found["buffers"] == 2
    dims, work = dims_of(skeleton(config_of("Llama-3.1-8B"))), TrainSetup(8192, accumulates=False)
    step, policies = MemoryModel.of(dims, work), (Policy(policy),) * len(dims.layers)
    assert found["predicted"]["peak"] == sum(step.peak(policies, 2).values())


def test_what_the_recipe_asks_for_does_not_fit(recipe: Path) -> None:
    asked = *large(recipe, "Llama-3.1-8B"), "memory.gradient_checkpointing=false", "--device"
    refused = run_plan(*asked, "24GiB")
    assert refused.exit_code == 1
    assert re.search(r"checkpointing asks for needs 4\d\.\d GiB and the budget is 24\.0 GiB", refused.stderr)
    assert re.search(r"remedy: memory\.gradient_checkpointing: auto needs 1\d\.\d GiB or more", refused.stderr)
    assert "the smallest plan needs" in run_plan(*asked, "12GiB").stderr


def test_lora_instead_of_full_fine_tuning_needs_what_lora_needs(recipe: Path) -> None:
    asked = *large(recipe, "Llama-3.1-8B"), "--device", "12GiB"
    least = re.search(r"smallest plan needs (\S+) GiB", run_plan(*asked).stderr)
    assert least and f"method: lora needs {least[1]} GiB" in run_plan(*asked, "adapter.method=full").stderr


def test_an_adapter_is_planned_as_it_was_saved(recipe: Path) -> None:
    """Its own rank and targets are trained on, not the recipe's; its tokenizer may be its base's."""
    from transformers import AutoModelForCausalLM

    folder = recipe.parent / "adapter"
    base = AutoModelForCausalLM.from_config(config_of("tiny"))
    base.name_or_path = base.config._name_or_path = str(recipe.parent / "model")
    add_lora(base, r=2, target_modules=["v_proj"]).save_pretrained(folder)
    found = json.loads(run_plan(str(recipe), f"model.name={folder}", "--device", "h100", "--json").stdout)
    assert {name: rank for name, rank in found["work"]["ranks"].items() if rank} == {"self_attn.v_proj": 2}
    assert found["data"]["documents"] == 40
    done = run_plan(str(recipe), f"model.name={folder}", "adapter.new_tokens=[<x>]", "--device", "h100")
    assert done.exit_code == 1 and "adapter.new_tokens, but" in done.stderr  # as training is, before it loads
    (folder / "adapter_config.json").write_text("{}")
    done = run_plan(str(recipe), f"model.name={folder}", "--device", "h100")
    assert done.exit_code == 1 and "no base_model_name_or_path to be read" in done.stderr


def test_a_folder_at_home_is_found(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(recipe.parent))
    done = run_plan(str(recipe), "model.name=~/model", "--device", "h100")
    assert done.exit_code == 0, done.output


def test_batches_of_an_epoch_end_with_it(recipe: Path) -> None:
    """6 rows by four are two batches an epoch, as the trainer makes them; not three in two epochs."""
    found = json.loads(run_plan(str(recipe), "packing.rows_per_step=4", "--device", "h100", "--json").stdout)
    assert found["data"]["micro_batches"] == 4


@pytest.mark.parametrize(
    ("changes", "micro_batches"),
    [
        ("train.epochs=1.5 train.gradient_accumulation_steps=4", 10),  # steps of 4, 2 and 4: a step is done whole
        ("train.epochs=0.1 train.gradient_accumulation_steps=8", 6),
        ("train.max_steps=3 train.gradient_accumulation_steps=4", 10),
    ],
)
def test_steps_end_with_an_epoch(recipe: Path, changes: str, micro_batches: int) -> None:
    found = json.loads(run_plan(str(recipe), *changes.split(), "--device", "h100", "--json").stdout)
    assert found["data"]["micro_batches"] == micro_batches


def test_a_name_is_shown_as_it_is(recipe: Path) -> None:
    folder = recipe.parent / "[bold]m"
    config_of("tiny").save_pretrained(folder)
    done = run_plan(str(recipe), f"model.name={folder}", "data.train=someone/elsewhere", "--device", "h100")
    assert done.exit_code == 0 and "[bold]m" in done.stdout.replace("\n", "")


def test_float16_runs_without_graphs(recipe: Path) -> None:
    found = json.loads(run_plan(str(recipe), "precision.dtype=float16", "--device", "h100", "--json").stdout)
    assert found["work"]["graph"] is False and found["work"]["itemsize"] == 2


@pytest.mark.parametrize("padded", [True, False])
def test_layers_that_cannot_be_fused_are_planned_as_they_run(recipe: Path, padded: bool) -> None:
    changes = ["packing.enabled=false", "train.neftune_noise_alpha=5"] if padded else ["adapter.lora_dropout=0.1"]
    found = json.loads(run_plan(str(recipe), *changes, "--device", "rtx3090", "--json").stdout)
    assert found["work"]["fused"] is False and found["work"]["padded"] == padded


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "gtx1"], "device 'gtx1' is unknown"),
        (["--device", "24 apples"], "--device '24 apples' is not an amount of memory"),
        (["memory.budget=lots", "--device", "h100"], "memory.budget"),
        (["memory.budget=80GiB", "--device", "rtx4090"], "more than rtx4090 has (23.5 GiB)"),
        (["memory.budget=0GiB", "--device", "h100"], "memory.budget = '0GiB': no amount of memory"),
        (["memory.budget=600MiB", "--device", "h100"], "the smallest plan needs"),
        (["model.name=./no-such-folder", "--device", "h100"], "./no-such-folder"),
        (["model.name=model.gguf", "--device", "h100"], "GGUF"),
        (["model.name={here}/gptq", "--device", "h100"], "quantised by 'gptq'"),
        (["model.max_seq_length=9999", "--device", "h100"], "max_seq_length 9999 > "),
        (["data.eval={here}/empty.jsonl", "--device", "h100"], "empty.jsonl line 1"),  # as training is, before it loads
        (["--device", "h100", "--calibrate"], "--calibrate times packed rows on this machine's GPU"),
    ],
)
def test_bad_input_ends_with_a_remedy(recipe: Path, arguments: list[str], said: str) -> None:
    done = run_plan(str(recipe), *(each.format(here=recipe.parent) for each in arguments))
    assert done.exit_code == 1 and said in done.stderr and "remedy:" in done.stderr and "Traceback" not in done.output


# ---- what planner, engine and trainer must agree on ----


@pytest.mark.parametrize("policies", list(itertools.product((Policy.KEEP, Policy.OFFLOAD), repeat=3)))
def test_inputs_are_counted_away_that_the_engine_sends_away(policies: tuple[Policy, ...]) -> None:
    model = tiny_model("llama")
    engine = attach(model, Plan(policies)).offload_engine
    ids = torch.arange(TOKENS)[None]
    loss = model(input_ids=ids, labels=ids).loss
    slots = [] if engine is None else [slot for block in engine.pool(ids.device)._blocks.values() for slot in block]
    away = len(slots) - (0 if engine is None else engine.pool(ids.device).free_slots)
    assert away == followed(policies).count(Policy.OFFLOAD) == max(0, policies.count(Policy.OFFLOAD) - 1)
    del loss


def test_one_chunk_of_logits_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab = 256, 2048
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 4 * rows * vocab)
    monkeypatch.setattr(linear_cross_entropy, "cross_entropy_", lambda logits, *_: logits[:, 0])
    hidden, weight = torch.randn(4 * rows, 8, requires_grad=True), torch.randn(vocab, 8)
    with Allocations() as seen:
        targets = torch.zeros(len(hidden), dtype=torch.long)
        linear_cross_entropy.linear_cross_entropy(hidden, weight, targets, 1, -100)
    assert 4 * rows * vocab <= seen.peak < 1.5 * 4 * rows * vocab


def test_padded_batches_have_all_their_logits() -> None:
    model = add_lora(tiny_model("llama", vocab_size=8192), r=RANK)
    attach(model)
    ids = torch.arange(TOKENS)[None]
    dims, work = dims_of(model), setup_of(model, TOKENS, padded=1)
    with Allocations() as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    step = MemoryModel.of(dims, work)
    expected = sum(layer.stored[Policy.KEEP] for layer in step.layers) + step.head
    assert 0.9 * expected < seen.peak < 1.1 * expected
    assert MemoryModel.of(dims, replace(work, padded=0)).head < step.head


@pytest.mark.matrix(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("chunk", [256, 512])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_logits_of_an_adapted_head_are_counted(
    dtype: torch.dtype, chunk: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss isn't fused with it: what each chunk takes, whole or one of two, is torch's and PEFT's."""
    from peft import LoraConfig, get_peft_model

    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * 8192 * chunk)
    model = tiny_model("llama" if softcap is None else "gemma3_text", vocab_size=8192).to(dtype)
    if softcap is not None:
        model.config.final_logit_softcapping = softcap
    targets = ["q_proj", "lm_head"]
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules=targets))
    attach(model, layers="fused")
    batch = packed_row([512], 512)
    model(**batch).loss.backward()  # copies of adapters that later steps find
    model.zero_grad()
    step = MemoryModel.of(dims_of(model), setup_of(model, 512))
    with Allocations() as seen:
        model(**batch).loss.backward()
    expected = sum(layer.stored[Policy.KEEP] for layer in step.layers) + step.head
    assert 0.92 * expected < seen.peak < 1.03 * expected
    assert setup_of(add_lora(tiny_model("llama"), r=RANK), TOKENS).logits_bytes == 0


def test_what_is_fused_now_is_what_counts() -> None:
    model = add_lora(tiny_model("llama"), r=RANK)
    assert not setup_of(model, TOKENS).fused
    attach(model, layers="fused")
    assert setup_of(model, TOKENS).fused and not setup_of(model, TOKENS, padded=1).fused
    assert not setup_of(model, TOKENS, torch.bfloat16).graph
    attach(model, layers="fused", graph="off")
    assert not setup_of(model, TOKENS).graph
    attach(model, layers="stock")
    assert not setup_of(model, TOKENS).fused
    dropout = add_lora(tiny_model("llama"), r=RANK, lora_dropout=0.1)
    attach(dropout, layers="fused")
    assert not setup_of(dropout, TOKENS).fused


def test_which_models_with_experts_have_no_plan() -> None:
    model = add_lora(tiny_model("qwen3_moe"), r=RANK, target_modules=ATTENTION)
    attach(model, experimental={"moe_routing": "loop"})
    with pytest.raises(UnsupportedError, match="experts go transformers' way"):
        dims_of(model)


def test_experts_are_planned_only_as_they_are_counted() -> None:
    assert auto_plan.refusal(tiny_model("llama"), fused=False) is None
    model = tiny_model("qwen3_moe")
    assert auto_plan.refusal(model) is None and "padded" in (auto_plan.refusal(model, fused=False) or "")
    for work in (TrainSetup(TOKENS, fused=False), TrainSetup(TOKENS, fused=False, padded=2)):
        with pytest.raises(UnsupportedError, match="what experts without packed rows and fused attention keep"):
            plan(dims_of(model), work, device_spec("h100"))


def test_buckets_of_several_processes_are_counted() -> None:
    dims = dims_of(tiny_model("llama"))
    one, many = (resting_bytes(dims, TrainSetup(TOKENS, distributed=several)) for several in (False, True))
    assert many["gradients"] == 2 * one["gradients"] and {**many, "gradients": 0} == {**one, "gradients": 0}


def test_the_share_of_a_device_is_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)
    for share, gib in ((1.0, 80), (0.1, 8.6)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, share=share: share)
        assert auto_plan.available(torch.device("cuda", 1)) / GIB == pytest.approx(gib, abs=0.01)


@pytest.mark.parametrize("devices", [["meta"], ["meta", "cpu"]], ids=["one", "two"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_trainer_plans_for_its_batches_and_for_one_device(
    monkeypatch: pytest.MonkeyPatch, packing: bool, devices: list[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(auto_plan, "refusal", lambda model, fused: None)
    monkeypatch.setattr(auto_plan, "plan_for", lambda *arguments, **options: asked.append((arguments[1:], options)))
    parameters = [torch.empty(1, device=device) for device in devices]
    model = SimpleNamespace(parameters=lambda: parameters, device=SimpleNamespace(type="cuda"), config=None)
    handle: Any = SimpleNamespace(
        model=model, plan=Plan.asked("auto", budget_bytes=7), replan=lambda plan: handle, fuses=True
    )
    args = SimpleNamespace(per_device_train_batch_size=2, max_length=64, bf16=packing, fp16=True, packing=packing)
    args.gradient_accumulation_steps, args.optim = 1 + packing, "adamw_8bit"
    resolve_plan(handle, args, padded=not args.packing, autocast=torch.bfloat16 if args.bf16 else torch.float16)
    wanted = (
        (128, 7),
        {"autocast": torch.bfloat16, "padded": 0, "accumulates": True, "optimizer": "adamw_8bit", "mlp_rows": 0},
    )
    if not packing:
        wanted = (
            (128, 7),
            {"autocast": torch.float16, "padded": 2, "accumulates": False, "optimizer": "adamw_8bit", "mlp_rows": 0},
        )
    assert asked == ([wanted] if len(devices) == 1 else [])
    monkeypatch.setattr(auto_plan, "refusal", lambda model, fused: None if fused else "padded")
    asked.clear()
    resolve_plan(handle, args, padded=not args.packing, autocast=torch.bfloat16 if args.bf16 else torch.float16)
    assert asked == ([wanted] if len(devices) == 1 and packing else [])  # padded rows of experts aren't counted
    asked.clear()
    assert (
        resolve_plan(handle, SimpleNamespace(**{**vars(args), "max_length": None}), padded=False, autocast=None)
        is handle.plan
    )
    handle.fuses = False
    resolve_plan(handle, args, padded=not args.packing, autocast=torch.bfloat16 if args.bf16 else torch.float16)
    handle.fuses, handle.plan = True, Plan.keep()
    assert (
        resolve_plan(handle, args, padded=not args.packing, autocast=torch.bfloat16 if args.bf16 else torch.float16)
        == Plan.keep()
        and asked == []
    )


def test_processes_make_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two is smaller, has little memory, and other times: both plan for it, by the first one's times."""
    dims, gpu = dims_of(skeleton(config_of("Llama-3.2-1B"))), device_spec("rtx4090")
    model = add_lora(tiny_model("llama"), r=RANK)
    times = [step_times(dims, TrainSetup(8192), device_spec(name)) for name in ("h200", "rtx3090")]
    least = plans_of(dims, TrainSetup(8192), times[0])[-1].predicted["process"] + GIB
    gpus = [device_spec("h200"), gpu]
    others = {int: [80 * GIB, int(least)], StepTimes: times, DeviceSpec: gpus}
    monkeypatch.setattr(auto_plan, "dims_of", lambda model: dims)
    monkeypatch.setattr(auto_plan, "setup_of", lambda *_: TrainSetup(8192))
    monkeypatch.setattr(auto_plan, "_everywhere", lambda value: others[type(value)])
    made = []
    for rank in (0, 1):
        monkeypatch.setattr(auto_plan, "cuda_device_spec", lambda device, rank=rank: gpus[rank])
        monkeypatch.setattr(auto_plan, "available", lambda device, mapped, rank=rank: others[int][rank])
        monkeypatch.setattr(auto_plan, "measured_times", lambda *_, rank=rank: times[rank])
        made.append(plan_for(model, 8192))
    assert made[0] == made[1] == plan(dims, TrainSetup(8192), gpu, int(least), times[0])


def gathered(rank: int, folder: Path) -> None:
    torch.save(auto_plan._everywhere(rank + 5), folder / f"{rank}.pt")


def test_what_every_process_has_is_gathered_in_order(tmp_path: Path) -> None:
    together(gathered, tmp_path)
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)] == [[5, 6], [5, 6]]
    assert auto_plan._everywhere(3) == [3]


def test_no_room_to_measure_is_said_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    model = add_lora(tiny_model("llama"), r=RANK)
    dims, work = dims_of(model), setup_of(model, 8192)
    plans = plans_of(dims, work, step_times(dims, work, device_spec("h100")))
    least, most = plans[-1].predicted["process"], plans[0].predicted["process"]
    monkeypatch.setattr(auto_plan, "measured_times", full)
    monkeypatch.setattr(auto_plan, "cuda_device_spec", lambda device: device_spec("h100"))
    monkeypatch.setattr(auto_plan, "available", lambda device, mapped: int(least + most) // 2)
    made = plan_for(model, 8192, budget_bytes=80 * GIB)
    assert set(made.policies) != {Policy.KEEP} and made.predicted["process"] <= (least + most) / 2
    assert "no memory to time a layer in" in caplog.text


@pytest.mark.parametrize(
    "lora",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["norm"], "use_dora": True},
        {"lora_dropout": 0.1, "rank_pattern": {"q_proj": 9}},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_training_counts_what_was_planned_without_weights(lora: dict[str, Any], tied: bool) -> None:
    loaded = tiny_model("llama", tie_word_embeddings=tied)
    models = loaded, skeleton(loaded.config)
    setups = [setup_of(add_lora(model, r=RANK, **lora), TOKENS) for model in models]
    assert setups[0] == setups[1] and setups[0].method == "lora"


@pytest.mark.gpu
def test_plan_for_measures_and_leaves_the_model_alone() -> None:
    model = add_lora(tiny_model("llama").to("cuda", torch.bfloat16), r=RANK)
    parameter = next(p for p in model.parameters() if p.requires_grad)
    parameter.grad = torch.ones_like(parameter)
    layers, state = base_causal_lm(model).base_model.layers, torch.cuda.get_rng_state()
    made = plan_for(model, 512)
    assert set(made.policies) == {Policy.KEEP} and len(made.policies) == 3 and made.predicted["step_ms"] > 0
    dims, work = dims_of(model), setup_of(model, 512)
    times = measured_times(model, dims, work, cuda_device_spec(torch.device("cuda")))
    assert 0 < times.layers[0].forward < 100 and 0 < times.layers[0].backward < 100 and times.copy > 0
    assert base_causal_lm(model).base_model.layers is layers and torch.equal(torch.cuda.get_rng_state(), state)
    assert parameter.grad is not None and parameter.grad.eq(1).all()
    assert sum(p.grad is not None for p in model.parameters()) == 1 and attached(model) is None
    with pytest.raises(PlanDoesNotFit):
        plan_for(model, 512, budget_bytes=GIB // 4)


def test_adapters_of_a_model_without_weights_have_none_either() -> None:
    """A plan of a large model would make gigabytes of random numbers otherwise."""
    expected, found = (
        {name: p for name, p in add_lora(model, r=4).named_parameters() if "lora_" in name}
        for model in (tiny_model("llama"), skeleton(tiny_model("llama").config))
    )
    assert {n: (p.shape, p.dtype) for n, p in found.items()} == {n: (p.shape, p.dtype) for n, p in expected.items()}
    assert all(parameter.is_meta and parameter.requires_grad for parameter in found.values())
