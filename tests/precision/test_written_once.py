"""Weights in few bits that are kept as they are written out, as a plan or `written_out="once"` says, beside those
written out for each product."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.diagnose.shapes import shape_of
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.layers.weight_layout import STEP
from pronghorn.loading.load import load_model
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import GIB, MemoryModel, TrainSetup, resting_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.planner import plan
from pronghorn.memory.step_time import step_times
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, plan_for, setup_of
from pronghorn.parallel.sharded import IN_BUFFER
from pronghorn.precision.fp8 import BackwardSource
from pronghorn.precision.source import DenseSource, NF4Source, PackedSource, WrittenOutSource
from pronghorn.train.oom_retry import tighten
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, with_adapters
from support.packed_linears import packed_linears
from support.shapes import dims_of_shape
from support.tiny import SIZES_IN_8_BITS, in_4_bits, packed_row, tiny_model

ONCE = {"written_out": "once"}
NF4 = TrainSetup(8192, method="qlora", accumulates=False)


def nf4_model(family: str = "llama", **adapters: Any) -> Any:
    """A tiny model whose down projections are wide enough to have room for A, in NF4."""
    sizes = {"intermediate_size": 128, **SIZES_IN_8_BITS.get(family.replace("moe_", ""), {})}
    return with_adapters(in_4_bits(tiny_model(family, **sizes).bfloat16()), **{"r": STEP, **adapters})


def linears(handle: Any) -> list[Any]:
    return list(handle.layers.linears())


def same(found: tuple[Any, dict[str, Any]], right: tuple[Any, dict[str, Any]]) -> bool:
    alike = found[1].keys() == right[1].keys() and len(right[1]) > 0
    return (
        alike and found[0] == right[0] and all(torch.equal(found[1][name], value) for name, value in right[1].items())
    )


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text", "gpt_oss"])
@pytest.mark.parametrize("compute", ["dtype", "fp8", "int8"])
def test_no_bit_is_changed(family: str, compute: str) -> None:
    model, batch = nf4_model(family), packed_row(LENGTHS, ROW)
    attach(model, Plan.keep(), layers="fused", compute=compute)
    right = loss_and_gradients(model, batch)
    handle = attach(model, Plan.keep(), layers="fused", compute=compute, experimental=ONCE)
    for _ in range(2):
        assert same(loss_and_gradients(model, batch), right)
    wanted = DenseSource if compute == "dtype" else BackwardSource
    assert {type(linear.source) for linear in linears(handle) if linear.in_8_bits or compute != "int8"} == {wanted}
    assert {type(linear.source) for linear in linears(handle) if not linear.rule.in_8_bits} <= {DenseSource}
    if compute == "fp8":
        assert {type(linear.source.plain) for linear in linears(handle)} == {DenseSource}
    # down's A lies below its weight, as where that is written out each time
    assert any(linear.source.side_by_side for linear in linears(handle)) == (compute == "dtype" and family != "gpt_oss")
    told = next(path.path for path in handle.report if path.part == "products of frozen weights")
    assert "written out once" in told


@pytest.mark.parametrize("kind", ["fine-grained", "rows", "nvfp4"])
def test_packed_checkpoints_too(tmp_path: Path, kind: str) -> None:
    packed_linears(tmp_path, kind)
    model, batch = (
        with_adapters(load_model(tmp_path, dtype="bfloat16", max_seq_length=128)[0]),
        packed_row(LENGTHS, ROW),
    )
    handle = attach(model, Plan.keep(), layers="fused")
    right = loss_and_gradients(model, batch)
    assert {type(linear.source) for linear in linears(handle)} == {PackedSource}
    before = MemoryModel.of(dims_of_shape("Llama-3.1-8B"), setup_of(model, ROW)).resting["weights"]
    handle = attach(model, Plan.keep(), layers="fused", experimental=ONCE)
    assert same(loss_and_gradients(model, batch), right)
    assert {type(linear.source) for linear in linears(handle)} == {DenseSource}
    after = MemoryModel.of(dims_of_shape("Llama-3.1-8B"), setup_of(model, ROW)).resting["weights"]
    assert after - before == 2 * sum(layer.linear_weights for layer in dims_of_shape("Llama-3.1-8B").layers)


def test_they_are_written_out_once_and_let_go_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    written: Counter[str] = Counter()
    write = WrittenOutSource.write_out

    def counted(source: WrittenOutSource, device: torch.device, more: int) -> Any:
        written["now"] += 1
        return write(source, device, more)

    monkeypatch.setattr(WrittenOutSource, "write_out", counted)
    model, batch = nf4_model(), packed_row(LENGTHS, ROW)
    handle = attach(model, Plan.keep(), layers="fused", experimental=ONCE)
    for _ in range(3):
        loss_and_gradients(model, batch)
    products = len(linears(handle))
    assert written["now"] == products > 0
    handle.detach()
    attach(model, Plan.keep(), layers="fused")
    loss_and_gradients(model, batch)
    assert written["now"] == 3 * products - 1  # for each product forward and back, but for the first layer's dx


def test_other_adapters_have_no_room_and_the_same_gradients() -> None:
    model, batch = nf4_model(), packed_row(LENGTHS, ROW)
    model.add_adapter("other", model.peft_config["default"])
    found: dict[str, list[Any]] = {"each": [], "once": []}
    for way, results in found.items():
        handle = attach(model, Plan.keep(), layers="fused", experimental={"written_out": way})
        for adapter in ("default", "other", "default"):
            model.set_adapter(adapter)
            results.append(loss_and_gradients(model, batch))
            rooms = [linear.source.side_by_side for linear in linears(handle)]
            assert any(rooms) == (way == "each" or adapter == "default")
        with model.disable_adapter(), torch.no_grad():
            results.append((model(**batch).loss, {"loss": model(**batch).loss}))
    right, once = found.values()
    assert same(once[0], right[0]) and same(once[2], right[2]) and same(once[3], right[3])
    for name, value in right[1][1].items():  # dx is two products where A has no room
        torch.testing.assert_close(once[1][1][name], value, rtol=0.03, atol=1e-3)


def test_they_follow_the_weights() -> None:
    model, batch = nf4_model(), packed_row(LENGTHS, ROW)
    attach(model, Plan.keep(), layers="fused", experimental=ONCE)
    before = loss_and_gradients(model, batch)
    down = model.model.model.layers[1].mlp.down_proj.base_layer
    down.weight.quant_state.absmax.mul_(1)
    down.weight.data = down.weight.data.flip(0).contiguous()
    found = loss_and_gradients(model, batch)
    attach(model, Plan.keep(), layers="fused")
    assert same(found, loss_and_gradients(model, batch)) and not same(found, before)


def test_a_forward_of_codes_has_nothing_to_keep() -> None:
    model = nf4_model()
    with pytest.raises(ConfigError, match=r"written_out 'once' for compute 'fp8_both'.*leave written_out out"):
        attach(model, layers="fused", compute="fp8_both", experimental=ONCE)
    with pytest.raises(ConfigError, match=r"written_out 'twice' is unknown: use one of auto, each, once"):
        attach(model, layers="fused", experimental={"written_out": "twice"})


def test_a_plan_counts_their_memory_and_no_time_to_write_them() -> None:
    dims, h200 = dims_of_shape("Qwen3-14B"), device_spec("h200")
    weights = 2 * sum(layer.linear_weights for layer in dims.layers)
    for setup in (NF4, replace(NF4, fp8=True, fp8_forward=False)):
        once = replace(setup, written_out="once")
        resting = [MemoryModel.of(dims, each).resting["weights"] for each in (setup, once)]
        assert resting[1] - resting[0] == weights
        each, kept = (step_times(dims, way, h200).layers[0] for way in (setup, once))
        assert kept.forward < each.forward
        assert kept.backward < each.backward if not setup.fp8 else kept.backward == each.backward


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("compute", ["dtype", "fp8"])
def test_a_plan_counts_none_of_shared_experts(family: str, compute: str) -> None:
    """Transformers computes these, and bitsandbytes writes them out for each product."""
    model, counted = nf4_model(family), {}
    for way in ("each", "once"):
        handle = attach(model, Plan.keep(), layers="fused", compute=compute, experimental={"written_out": way})
        loss_and_gradients(model, packed_row(LENGTHS, ROW))
        counted[way] = resting_bytes(dims_of(model), setup_of(model, ROW))["weights"]
    bases = [base for linear in linears(handle) for base in linear.bases]
    assert {type(getattr(linear.source, "plain", linear.source)) for linear in linears(handle)} == {DenseSource}
    kept = 2 * sum(base.in_features * base.out_features for base in bases)
    assert counted["once"] - counted["each"] == kept


def test_auto_keeps_them_where_everything_else_is_kept_and_memory_is_left() -> None:
    dims, h200 = dims_of_shape("Qwen3-14B"), device_spec("h200")
    auto = replace(NF4, written_out="auto")
    weights = 2 * sum(layer.linear_weights for layer in dims.layers)
    each, made = plan(dims, NF4, h200), plan(dims, auto, h200)
    assert made.written_once and not each.written_once
    assert set(made.policies) == set(each.policies) == {Policy.KEEP}
    more = made.predicted["process"] - each.predicted["process"]  # less a product's room to write to
    assert 0.99 * weights < more < weights
    assert 0.95 < made.predicted["step_ms"] / each.predicted["step_ms"] < 0.99
    whole = int(made.predicted["process"])
    assert plan(dims, auto, h200, whole).written_once
    less = plan(dims, auto, h200, whole - 1)
    assert not less.written_once and set(less.policies) == {Policy.KEEP}
    for budget in (30 * GIB, 40 * GIB):
        assert plan(dims, auto, h200, budget) == plan(dims, NF4, h200, budget)


def test_graphs_come_before_them() -> None:
    dims, h200 = dims_of_shape("Qwen3-0.6B"), device_spec("h200")
    setup = replace(NF4, tokens=512, graph=True)
    plain, both = plan(dims, setup, h200), plan(dims, replace(setup, written_out="auto"), h200)
    assert both.graph and both.written_once and "CUDA graph" in both.predicted
    budget = int(both.predicted["process"]) - 1
    assert plan(dims, replace(setup, written_out="auto"), h200, budget) == replace(plain, budget_bytes=budget)
    assert plain.graph and not plain.written_once


def test_layers_that_are_not_fused_keep_none_even_if_asked() -> None:
    """As padded batches of transformers' layers: bitsandbytes writes them out for each product."""
    dims, plain = dims_of_shape("Llama-3.1-8B"), replace(NF4, fused=False)
    asked = replace(plain, written_out="once")
    assert MemoryModel.of(dims, asked).resting == MemoryModel.of(dims, plain).resting
    assert not plan(dims, asked, device_spec("h200")).written_once


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "lora"},
        {"written_out": "each"},
        {"fp8": True},
        {"processes": 2},
        {"fused": False},
    ],
)
def test_auto_keeps_none_where_there_are_none(changes: dict[str, Any]) -> None:
    setup = replace(NF4, **{"written_out": "auto", **changes})
    assert not plan(dims_of_shape("Llama-3.1-8B"), setup, device_spec("h200")).written_once


