"""The three-way tolerance of docs/numerics.md."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps


def assert_three_way(name: str, ours: Tensor, plain: Tensor, reference: Tensor) -> None:
    """error(ours) <= 2 · error(plain) + 4·eps(fp32)·max|reference|, as root mean square and in maximum.

    Args:
        ours: what is under test.
        plain: the plain path in the same dtype.
        reference: float64 (or float32), computed another way.
    """
    exact = reference.detach().double().cpu()
    assert ours.shape == plain.shape == exact.shape, (name, ours.shape, plain.shape, exact.shape)
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    slack = 4 * EPS * exact.abs().max().item()
    ours_error, plain_error = ((x.detach().double().cpu() - exact) for x in (ours, plain))
    for norm, measure in (("rms", lambda e: e.square().mean().sqrt().item()), ("max", lambda e: e.abs().max().item())):
        limit = 2 * measure(plain_error) + slack
        assert measure(ours_error) <= limit, f"{name}: {norm} error {measure(ours_error):.3e} > {limit:.3e}"
