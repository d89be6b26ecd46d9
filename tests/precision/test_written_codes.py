"""`compute="fp8"` over 16-bit weights: codes that are kept beside them, or written out for each product."""

from __future__ import annotations

import copy
import json
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
from pronghorn.kernels.quantise import ROW_SCALES
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import GIB, MemoryModel, ModelDims, TrainSetup
from pronghorn.memory.plan import TILE_ROWS, Plan, Policy
from pronghorn.memory.planner import PlanDoesNotFit, plan, plans_of
from pronghorn.memory.step_time import step_times
from pronghorn.memory.strategies import Strategy, choose
from pronghorn.models import auto_plan
from pronghorn.models.attach import attach, attached
from pronghorn.models.auto_plan import setup_of
from pronghorn.precision.fp8 import FP8Source, WrittenCodesSource
from pronghorn.train.oom_retry import tighten
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, with_adapters
from support.shapes import dims_of_shape
from support.tiny import SIZES_IN_8_BITS, in_4_bits, packed_row, tiny_model

FP8 = TrainSetup(8192, fp8=True, fp8_forward=False, codes="auto", accumulates=False)
WRITTEN = Plan(codes_written=True)
H100, H200, RTX4090 = (device_spec(name) for name in ("h100", "h200", "rtx4090"))


@pytest.fixture(scope="module")
def dims() -> ModelDims:
    """Those of Llama-3.1-8B."""
    return dims_of_shape("Llama-3.1-8B")


def model_of(family: str = "llama") -> Any:
    model = tiny_model(family, intermediate_size=128, **SIZES_IN_8_BITS.get(family, {})).bfloat16()
    return with_adapters(model)


def sources(handle: Any) -> set[type]:
    return {type(linear.source.coded) for linear in handle.layers.linears()}


def told(handle: Any) -> str:
    return next(path.path for path in handle.report if path.part == "products of frozen weights")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text", "gemma4_text", "gpt_oss"])
def test_gradients_are_the_same_to_the_bit(family: str) -> None:
    model, batch = model_of(family), packed_row(LENGTHS, ROW)
    handle = attach(model, Plan.keep(), layers="fused", compute="fp8")
    loss, gradients = loss_and_gradients(model, batch)
    assert sources(handle) == {FP8Source} and "8-bit codes kept beside the weights" in told(handle)
    for codes in ("auto", "written"):  # by the plan, and by the option
        handle = attach(model, WRITTEN if codes == "auto" else Plan.keep(), layers="fused", compute="fp8", codes=codes)
        found = loss_and_gradients(model, batch)
        assert sources(handle) == {WrittenCodesSource}
        assert "8-bit codes written out of 16 bits for each product" in told(handle)
        assert found[0] == loss and found[1].keys() == gradients.keys()
        assert all(torch.equal(found[1][name], value) for name, value in gradients.items())


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_on_a_gpu_they_are_the_same_too(family: str) -> None:
    model = model_of(family).cuda()
    batch, found = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}, {}
    for codes in ("kept", "written"):
        attach(model, Plan.keep(), layers="fused", graph="off", compute="fp8", codes=codes)
        found[codes] = loss_and_gradients(model, batch)[1]
    assert all(torch.equal(found["written"][name], value) for name, value in found["kept"].items())


def test_codes_that_were_kept_go_and_come_with_the_plan() -> None:
    model, batch = model_of(), packed_row(LENGTHS, ROW)
    handle = attach(model, Plan.keep(), layers="fused", compute="fp8")
    loss_and_gradients(model, batch)
    storages = [
        each
        for layer in handle.layers.backbone.layers
        for each, _ in handle.layers.builder.storages(layer, torch.bfloat16)
    ]
    assert all(each._codes is not None for each in storages)
    handle.replan(WRITTEN)
    loss_and_gradients(model, batch)
    assert all(each._codes is None for each in storages)
    copied = copy.deepcopy(model)
    loss_and_gradients(copied, batch)
    assert sources(attached(copied)) == {WrittenCodesSource}
    with handle.trying(Plan.keep()):
        loss_and_gradients(model, batch)
        assert sources(handle) == {FP8Source}
    loss_and_gradients(model, batch)
    assert sources(handle) == {WrittenCodesSource}


def test_written_codes_follow_the_weights() -> None:
    model, batch = model_of(), packed_row(LENGTHS, ROW)
    attach(model, WRITTEN, layers="fused", compute="fp8")
    before = loss_and_gradients(model, batch)[1]
    weight = model.model.model.layers[1].mlp.down_proj.base_layer.weight
    with torch.no_grad():
        weight.mul_(64.0)
    found = loss_and_gradients(model, batch)[1]
    attach(model, layers="fused", compute="fp8", codes="kept")  # whatever the plan says
    kept = loss_and_gradients(model, batch)[1]
    assert all(torch.equal(found[name], value) for name, value in kept.items())
    assert not all(torch.equal(found[name], value) for name, value in before.items())