def test_measured_times_are_scaled() -> None:
    dims, h200 = dims_of_shape("Qwen3-14B"), device_spec("h200")
    auto = replace(NF4, written_out="auto")
    times = step_times(dims, auto, h200).scaled(20.0, 24.0, 1.0)
    slow, fast = (plan(dims, setup, h200, times=times).predicted["step_ms"] for setup in (NF4, auto))
    assert 0.95 < fast / slow < 0.99


def test_a_plan_that_is_asked_for_says_so_itself() -> None:
    dims, h200, auto = dims_of_shape("Qwen3-14B"), device_spec("h200"), replace(NF4, written_out="auto")
    assert not plan(dims, auto, h200, asked=Plan.keep()).written_once
    recomputed = plan(dims, auto, h200, asked=replace(Plan.recompute(), written_once=True))
    assert recomputed.written_once and set(recomputed.policies) == {Policy.RECOMPUTE_LAYER}


def test_layers_follow_the_plan_and_let_them_go() -> None:
    model, batch = nf4_model(), packed_row(LENGTHS, ROW)
    handle = attach(model, Plan(written_once=True), layers="fused")
    right = loss_and_gradients(model, batch)
    assert {type(linear.source) for linear in linears(handle)} == {DenseSource}
    told = next(path for path in handle.report if path.part == "products of frozen weights")
    assert told.path.endswith("written out once") and told.why == "the plan has memory for them"
    kept = [weakref.ref(linear.source.storage) for linear in linears(handle)]
    tighter = tighten(handle.plan)
    assert tighter is not None and tighter == replace(Plan.keep(), predicted={})
    handle.replan(tighter)
    assert same(loss_and_gradients(model, batch), right)
    assert {type(linear.source) for linear in linears(handle)} == {NF4Source}
    gc.collect()
    assert not any(each() is not None for each in kept)
    handle = attach(model, Plan(written_once=True), layers="fused", experimental={"written_out": "each"})
    assert same(loss_and_gradients(model, batch), right)
    assert {type(linear.source) for linear in linears(handle)} == {NF4Source}


