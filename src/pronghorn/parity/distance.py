"""The one rule for "close enough": an error may be a multiple of the plain path's own error, and a floor beside it.

    error(ours, exact) ≤ factor · error(plain, exact) + floor · scale(exact)

Tests, `verify`, the benchmarks' gate and the check of merged weights judge by it (docs/numerics.md). They differ in the
two constants of their `Rule` only. Tensors are compared as root mean square and in maximum.
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
"""The spacing of float32 numbers at 1."""


@dataclass(frozen=True)
class Rule:
    """How far off a number or tensor may be."""

    factor: float
    """Of the plain path's error; 0 where no plain path is run."""
    floor: float
    """Of the scale of what is right (its largest element, or its norm for relative errors)."""

    def limit(self, plain_error: float, scale: float = 1.0) -> float:
        """Return the largest error allowed; errors relative to `exact` have scale 1."""
        return self.factor * plain_error + self.floor * scale


LUCK = 10
"""Over n: how much further off than `THREE_WAY` allows a sound tensor of n numbers is about once in a thousand times
(the F distribution of two errors of n numbers each)."""
THREE_WAY = Rule(factor=2.0, floor=4 * EPS)
"""Of every test and of `verify`: another order of sums is up to twice as far off, and the largest element of float32
results up to four roundings."""
MERGED_LOGITS = {
    torch.float32: Rule(0.0, 1e-4),
    torch.float16: Rule(0.0, 1e-2),
    torch.bfloat16: Rule(0.0, 5e-2),
}
"""Relative L2 error of the logits that rounding all merged weights once to a checkpoint's dtype explains, with room."""


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
        """Return the larger of both errors over its limit; infinite where something isn't finite."""
        return max(ratio(self.rms, self.rms_limit), ratio(self.maximum, self.maximum_limit))


@dataclass(frozen=True)
class BaselineNoise:
    """The plain path's typical errors. The error of a single tensor may be small by chance: of 800 sound gradients in
    bf16 one had 2.2 times its own plain maximum, and single tensors of trained models had 1.9 times its L2 error."""

    typical: dict[str, float]
    """By kind of tensor (its name without the layer): the median over layers of plain's relative L2 error."""
    crest: float
    """The largest ratio of a maximum to its root mean square."""

    @classmethod
    def of(
        cls, plain: Mapping[str, Tensor], exact: Mapping[str, Tensor], rounded: Sequence[Mapping[str, Tensor]] = ()
    ) -> BaselineNoise:
        """Measure it on the gradients of two passes, by name.

        Args:
            rounded: plain's gradients with its inputs rounded otherwise; they count for the crest alone. A model of few
                tensors may have a single row that a rounding moves far, and whose error is small in one pass by chance.
        """
        distances = [distance(name, plain[name], plain[name], right) for name, right in exact.items()]
        others = [distance(name, each[name], each[name], right) for each in rounded for name, right in exact.items()]
        kinds: dict[str, list[float]] = {}
        for tensor in distances:
            if math.isfinite(tensor.relative):
                kinds.setdefault(kind_of(tensor.name), []).append(tensor.relative)
        crests = filter(math.isfinite, (ratio(tensor.maximum, tensor.rms) for tensor in (*distances, *others)))
        typical = {kind: median(errors) for kind, errors in kinds.items()}
        return cls(typical, max(crests, default=1.0))


def distance(
    name: str, ours: Tensor, plain: Tensor, exact: Tensor, noise: BaselineNoise | None = None, slack: float = 0.0
) -> Distance:
    """Compare three tensors of one shape; `exact` is float32 or float64.

    Args:
        noise: plain's error counts as at least what is typical there, and as more where a tensor has few numbers.
        slack: added to the rule's floor for averages, of whose two errors chance decides which is larger.
    """
    right = exact.double() if exact.numel() < 2**24 else exact.float()
    ours, plain = ours.to(right.dtype), plain.to(right.dtype)
    norm, largest, root = l2(right), right.abs().max().item(), math.sqrt(right.numel())
    (rms, maximum), (plain_rms, plain_maximum) = errors(ours, right), errors(plain, right)
    plain_relative = ratio(plain_rms * root, norm)
    if noise:
        plain_rms = max(plain_rms, noise.typical.get(kind_of(name), 0.0) * norm / root) * (1 + LUCK / right.numel())
        plain_maximum = max(plain_maximum, noise.crest * plain_rms)
    return Distance(
        name=name,
        rms=rms,
        rms_limit=THREE_WAY.limit(plain_rms, largest) + slack * largest,
        maximum=maximum,
        maximum_limit=THREE_WAY.limit(plain_maximum, largest) + slack * largest,
        relative=ratio(rms * root, norm),
        plain_relative=plain_relative,
        cosine=torch.dot(ours.flatten(), right.flatten()).item() / max(norm * l2(ours), 1e-300),
    )


def errors(x: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the root mean square and the maximum of x − exact."""
    error = x - exact
    return l2(error) / math.sqrt(error.numel()), error.abs().max().item()


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return the L2 norm of x − exact over that of exact."""
    return ratio(l2(x - exact), l2(exact))


def mean_limit(plain: Sequence[Tensor], exact: Sequence[Tensor], mean: float) -> float:
    """Return how far a mean over all documents' losses may be from `mean`.

    The error of one number is small by chance now and then. So plain's error is the root mean square over the
    documents' own mean losses, which the error of the mean can't exceed, and at least twice what independent losses of
    this error would give.
    """
    differences = [p.double() - e.double() for p, e in zip(plain, exact, strict=True)]
    count = sum(map(len, differences))
    by_document = math.sqrt(sum(len(e) * e.mean().item() ** 2 for e in differences) / count)
    by_token = 2 * l2(torch.cat(differences)) / count
    return THREE_WAY.limit(max(by_document, by_token), abs(mean))


def kind_of(name: str) -> str:
    """Return a tensor's name without its layer."""
    return re.sub(r"\.\d+\.", ".", name)


def ratio(value: float, limit: float) -> float:
    """Return how much of a limit a value takes; 0 for 0 of 0. It is infinite where one of them isn't finite, since a
    limit made of a reference that overflows judges nothing."""
    if not (math.isfinite(value) and math.isfinite(limit)):
        return math.inf
    return 0.0 if value == 0 else value / limit if limit else math.inf


def listed(names: Sequence[str], most: int = 4) -> str:
    """Name the first ones and count the rest."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def l2(x: Tensor) -> float:
    """Return the L2 norm, summed in float64."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).item()