def test_a_choice_that_means_nothing_is_refused_by_name() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="codes 'none' is unknown: use one of auto, kept, written"):
        attach(model, layers="fused", compute="fp8", codes="none")  # type: ignore[arg-type]
    for compute in ("dtype", "fp8_both", "fp8_exact"):
        with pytest.raises(UnsupportedError, match=f"codes = 'written' needs.*is '{compute}'.*leave codes out"):
            attach(model, layers="fused", compute=compute, codes="written")
        with pytest.raises(UnsupportedError, match=f"codes_written = True of a plan needs.*is '{compute}'"):
            attach(model, WRITTEN, layers="fused", compute=compute)
    packed = with_adapters(in_4_bits(tiny_model("llama", intermediate_size=128).bfloat16()))
    shared = model_of()
    for name, parameter in shared.named_parameters():
        if name.endswith("base_layer.weight"):
            setattr(parameter, ROW_SCALES, torch.ones(len(parameter)))  # as of layers that processes share
    for other in (packed, shared):
        with pytest.raises(UnsupportedError, match=r"codes = 'kept' needs weights.*packed or shared.*leave codes"):
            attach(other, layers="fused", compute="fp8", codes="kept")
        handle = attach(other, Plan.keep(), layers="fused", compute="fp8")
        assert "kept beside" not in told(handle)
        with pytest.raises(UnsupportedError, match="codes_written = True of a plan needs weights"):
            handle.replan(WRITTEN)
        assert handle.plan == Plan.keep() and setup_of(other, 64).codes == "kept"


def test_another_compute_takes_the_policies_of_the_plan_before_and_not_its_codes() -> None:
    model = model_of()
    recomputed = replace(Plan.recompute(), codes_written=True)
    attach(model, recomputed, layers="fused", compute="fp8")
    assert attach(model, layers="fused", attention="per_document", compute="fp8").plan == recomputed
    assert attach(model, layers="fused", compute="fp8_both").plan == Plan.recompute()


def test_a_model_at_hand_leaves_the_choice_to_the_plan() -> None:
    model = model_of()
    assert setup_of(model, 64).codes == "kept"
    for compute, codes in (("fp8", "auto"), ("fp8_both", "kept"), ("dtype", "kept")):
        attach(model, layers="fused", compute=compute)
        assert setup_of(model, 64).codes == codes
    attach(model, layers="fused", compute="fp8", codes="written")
    asked = setup_of(model, 64)
    assert asked.codes == "written" and asked.writes_codes and not asked.chooses_codes


def test_memory_and_time_differ_by_the_codes(dims: ModelDims) -> None:
    kept, written = (MemoryModel.of(dims, replace(FP8, codes=codes)) for codes in ("kept", "written"))
    linear = sum(layer.linear_weights for layer in dims.layers)
    rows = sum(linear.out for layer in dims.layers for linear in layer.linears)
    assert kept.resting["weights"] - written.resting["weights"] == linear - 4 * rows
    short = (MemoryModel.of(dims, replace(FP8, tokens=512, codes=codes)).layers[0] for codes in ("kept", "written"))
    without, of_gate_up = (layer.working for layer in short)  # in long rows codes are gone when the backward peaks
    assert 0.9 * 2 * 4096 * 14336 < of_gate_up - without < 2 * 4096 * 14336
    assert [each.stored for each in kept.layers] == [each.stored for each in written.layers]
    times = [step_times(dims, replace(FP8, codes=codes), H200).layers[0] for codes in ("kept", "written")]
    assert times[0].forward == times[1].forward
    assert 0.1 < times[1].backward - times[0].backward < 0.3  # one H200 took .127 ms a layer


def test_the_faster_way_is_planned(dims: ModelDims) -> None:
    chosen = {}
    for gib in (20, 26, 36, 44, 48, 60):
        each = []
        for codes in ("kept", "written"):
            try:
                each.append(plan(dims, replace(FP8, codes=codes), H100, gib * GIB))
            except PlanDoesNotFit:
                assert gib == 20 and codes == "kept"
        made = chosen[gib] = plan(dims, FP8, H100, gib * GIB)
        assert made == min(each, key=lambda plan: plan.predicted["step_ms"])
        assert made.predicted["process"] <= gib * GIB
    assert [made.codes_written for made in chosen.values()] == [True, True, True, True, False, False]
    assert set(chosen[48].policies) == {Policy.KEEP, Policy.RECOMPUTE_NORMS}  # as writing costs more than norms
    assert set(chosen[60].policies) == {Policy.KEEP}
    steps = [made.predicted["step_ms"] for made in chosen.values()]
    assert steps == sorted(steps, reverse=True)
    assert plan(dims, FP8, RTX4090, 23 * GIB).codes_written
    with pytest.raises(PlanDoesNotFit, match=r"the smallest plan needs 18\.. GiB and the budget is 17"):
        plan(dims, FP8, RTX4090, 17 * GIB)