def test_weights_that_processes_share_are_refused() -> None:
    model, batch = nf4_model(), packed_row(LENGTHS, ROW)
    attach(model, Plan(written_once=True), layers="fused")
    setattr(model.model.model.layers[1].mlp.down_proj.base_layer.weight, IN_BUFFER, True)
    with pytest.raises(UnsupportedError, match=r"processes share can't be kept.*leave written_once of the plan"):
        model(**batch)


def test_the_command_says_so(tmp_path: Path) -> None:
    fields = shape_of("Qwen3-14B")
    assert fields is not None
    AutoConfig.for_model(**fields).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: {tmp_path}/model, max_seq_length: 2048, load_in_4bit: true}}\n"
        f"data: {{train: someone/elsewhere}}\ntrain: {{output: {tmp_path}/out}}\n"
    )
    for card, once in (("h200", True), ("rtx4090", False)):
        done = CliRunner().invoke(app, ["plan", str(recipe), "--device", card], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        text = " ".join(done.stdout.split())
        assert ("weights of few bits kept as they are written out" in text) == once
        assert ("gradient_checkpointing: auto" in text) or not once


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("graph", ["off", "on"])
def test_on_a_gpu_no_bit_is_changed(family: str, graph: str) -> None:
    model, found = nf4_model(family).cuda(), {}
    batch = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    for way, made in {"each": Plan.keep(), "once": Plan(written_once=True)}.items():
        attach(model, made, layers="fused", graph=graph)
        for _ in range(4):
            found[way] = loss_and_gradients(model, batch)
    assert same(found["once"], found["each"])


@pytest.mark.gpu
def test_auto_on_a_gpu_keeps_them() -> None:
    model = nf4_model().cuda()
    batch = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    handle = attach(model, Plan.keep(), layers="fused")
    right = loss_and_gradients(model, batch)
    made = plan_for(model, ROW)
    assert made.written_once and set(made.policies) == {Policy.KEEP}
    handle.replan(made)
    assert same(loss_and_gradients(model, batch), right)
    assert {type(linear.source) for linear in linears(handle)} == {DenseSource}
