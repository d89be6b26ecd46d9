"""What several GPUs take is counted by rank, and the strategy chosen by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import GIB, NF4_BYTES, MemoryModel, ModelDims, TrainSetup, resting_bytes
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.planner import PlanDoesNotFit
from pronghorn.memory.step_time import step_times
from pronghorn.memory.strategies import Choice, Strategy, choose
from support.shapes import dims_of_shape

H100, H200, RTX4090 = (device_spec(name) for name in ("h100", "h200", "rtx4090"))


@pytest.fixture(scope="module")
def dims() -> ModelDims:
    """Those of Llama-3.1-8B."""
    return dims_of_shape("Llama-3.1-8B")


def of(choice: Choice, strategy: Strategy) -> Any:
    return next(each for each in choice.candidates if each.strategy is strategy)


def at_peak(choice: Choice) -> dict[str, float]:
    """Return a rank's bytes by kind."""
    predicted = choice.chosen.plan.predicted  # type: ignore[union-attr]
    return {kind: size for kind, size in predicted.items() if kind not in ("peak", "process", "step_ms")}


@pytest.mark.parametrize(
    ("device", "method", "gpus", "strategy"),
    [
        (H200, "lora", 2, Strategy.COPIES),
        (RTX4090, "qlora", 2, Strategy.COPIES),
        (device_spec("h20"), "lora", 8, Strategy.COPIES),
        (device_spec("rtx4060ti-16"), "lora", 4, Strategy.SHARDED),
    ],
    ids=str,
)
def test_copies_are_chosen_where_they_fit_and_shards_elsewhere(
    dims: ModelDims, device: Any, method: Any, gpus: int, strategy: Strategy
) -> None:
    choice = choose(dims, TrainSetup(2048, method), device, gpus)
    assert choice.chosen.strategy is strategy, choice.why
    assert [each.strategy for each in choice.candidates] == list(Strategy)
    assert choice.chosen.process_bytes <= device.memory_bytes
    assert (of(choice, Strategy.COPIES).plan is None) == (strategy is Strategy.SHARDED)
    assert sum(at_peak(choice).values()) == choice.chosen.plan.predicted["peak"]  # type: ignore[union-attr]


def test_a_strategy_that_is_asked_for_is_planned_or_refused_with_what_fits(dims: ModelDims) -> None:
    asked = choose(dims, TrainSetup(8192), H200, 2, strategy=Strategy.SHARDED)
    assert asked.chosen.strategy is Strategy.SHARDED and asked.why == "asked for"
    with pytest.raises(PlanDoesNotFit, match=r"on 2 GPUs \(copies\).*--strategy sharded.*model\.load_in_4bit: true"):
        choose(dims, TrainSetup(2048), device_spec("rtx4060ti-16"), 2, strategy=Strategy.COPIES)


@pytest.mark.parametrize("strategy", Strategy)
def test_integers_are_advised_fp8_where_that_fits_or_is_shared(dims: ModelDims, strategy: Strategy) -> None:
    setup = TrainSetup(8192, fp8=True, fp8_forward=False, int8=True, unshared="int8 needs whole weights")
    with pytest.raises(PlanDoesNotFit, match=r"on 2 GPUs.*fits: .*precision\.compute: fp8"):
        choose(dims, setup, device_spec("rtx4090"), 2, strategy=strategy)
    with pytest.raises(PlanDoesNotFit) as refused:  # Ampere, which has none
        choose(dims, setup, device_spec("a10"), 2, strategy=strategy)
    assert "fp8" not in refused.value.remedy


def test_what_is_not_shared_has_copies_or_nothing(dims: ModelDims) -> None:
    setup: TrainSetup = TrainSetup(8192, "full", unshared="train.optimizer adafactor needs whole weights")
    with pytest.raises(PlanDoesNotFit, match=r"on 2 GPUs \(sharded\), train.optimizer adafactor needs whole"):
        choose(dims, setup, H200, 2, strategy=Strategy.SHARDED)
    with pytest.raises(PlanDoesNotFit, match=r"on 2 GPUs \(copies\)") as refused:
        choose(dims, setup, H100, 2, budget_bytes=8 * GIB)
    assert "sharded" not in str(refused.value)
    experts: TrainSetup = TrainSetup(8192, fp8=True, fp8_experts=True)
    chosen = choose(dims, experts, H100, 2, strategy=Strategy.SHARDED).chosen
    assert not chosen.work.fp8_experts, "they multiply in the model's dtype"


