"""The three-way tolerance of docs/numerics.md."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps


class ThreeWay:
    """error(ours) <= 2 · error(plain) + 4·eps(fp32)·max|reference|, as root mean square and in maximum, for each name.

    The errors of several draws of one quantity are put together before they are compared: a single loss, or the largest
    of a few numbers, is right to four digits or to two by luck alone.
    """

    def __init__(self) -> None:
        self._errors: dict[str, list[dict[str, tuple[float, float, float]]]] = defaultdict(list)

    def add(self, name: str, ours: Tensor, plain: Tensor, reference: Tensor) -> None:
        """One draw.

        Args:
            ours: what is under test.
            plain: the plain path in the same dtype.
            reference: float64 (or float32), computed another way.
        """
        exact = reference.detach().double().cpu()
        assert ours.shape == plain.shape == exact.shape, (name, ours.shape, plain.shape, exact.shape)
        assert torch.isfinite(ours).all(), f"{name}: not finite"
        slack = 4 * EPS * exact.abs().max().item()
        mine, theirs = ((x.detach().double().cpu() - exact).abs() for x in (ours, plain))
        measures = {"rms": lambda e: e.square().mean().sqrt().item(), "max": lambda e: e.max().item()}
        self._errors[name].append({norm: (of(mine), of(theirs), slack) for norm, of in measures.items()})

    def check(self) -> None:
        """Raise AssertionError for the first name that is outside."""
        for name, draws in self._errors.items():
            for norm in ("rms", "max"):
                mine, theirs, slack = (
                    _root_mean_square(values) for values in zip(*(d[norm] for d in draws), strict=True)
                )
                assert mine <= 2 * theirs + slack, f"{name}: {norm} error {mine:.3e} > {2 * theirs + slack:.3e}"


def assert_three_way(name: str, ours: Tensor, plain: Tensor, reference: Tensor) -> None:
    """`ThreeWay` of one draw."""
    errors = ThreeWay()
    errors.add(name, ours, plain, reference)
    errors.check()


def _root_mean_square(values: tuple[float, ...]) -> float:
    return (sum(value**2 for value in values) / len(values)) ** 0.5
