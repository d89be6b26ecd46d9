"""The three-way tolerance of docs/numerics.md, for the gate of `pronghorn bench ops`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps


def three_way(ours: Tensor, plain: Tensor, exact: Tensor, slack: float = 0.0) -> dict[str, tuple[float, float]]:
    """error(ours) <= 2 · error(plain) + (4·eps(fp32) + slack) · max|exact|, as root mean square and in maximum.

    Compare as `error <= limit`: NaN then fails, as does a tensor of another shape, whose error is infinite.

    Args:
        ours: what is under test.
        plain: the plain path in the same dtype.
        exact: float64 (or float32), computed another way.
        slack: for averages, of whose two errors luck decides which is larger.
    Returns:
        {"rms": (error, limit), "max": (error, limit)}.
    """
    if not ours.shape == plain.shape == exact.shape:
        return {"shape": (math.inf, 0.0)}
    exact = exact.detach().double()
    ours_error, plain_error = (x.detach().to(exact.device).double().sub_(exact) for x in (ours, plain))
    allowed = (4 * EPS + slack) * exact.abs().max().item()
    return {
        "rms": (_rms(ours_error), 2 * _rms(plain_error) + allowed),
        "max": (ours_error.abs().max().item(), 2 * plain_error.abs().max().item() + allowed),
    }


def _rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()