def test_measured_times_are_of_codes_that_are_kept(dims: ModelDims) -> None:
    """Writing takes longer by as much as all else did."""
    times = step_times(dims, FP8, H100)
    slow = times.scaled(3 * times.layers[1].forward, 3 * times.layers[1].backward, 3 * times.copy)
    for gib in (26, 60):
        made, slower = plan(dims, FP8, H100, gib * GIB), plan(dims, FP8, H100, gib * GIB, slow)
        assert slower.policies == made.policies and slower.codes_written == made.codes_written == (gib == 26)
        assert slower.predicted["step_ms"] == pytest.approx(3 * made.predicted["step_ms"])


def test_codes_are_written_before_mlps_are_computed_in_tiles(dims: ModelDims) -> None:
    setup = replace(FP8, tokens=300_000)
    least = [
        int(plans_of(dims, replace(setup, codes=codes), step_times(dims, setup, H100))[-1].predicted["process"])
        for codes in ("kept", "written")
    ]
    budget = sum(least) // 2
    assert plan(dims, replace(setup, codes="kept"), H100, budget).mlp_rows == TILE_ROWS
    made = plan(dims, setup, H100, budget)
    assert made.codes_written and made.mlp_rows == 0
    made = plan(dims, setup, H100, least[1] - GIB)
    assert made.mlp_rows == TILE_ROWS


def test_policies_that_are_asked_for_keep_their_codes(dims: ModelDims) -> None:
    kept, written = (plan(dims, FP8, H100, asked=replace(Plan.keep(), codes_written=way)) for way in (False, True))
    assert not kept.codes_written and written.codes_written
    assert kept.predicted["step_ms"] < written.predicted["step_ms"]
    assert kept.predicted["weights"] - written.predicted["weights"] > 6 * GIB
    with pytest.raises(PlanDoesNotFit, match=r"gradient_checkpointing: auto needs 18\.. GiB or more"):
        plan(dims, FP8, RTX4090, 22 * GIB, asked=Plan.recompute())


def test_other_weights_leave_no_choice(dims: ModelDims) -> None:
    for setup in (replace(FP8, method="qlora"), replace(FP8, processes=2), replace(FP8, codes="kept")):
        assert not plan(dims, setup, H100, 40 * GIB).codes_written


def test_copies_plan_as_one_gpu_does(dims: ModelDims) -> None:
    choice = choose(dims, replace(FP8, tokens=2048), RTX4090, 2, budget_bytes=23 * GIB, strategy=Strategy.COPIES)
    assert choice.chosen.plan is not None and choice.chosen.plan.codes_written
    shards = choose(dims, replace(FP8, tokens=2048), RTX4090, 2, budget_bytes=23 * GIB, strategy=Strategy.SHARDED)
    assert shards.chosen.plan is not None and not shards.chosen.plan.codes_written


def test_everything_kept_is_measured_where_codes_are_written(dims: ModelDims, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing norms beside codes that are kept may be faster, and only times tell."""
    setup, timed = FP8, list[int]()

    def measured(*_: Any) -> Any:
        timed.append(1)
        return step_times(dims, setup, H100)

    for name, value in (
        ("dims_of", lambda model: dims),
        ("setup_of", lambda *_: setup),
        ("smallest_device", lambda device: H100),
        ("measured_times", measured),
    ):
        monkeypatch.setattr(auto_plan, name, value)
    for gib, written in ((46, True), (60, False)):
        monkeypatch.setattr(auto_plan, "available", lambda device, mapped, gib=gib: gib * GIB)
        made = auto_plan.plan_for(model_of(), 8192)
        assert made.codes_written == written == bool(timed)
        timed.clear()


def test_a_plan_that_is_tightened_still_writes_codes() -> None:
    tighter = tighten(WRITTEN)
    assert tighter is not None and tighter.codes_written


def test_the_command_shows_it_where_codes_are_written(tmp_path: Path) -> None:
    fields = shape_of("Llama-3.1-8B")
    assert fields is not None
    AutoConfig.for_model(**fields).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: {tmp_path}/model, max_seq_length: 2048}}\ndata: {{train: someone/elsewhere}}\n"
        f"precision: {{compute: fp8}}\ntrain: {{output: {tmp_path}/out}}\n"
    )
    for budget, written in (("26GiB", True), ("40GiB", False)):
        arguments = ["plan", str(recipe), f"memory.budget={budget}", "--device", "h100"]
        done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert set(found["plan"]["policies"]) == {"keep"} and found["plan"]["codes_written"] == written
        assert found["work"]["codes"] == "auto"
        text = " ".join(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout.split())
        assert ("8-bit codes written out of 16 bits for each product" in text) == written
        assert f"gradient_checkpointing: {'auto' if written else 'false'}, budget: {budget[:2]}.0GiB" in text