def test_full_fine_tuning_of_8b_takes_the_memory_that_was_measured(dims: ModelDims) -> None:
    """On one GPU (ranks-llama-3.1-8b-full.json); ten layers on one and two (ranks-blocks-of-nccl.json)."""
    setup = TrainSetup(8192, "full", accumulates=False, documents=180)
    for layers, processes, measured in ((32, 1, 148.191e9), (10, 1, 58.104e9), (10, 2, 47.198e9)):
        work = replace(setup, processes=processes, distributed=processes > 1)
        shown = replace(dims, layers=dims.layers[:layers])
        peak = sum(MemoryModel.of(shown, work).peak([Policy.KEEP] * layers).values())
        assert peak == pytest.approx(measured, rel=0.03)


def test_where_nothing_fits_more_gpus_and_4_bits_are_named(dims: ModelDims) -> None:
    with pytest.raises(PlanDoesNotFit, match=r"on 2 GPUs \(sharded\).*--gpus \d+.*model\.load_in_4bit: true"):
        choose(dims, TrainSetup(2048), H100, 2, budget_bytes=int(8.5 * GIB))


def test_layers_are_shared_and_all_else_is_whole(dims: ModelDims) -> None:
    lora = TrainSetup(512, distributed=True)
    whole, parts = resting_bytes(dims, lora), resting_bytes(dims, replace(lora, processes=4))
    assert {kind for kind in whole if whole[kind] != parts[kind]} == {"weights"}
    layer = 2 * dims.layers[0].parameters
    assert parts["gathered"] == 2 * layer
    assert parts["weights"] == 2 * dims.outside + 32 * layer // 4


def test_of_trained_layers_all_that_lasts_is_shared(dims: ModelDims) -> None:
    full = TrainSetup(512, "full", distributed=True)
    whole, parts = resting_bytes(dims, full), resting_bytes(dims, replace(full, processes=4))
    layer = 4 * dims.layers[0].parameters
    held = 4 * dims.outside + 32 * layer // 4
    narrow = 2 * dims.layers[0].linear_weights  # bytes that 16 bits save
    assert parts["weights"] == held and parts["gathered"] == 2 * (layer - narrow)
    assert parts["optimizer"] == 2 * held and whole["optimizer"] == 8 * dims.parameters
    assert parts["gradients"] == held + 2 * layer + layer // 4
    once = resting_bytes(dims, replace(full, processes=4, accumulates=False))
    assert parts["gradients"] - once["gradients"] == 4 * dims.outside, "what lies outside comes with the backward"
    copied = resting_bytes(dims, replace(full, processes=4, copy_trained=True))
    assert copied["gathered"] - parts["gathered"] == 2 * 32 * dims.layers[0].linear_weights // 4
    assert copied["gradients"] - parts["gradients"] == layer // 4
    choice = choose(dims, TrainSetup(8192, "full"), H200, 2)
    assert choice.chosen.work.copy_trained and choice.chosen.step_ms == pytest.approx(735, rel=0.02)
    budget = choice.chosen.process_bytes - GIB
    tight = choose(dims, TrainSetup(8192, "full"), H200, 2, budget_bytes=budget, asked=Plan.keep()).chosen
    assert not tight.work.copy_trained and tight.step_ms > choice.chosen.step_ms
    assert choice.chosen.strategy is Strategy.SHARDED and choice.why.startswith("copies don't fit")
    assert choice.chosen.communication_ms < 75, "with gathers in float32 it was 90: 806 ms where one GPU took 716"
    slow = choose(dims, TrainSetup(8192, "full"), replace(H200, link=1e10), 2).chosen
    part = 0.5 * 1e3 / 1e10
    all_that_travels = part * (32 * (2 * (layer - narrow) + layer) + 2 * 4 * dims.outside)
    assert 0.8 * all_that_travels < slow.communication_ms < all_that_travels


def test_4_bits_are_gathered_as_they_are_stored(dims: ModelDims) -> None:
    bf16, nf4 = (choose(dims, TrainSetup(2048, m), H200, 2, strategy=Strategy.SHARDED) for m in ("lora", "qlora"))
    spared = 2 * dims.layers[0].linear_weights * (2 - NF4_BYTES)  # of two layers; embedding and head stay in 16 bits
    assert at_peak(bf16)["gathered"] - at_peak(nf4)["gathered"] == pytest.approx(spared, abs=4)


