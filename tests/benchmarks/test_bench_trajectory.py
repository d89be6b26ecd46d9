"""The gate of the loss trajectories: what it takes, and that each of its conditions can turn it red."""

from __future__ import annotations

import math

import pytest

from benchmarks.trajectory import Run, judge

LOSSES = [1.4, 1.1, 0.9, 0.8]


def run(off: float = 0.0, end: float = 0.75) -> Run:
    """A run whose losses are all off by `off`."""
    return Run([loss + off for loss in LOSSES], [1.4, 0.9, end])


def test_as_near_as_sixteen_bits_are() -> None:
    assert judge([run()], [run(0.01, 0.752)], [run(-0.019, 0.7465)])["green"]


def test_differences_within_the_noise_of_seeds() -> None:
    reference, ours = [run(end=0.75), run(end=0.76)], [run(end=0.758), run(end=0.76)]
    found = judge(reference, reference, ours)
    assert found["green"] and found["spread"] == pytest.approx(0.01)
    assert not judge(reference[:1], reference[:1], ours[:1])["green"]


@pytest.mark.parametrize(
    "ours",
    [run(end=0.756), run(end=0.744), run(off=0.023), run(off=-0.023), run(end=math.nan), run(off=math.nan)],
)
def test_one_seed_too_far_off_is_red(ours: Run) -> None:
    found = judge([run(), run()], [run(0.01, 0.752)] * 2, [run(), ours])
    assert not found["green"] and [seed["green"] for seed in found["seeds"]] == [True, False]


def test_a_reference_that_learns_nothing_is_red() -> None:
    assert not judge([run(end=1.31)], [run(end=1.31)], [run(end=1.31)])["green"]
