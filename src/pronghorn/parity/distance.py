"""How far a tensor is from what is right, and how far it may be (docs/numerics.md), as root mean square and in maximum:

error(ours, exact) ≤ 2 · error(plain, exact) + 4 · eps(float32) · max|exact|
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

EPS = 2.0**-23
"""Of float32."""


@dataclass(frozen=True)
class Distance:
    """How far a tensor is from exact, and how far it may be."""

    name: str
    rms: float
    rms_limit: float
    maximum: float
    maximum_limit: float
    relative: float
    """L2 error over the L2 norm of exact."""
    plain_relative: float
    cosine: float

    @property
    def excess(self) -> float:
        """The larger of both errors over its limit; infinite where something isn't finite."""
        return max(ratio(self.rms, self.rms_limit), ratio(self.maximum, self.maximum_limit))


@dataclass(frozen=True)
class Luck:
    """What plain's errors are like in other tensors, where it may have had luck with one: of 800 sound gradients in
    bf16 one had 2.2 times its own plain's maximum, and single tensors of trained models 1.9 times its L2 error."""

    typical: dict[str, float]
    """By kind of tensor (its name without the layer): the median over layers of plain's relative L2 error."""
    crest: float
    """The largest ratio of a maximum to its root mean square."""

    @classmethod
    def of(cls, plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Luck:
        """From the gradients of two passes, by name."""
        found = [distance(name, plain[name], plain[name], right) for name, right in exact.items()]
        kinds: dict[str, list[float]] = {}
        for each in found:
            if math.isfinite(each.relative):
                kinds.setdefault(kind_of(each.name), []).append(each.relative)
        crests = filter(math.isfinite, (ratio(each.maximum, each.rms) for each in found))
        typical = {kind: median(errors) for kind, errors in kinds.items()}
        return cls(typical, max(crests, default=1.0))


def distance(
    name: str, ours: Tensor, plain: Tensor, exact: Tensor, luck: Luck | None = None, slack: float = 0.0
) -> Distance:
    """Compare three tensors of one shape; `exact` is float32 or float64. Plain's error counts as at least `luck`'s.

    Args:
        slack: allowed beside the roundings, relative to the largest: for averages, of whose two errors luck decides
            which is larger.
    """
    right = exact.double() if exact.numel() < 2**24 else exact.float()
    ours, plain = ours.to(right.dtype), plain.to(right.dtype)
    norm, largest, each = l2(right), right.abs().max().item(), math.sqrt(right.numel())
    errors = [l2(x - right) for x in (ours, plain)]
    maxima = [(x - right).abs().max().item() for x in (ours, plain)]
    plain_error = max(errors[1], luck.typical.get(kind_of(name), 0.0) * norm) if luck else errors[1]
    plain_maximum = max(maxima[1], luck.crest * plain_error / each) if luck else maxima[1]
    allowed = (4 * EPS + slack) * largest
    return Distance(
        name=name,
        rms=errors[0] / each,
        rms_limit=2 * plain_error / each + allowed,
        maximum=maxima[0],
        maximum_limit=2 * plain_maximum + allowed,
        relative=ratio(errors[0], norm),
        plain_relative=ratio(errors[1], norm),
        cosine=torch.dot(ours.flatten(), right.flatten()).item() / max(norm * l2(ours), 1e-300),
    )


def kind_of(name: str) -> str:
    """A tensor's name without its layer."""
    return re.sub(r"\.\d+\.", ".", name)


def ratio(value: float, limit: float) -> float:
    """How much of a limit a value takes; 0 for 0 of 0, infinite where one of them isn't finite: a limit made of a
    reference that overflows judges nothing."""
    if not (math.isfinite(value) and math.isfinite(limit)):
        return math.inf
    return 0.0 if value == 0 else value / limit if limit else math.inf


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first names; the rest are counted."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def l2(x: Tensor) -> float:
    """The L2 norm, summed in float64."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).item()