def test_of_weights_that_multiply_in_8_bits_these_alone_are_held_and_gathered(dims: ModelDims) -> None:
    bf16, fp8 = (
        choose(dims, TrainSetup(2048, fp8=in_fp8), H200, 2, strategy=Strategy.SHARDED) for in_fp8 in (False, True)
    )
    linear, rows = dims.layers[0].linear_weights, sum(each.out for each in dims.layers[0].linears)
    assert at_peak(bf16)["gathered"] - at_peak(fp8)["gathered"] == 2 * linear
    held = 32 * linear // 2 - 32 * 6 * rows  # a byte of two, in half of the weights; scales of rows are whole
    assert at_peak(bf16)["weights"] - at_peak(fp8)["weights"] == pytest.approx(held, abs=8)


def test_codes_that_are_written_out_for_each_product_leave_scales_alone(dims: ModelDims) -> None:
    rows, linear = 32 * sum(each.out for each in dims.layers[0].linears), dims.layers[0].linear_weights
    for method, forward in (("lora", False), ("qlora", False), ("qlora", True)):
        fp8 = TrainSetup(2048, "lora" if method == "lora" else "qlora", fp8=True, fp8_forward=forward)
        plain, coded = (
            choose(dims, setup, H200, 2, strategy=Strategy.SHARDED) for setup in (replace(fp8, fp8=False), fp8)
        )
        assert at_peak(coded)["weights"] - at_peak(plain)["weights"] == 10 * rows
        assert at_peak(coded)["gathered"] == at_peak(plain)["gathered"]
    one, shared = (step_times(dims, TrainSetup(2048, fp8=True, fp8_forward=False, processes=n), H200) for n in (1, 2))
    assert shared.layers[0].forward == one.layers[0].forward
    read_and_written = 3 * linear / H200.bandwidth * 1e3  # an elementwise kernel has 3/4 of a copy's rate
    assert shared.layers[0].backward - one.layers[0].backward == pytest.approx(read_and_written / 0.75, rel=0.01)


def test_slow_links_are_waited_for(dims: ModelDims) -> None:
    waits = [
        choose(dims, TrainSetup(8192), replace(H200, link=rate), 2, strategy=Strategy.SHARDED).chosen.communication_ms
        for rate in (1e12, 3.375e11, 2e10, 1e9)
    ]
    assert waits == sorted(waits) and waits[1] == pytest.approx(14.3, rel=0.1) and waits[3] > 1000
    compute = choose(dims, TrainSetup(8192), H200, 2).chosen
    once, four = (choose(dims, TrainSetup(8192), H200, 2, micro_batches=n).chosen for n in (1, 4))
    assert compute == once and four.communication_ms == once.communication_ms, "copies average once a step"


def test_inputs_of_all_ranks_share_the_hosts_memory(dims: ModelDims) -> None:
    setup: TrainSetup = TrainSetup(32768)
    tables: dict[str, Any] = {"budget_bytes": 32 * GIB, "strategy": Strategy.COPIES}
    free = choose(dims, setup, H200, 8, **tables).chosen
    assert free.plan is not None and Policy.OFFLOAD in free.plan.policies
    assert free.host_bytes == 8 * (free.plan.policies.count(Policy.OFFLOAD) - 1) * 32768 * 4096 * 2
    tight = choose(dims, setup, H200, 8, **tables, host_memory_bytes=GIB).chosen
    assert tight.plan is not None and Policy.OFFLOAD not in tight.plan.policies and tight.host_bytes == 0
    assert tight.step_ms > free.step_ms
    with pytest.raises(PlanDoesNotFit, match=r"host's memory.*--strategy sharded"):
        choose(dims, setup, H200, 8, budget_bytes=28 * GIB, strategy=Strategy.COPIES, host_memory_bytes=GIB)


def test_two_h200s_as_they_were_measured(dims: ModelDims) -> None:
    """8B LoRA by DDP: 35,537 tokens/s, where one GPU had 18,651."""
    one = 8192 / 18651 * 1e3
    chosen = choose(dims, TrainSetup(8192, documents=180), H200, 2).chosen
    assert chosen.strategy is Strategy.COPIES
    assert 2 * 8192 / (one + chosen.communication_ms) * 1e3 == pytest.approx(35537, rel=0.1)
