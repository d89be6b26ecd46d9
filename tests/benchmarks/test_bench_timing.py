"""Timing logic with a fake clock, whose turn it is, and what the repeats say."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import counts
from benchmarks.timing import HostClock, by_part, ratio, schedule, spread, timed_step


class Time:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def work(self, milliseconds: float) -> Any:
        def run() -> None:
            self.seconds += milliseconds / 1e3

        return run


def test_a_step_is_its_parts() -> None:
    time = Time()
    step = timed_step([time.work(3), time.work(5), time.work(1)], HostClock(time.now))
    assert step == pytest.approx({"forward": 3, "backward": 5, "optimizer": 1, "step": 9})


def test_turns_alternate_and_each_gets_all_repeats() -> None:
    turns = list(schedule(["a", "b"], repeats=10, steps_a_turn=4))
    assert turns == [("a", 4), ("b", 4), ("a", 4), ("b", 4), ("a", 2), ("b", 2)]


def test_a_slowing_machine_does_not_change_the_ratio() -> None:
    """B takes twice as long as A while everything gets slower with every turn; measured one after the other it would
    seem to take three times as long."""
    slowness, turns = 1.0, {"a": [], "b": []}  # type: ignore[var-annotated]
    for name, steps in schedule(["a", "b"], 40):
        slowness *= 1.05
        turns[name].append([{"step": slowness * {"a": 10.0, "b": 20.0}[name]}] * steps)
    assert sum(map(len, turns["a"])) == sum(map(len, turns["b"])) == 40
    assert ratio(turns["b"], turns["a"]) == pytest.approx((2.1, 2.1, 2.1))


def test_a_ratio_is_of_neighbouring_turns_by_their_medians() -> None:
    def series(*turns: list[float]) -> list[list[dict[str, float]]]:
        return [[{"step": ms} for ms in turn] for turn in turns]

    first = series([10, 10, 99], [20, 20, 20], [10, 10, 10])
    other = series([20, 20, 20], [30, 30, 30], [10, 10, 999])
    assert ratio(other, first) == (1.5, 1.0, 2.0)


def test_spread_and_every_repeat_by_part() -> None:
    assert spread([3.0, 1.0, 2.0, 9.0]) == (2.5, 1.0, 9.0)
    step = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "step": 3.5}
    expected = {"forward": [1.0] * 3, "backward": [2.0] * 3, "optimizer": [0.5] * 3, "step": [3.5] * 3}
    assert by_part([[step], [step, step]]) == expected
    assert by_part([]) == {}


def test_time_on_the_device_is_that_of_the_device_s_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes each event's device type anew."""
    cpu, cuda = (
        torch.autograd.DeviceType(int(kind)) for kind in (torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA)
    )
    events = [
        SimpleNamespace(key="cudaLaunchKernel", count=3, device_type=cpu, self_device_time_total=0),
        SimpleNamespace(key="a kernel", count=3, device_type=cuda, self_device_time_total=2500),
        SimpleNamespace(key="Memcpy", count=1, device_type=cuda, self_device_time_total=500),
    ]
    profile = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(profile))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert counts.profile_step(lambda: None) == {"launches": 3, "device_ms": 3.0}


@pytest.mark.gpu
def test_multiprocessors_clock() -> None:
    """Of a card that works: what it counts is of this order, and of two stretches one after the other alike."""
    import torch

    from benchmarks import sm_clock

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    marks = []
    for _ in range(3):
        marks.append(sm_clock.mark(x.device))
        for _ in range(200):
            x @ x
    clocks = [sm_clock.megahertz(begin, end) for begin, end in itertools.pairwise(marks)]
    assert all(300 < each < 4000 for each in clocks) and clocks[1] == pytest.approx(clocks[0], rel=0.3)
