"""`benchmarks.ops`: the gate stops what computes something else, each op's ways agree, the command on the CPU."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import ops
from benchmarks.op_case import Case, Draw, OpCandidate, Way, by_autograd, judge
from benchmarks.op_cases import GATE_ROWS, linear_loss_case
from benchmarks.op_list import OPS, cases
from benchmarks.ops import OpsOptions, Stopwatch, bench_ops, measure
from benchmarks.record import read_results
from benchmarks.timing import HostClock
from pronghorn.parity.distance import distance
from support import programs

EVERY = [(op, index) for op, (_, _, tiny) in OPS.items() for index in range(len(tiny))]


def a_case(op: str, index: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    return list(cases(op, 32, "cpu", dtype).values())[index]()


def invoke(*arguments: object) -> Any:
    return programs.invoke(ops, *arguments)


# --- the gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "index"), EVERY)
def test_kernels_pass(op: str, index: int, dtype: torch.dtype) -> None:
    case = a_case(op, index, dtype)
    candidate = OpCandidate("pronghorn", case.pronghorn)
    judge(case, [candidate])
    assert candidate.gate["green"], candidate.gate["reasons"]
    assert set(candidate.gate["errors"]) >= set(case.names)


def planted(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Case], Way]:
    """Pronghorn's way with its results changed."""

    def make(case: Case) -> Way:
        way = case.pronghorn(case)

        def results(state: Any, grads: Any) -> dict[str, Tensor]:
            found = {
                name: x.detach().clone(memory_format=torch.contiguous_format)
                for name, x in way.results(state, grads).items()
            }
            change(found)
            return found

        return replace(way, results=results)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "index"), EVERY)
def test_defects_in_any_result_are_caught(op: str, index: int, dtype: torch.dtype) -> None:
    case = a_case(op, index, dtype)
    for name in case.names:
        wrong = OpCandidate("wrong", planted(lambda found, name=name: found[name].mul_(1.05)))
        lost = OpCandidate("lost", planted(lambda found, name=name: found.pop(name)))
        unwritten = OpCandidate(
            "unwritten", planted(lambda found, name=name: found[name].view(-1)[-1:].fill_(torch.nan))
        )
        judge(case, [wrong, lost, unwritten])
        for candidate in (wrong, lost, unwritten):
            assert not candidate.gate["green"] and candidate.gate["reasons"][0].startswith(name), candidate.gate[
                "reasons"
            ]


