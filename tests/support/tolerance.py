"""The three-way rule of `pronghorn.parity.distance` as assertions, over one draw or several."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from pronghorn.parity.distance import THREE_WAY, errors, l2


class ThreeWay:
    """Collect errors by name, and assert that each is within the rule, as root mean square and in maximum.

    The errors of several draws of one quantity are put together before they are compared: a single loss, or the largest
    of a few numbers, is right to four digits or to two by chance alone.
    """

    def __init__(self) -> None:
        self._draws: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def add(self, name: str, ours: Tensor, plain: Tensor, reference: Tensor) -> None:
        """Add one draw.

        Args:
            ours: what is under test.
            plain: the plain path in the same dtype.
            reference: float64 (or float32), computed another way.
        """
        ours, plain, exact = (x.detach().double().cpu() for x in (ours, plain, reference))
        assert ours.shape == plain.shape == exact.shape, (name, ours.shape, plain.shape, exact.shape)
        assert torch.isfinite(ours).all(), f"{name}: not finite"
        self._draws[name].append((*errors(ours, exact), *errors(plain, exact), exact.abs().max().item()))

    def judge(self, draw: Callable[[int], None], draws: int, most: int) -> None:
        """Check the first draws together and, where these are outside, `most` of them: a few may be outside by luck,
        and all of what is really less exact stay so.

        Args:
            draw: adds one draw, by its number.
        """
        for number in range(draws):
            draw(number)
        try:
            self.check()
        except AssertionError:
            for number in range(draws, most):
                draw(number)
            self.check()

    def check(self) -> None:
        """Raise AssertionError for the first name that is outside."""
        for name, draws in self._draws.items():
            rms, maximum, plain_rms, plain_maximum, largest = (
                l2(torch.tensor(column, dtype=torch.float64)) / math.sqrt(len(draws))
                for column in zip(*draws, strict=True)
            )
            for norm, error, plain in (("rms", rms, plain_rms), ("max", maximum, plain_maximum)):
                limit = THREE_WAY.limit(plain, largest)
                assert error <= limit, f"{name}: {norm} error {error:.3e} > {limit:.3e}"


def assert_three_way(name: str, ours: Tensor, plain: Tensor, reference: Tensor) -> None:
    """Assert the rule for one draw."""
    draw = ThreeWay()
    draw.add(name, ours, plain, reference)
    draw.check()