def test_defects_of_the_mathematics_are_caught() -> None:
    """An activation without its derivative's second term; a sine of the wrong sign; a softmax without its label."""
    swiglu, rope, loss = a_case("swiglu"), a_case("rope"), a_case("cross_entropy")

    def half(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate * torch.sigmoid(gate).detach() * up

    def turned(qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return rope.formula(qkv, cos, -sin)

    def label_forgotten(case: Case) -> Way:
        return planted(lambda found: found["d logits"].clamp_(min=0))(case)

    for case, make, name in (
        (swiglu, lambda case: by_autograd(case, half), "d gate_up"),
        (rope, lambda case: by_autograd(case, turned), "q"),
        (loss, label_forgotten, "d logits"),
    ):
        candidate = OpCandidate("wrong", make)
        judge(case, [candidate])
        assert not candidate.gate["green"] and candidate.gate["reasons"][0].startswith(f"{name} is off")


def test_who_raises_fails_alone() -> None:
    case = a_case("rms_norm")

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel\nat line 3")

    candidates = [
        OpCandidate("broken", lambda some: by_autograd(some, broken)),
        OpCandidate("pronghorn", case.pronghorn),
    ]
    judge(case, candidates)
    assert candidates[0].gate == {"green": False, "reasons": ["RuntimeError: no such kernel"]}
    assert candidates[1].gate["green"]


def test_linear_cross_entropy_is_judged_on_fewer_rows_but_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = linear_loss_case(Draw("cpu", torch.float32), GATE_ROWS + 1, 8, 16)
    assert case.small is not None and case.small.tokens == GATE_ROWS and case.small.small is None
    monkeypatch.setattr("pronghorn.kernels.linear_cross_entropy.CHUNK_BYTES", 1024 * 16 * 4)
    candidate, *_ = measure(case, (), 1, Stopwatch("cpu"), "cpu")
    assert candidate.gate["green"] and candidate.gate["tokens"] == GATE_ROWS


def test_three_way() -> None:
    exact = torch.tensor([1.0, -4.0], dtype=torch.float64)
    plain = exact.float() + torch.tensor([0.0, 0.25])
    found, off = (distance("", exact.float() + error, plain, exact) for error in (0.5, 0.51))
    assert found.maximum == 0.5 and found.maximum_limit == pytest.approx(0.5, abs=1e-5)
    assert found.maximum <= found.maximum_limit < off.maximum
    assert not distance("", exact.float() * torch.nan, plain, exact).excess <= 1
    assert distance("", exact.float(), plain, exact, slack=0.5).rms_limit > 2


# --- times


def test_parts_are_timed_apart_and_inputs_are_not() -> None:
    seconds = 0.0

    def work(milliseconds: float) -> Callable[..., Any]:
        def run(*_: Any) -> None:
            nonlocal seconds
            seconds += milliseconds / 1e3

        return run

    watch = Stopwatch("cpu")
    watch._clock = HostClock(lambda: seconds)
    way = Way(work(100), work(3), work(5), lambda *_: {}, (1, 1))
    assert watch.timed(way) == pytest.approx({"forward": 3, "backward": 5, "step": 8})
    assert watch.timed(replace(way, backward=None)) == pytest.approx({"forward": 3, "step": 3})


def test_who_raises_while_timed_loses_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.kernels import glu

    case, whole, calls = a_case("swiglu"), glu.forward, []

    def tires(*arguments: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 5:  # in the second timed round
            raise RuntimeError("out of breath")
        return whole(*arguments)

    monkeypatch.setattr(glu, "forward", tires)
    pronghorn, plain = measure(case, (), 4, Stopwatch("cpu"), "cpu")
    assert pronghorn.gate["reasons"] == ["RuntimeError: out of breath"] and not pronghorn.timings
    assert plain.gate["green"] and len(plain.timings["step"]) == 4


def test_a_case_that_fails_as_a_whole_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs don't fit, nor the float64 that it is judged by; whoever cuts the run off leaves what was there."""

    def too_large(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    def cut_off(*_: Any) -> Any:
        raise KeyboardInterrupt

    out, sizes = tmp_path / "ops.json", ((too_large, (64,)), (OPS["geglu"][0], (64,)), (cut_off, (64,)))
    for name, (make, shape) in zip(("swiglu", "geglu", "rope"), sizes, strict=True):
        monkeypatch.setitem(OPS, name, (make, (), (shape,)))
    done = invoke("--op", "swiglu", "--op", "geglu", "--tokens", 8, "--repeats", 1, "--out", out)
    assert done.exit_code == 1 and "pronghorn: OutOfMemoryError: no room (swiglu, 8, 64 bfloat16)" in done.output
    assert [(r.workload.method, r.gate["green"]) for r in read_results(out)] == [
        ("swiglu", False), ("geglu", True), ("geglu", True)
    ]  # fmt: skip
    earlier = out.read_text()
    invoke("--op", "geglu", "--op", "rope", "--tokens", 8, "--repeats", 1, "--out", out)
    assert [r.workload.method for r in read_results(tmp_path / "ops.json.unfinished")] == ["geglu", "geglu"]
    assert out.read_text() == earlier


def test_without_room_for_the_ceiling_times_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ops, "measure_ceilings", too_large)
    pronghorn, _ = measure(a_case("swiglu"), (), 2, Stopwatch("cpu"), "cpu")
    assert pronghorn.timings["step"] and "no ceiling: OutOfMemoryError: no room" in pronghorn.notes


def held_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Stopwatch, list[int]]:
    """A stopwatch of a device that waits a millisecond for each HEAD_START of cycles, and the cycles it waited."""
    waited: list[int] = []
    watch = Stopwatch("cpu")
    watch._clock = HostClock(lambda: sum(waited) / ops.HEAD_START / 1e3)
    watch._flush = torch.empty(1)
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append)
    return watch, waited


def test_the_device_waits_until_the_host_has_launched_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula of grouped products launches one an expert: more than the head start of one that launches a few."""
    watch, waited = held_device(monkeypatch)
    monkeypatch.setattr(ops.time, "perf_counter", lambda: 0.0)
    few, many = a_case("swiglu"), a_case("grouped_lora")
    for case in (few, many):
        watch.timed(case.pronghorn(case), case.calls)
    assert waited == [ops.HEAD_START] * 2 + [ops.HEAD_START + 6 * 8 * ops.OF_A_CALL] * 2


@pytest.mark.parametrize(("launching", "waits"), [(0.5, [1]), (3, [1, 2, 4]), (100, [1, 2, 4, 8])])
def test_where_the_host_was_late_the_device_waits_longer(
    monkeypatch: pytest.MonkeyPatch, launching: float, waits: list[int]
) -> None:
    """On a busy machine the figure would be the host's."""
    watch, waited = held_device(monkeypatch)
    now = 0.0

    def launch(_: Any) -> None:
        nonlocal now
        now += launching / 1e3

    monkeypatch.setattr(ops.time, "perf_counter", lambda: now)
    begun: list[int] = []
    watch.timed(Way(lambda: begun.append(1), launch, None, lambda *_: {}, (1, 1)))
    assert waited == [ops.HEAD_START * each for each in waits] and len(begun) == len(waits)  # fresh inputs each time
    assert watch.late is (launching > ops.LONGER[-1])


def test_times_of_a_late_host_say_so() -> None:
    class Late(Stopwatch):
        def timed(self, way: Way, calls: int = 0) -> dict[str, float]:
            self.late = way is slow
            return super().timed(way, calls) if not self.late else {"forward": 1.0, "step": 1.0}

    case = a_case("swiglu")
    slow = case.pronghorn(case)
    pronghorn, plain = measure(replace(case, pronghorn=lambda _: slow), (), 3, Late("cpu"), "cpu")
    assert pronghorn.notes.count(ops.LATE) == 1 and ops.LATE not in plain.notes


def test_a_figure_is_work_over_time_and_its_share_of_the_copy() -> None:
    case = a_case("swiglu")
    candidate = OpCandidate("pronghorn", case.pronghorn, gate={"green": True, "reasons": [], "errors": {}})
    candidate.timings = {"forward": [2.0, 1.0, 4.0], "backward": [5.0], "step": [7.0, 6.0, 9.0]}
    candidate.work, candidate.ceiling_ms = {"forward": 8e6, "backward": 20e6}, {"forward": 1.5}
    result = ops.result_of(case, candidate, OpsOptions(), "cuda")
    assert result.extra["reached"] == {"forward": 4.0, "backward": 4.0}  # GB/s
    assert result.extra["share_of_ceiling"] == {"forward": 0.75}
    assert result.ceilings == pytest.approx({"copy_bytes_per_s_forward": 8e6 / 1.5e-3})


def test_bytes_that_must_move() -> None:
    """gate and up in, a out; then a's gradient with gate and up in, theirs and a again out."""
    case = a_case("swiglu")
    unit = 32 * 64 * 4
    assert case.pronghorn(case).work == (3 * unit, 6 * unit) and case.work == (3 * unit, 5 * unit)
    logits = a_case("cross_entropy")
    assert logits.pronghorn(logits).work == (2 * 32 * 256 * 4, 0)


def test_bytes_that_experts_must_move() -> None:
    """32 tokens of 64 numbers become 64 rows, by an index; back, the sum of each token's two."""
    gather = a_case("moe_gather")
    assert gather.work == (4 * (32 * 64 + 64 * 64 + 64),) * 2
    combine = a_case("moe_combine")
    assert combine.work == (4 * (64 * 64 + 32 * 64 + 2 * 64), 0)
    glu, rows = a_case("moe_glu"), 4 * 64 * 64
    assert glu.work == (3 * rows + 2 * 4 * 64, 5 * rows + 2 * 4 * 64)
    assert glu.pronghorn(glu).work == (glu.work[0], glu.work[1] + rows)  # a again
    route = a_case("moe_route")
    assert route.work == (8 * 64 + 4 * (4 * 64 + 8), 0)


def test_what_only_runs_forward_has_no_gradients() -> None:
    case = a_case("residual_lora")
    way = by_autograd(case, case.formula)
    assert way.backward is None and set(way.results(way.forward(way.start()), ())) == {"out"}
    (pronghorn, *_) = measure(case, (), 2, Stopwatch("cpu"), "cpu")
    assert set(pronghorn.timings) == {"forward", "step"} and not any("forward" in note for note in pronghorn.notes)


def test_rows_of_experts_are_multiplied_with_their_own() -> None:
    """The next expert's weights, another token's rows, router weights or experts: all are caught."""
    for op, change in (
        ("grouped_gemm", lambda x, weight: (x, weight.roll(1, 0))),
        ("grouped_lora", lambda a, b, x, y: (a, b.roll(1, 0), x, y)),
        ("moe_gather", lambda x: (x.roll(1, 0),)),
        ("moe_combine", lambda y, w, *bias: (y, w.roll(1, 0), *bias)),
        ("moe_glu", lambda h, w, *bias: (h, w.roll(1, 1), *bias)),
        ("moe_route", lambda index: (index.roll(1, 0),)),
    ):
        case = a_case(op, 1)

        def wrong(case: Case, change: Any = change) -> Way:
            return by_autograd(case, lambda *inputs: case.formula(*change(*inputs)))

        candidate = OpCandidate("wrong", wrong)
        judge(case, [candidate])
        assert any("is off" in reason for reason in candidate.gate["reasons"]), op


# --- the command


def test_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    done = invoke("--repeats", 2, "--tokens", 16, "--out", out, "--commit", "abc1234")
    assert done.exit_code == 0, done.output
    assert "On the CPU: says that it works" in done.output and "its Triton kernel needs a GPU" in done.output
    results = read_results(out)
    assert {r.workload.method for r in results} == set(OPS) and {r.candidate for r in results} == {"pronghorn", "torch"}
    for result in results:
        assert result.gate["green"] and result.extra["on_cpu"] and result.commit == "abc1234"
        assert len(result.timings_ms["step"]) == len(result.timings_ms["forward"]) == 2
        assert result.extra["reached"]["forward"] > 0 < result.extra["share_of_ceiling"]["forward"]
    assert len({(r.workload.method, r.workload.shape, r.candidate) for r in results}) == len(results)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula that torch.compile traces; its own backend builds C++ for the CPU, which takes most of a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    results = bench_ops(OpsOptions(("swiglu",), 16, "float32", 1, ("compile",)), lambda _: None, lambda _: None)
    compiled = [result for result in results if result.candidate == "compile"]
    assert len(compiled) == 2 and all(result.gate["green"] and result.timings_ms["backward"] for result in compiled)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger_kernel is installed")
def test_liger_missing(tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    done = invoke("--op", "swiglu", "--against", "liger", "--repeats", 1, "--tokens", 8, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.output.count("liger: not installed: pip install liger-kernel") == 1
    missing = [result for result in read_results(out) if result.candidate == "liger"]
    assert len(missing) == 2 and not any(result.gate["green"] or result.timings_ms for result in missing)


def test_a_failed_kernel_is_shown_without_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda gate_up, activation: gate_up.chunk(2, -1)[0] * 1.0  # noqa: E731
    monkeypatch.setattr("pronghorn.kernels.glu.forward", wrong)
    out = tmp_path / "ops.json"
    done = invoke("--op", "swiglu", "--repeats", 1, "--tokens", 8, "--out", out)
    assert done.exit_code == 1
    assert "FAILED" in done.output and "a is off: rms error" in done.output and "(swiglu, 8x64 bfloat16)" in done.output
    failed = [result for result in read_results(out) if result.candidate == "pronghorn"]
    assert all(not result.gate["green"] and not result.timings_ms and not result.extra["reached"] for result in failed)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--op", "softmax"], "--op softmax is unknown"),
        (["--op", "softmax"], f"use {', '.join(OPS)}"),
        (["--against", "liger,apex"], "use compile, liger"),
        (["--tokens", "0"], "--tokens 0 is below 1"),
        (["--repeats", "-1"], "--repeats -1 is below 1"),
    ],
)
def test_bad_input(arguments: list[str], problem: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 1 and problem in done.output


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_every_kernel_passes_on_a_gpu(op: str) -> None:
    results = bench_ops(OpsOptions((op,), 1024, repeats=1, against=()), lambda _: None, lambda _: None)
    wrong = [(r.candidate, r.workload.shape, r.gate["reasons"]) for r in results if not r.gate["green"]]
    assert not wrong, "\n".join(map(str, wrong))  # pytest cuts a long list off


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    done = invoke("--op", "rms_norm", "--op", "rope", "--op", "swiglu", "--tokens", 4096, "--repeats", 5, "--out", out)
    assert done.exit_code == 0, done.output
    for result in (result for result in read_results(out) if result.candidate in ("pronghorn", "torch", "compile")):
        assert result.gate["green"] and not result.extra["on_cpu"], result.gate["reasons"]
        shares = result.extra["share_of_ceiling"].values()  # of units only: others may use the GPU meanwhile
        assert all(0 < share < 10 for share in shares), result.extra
