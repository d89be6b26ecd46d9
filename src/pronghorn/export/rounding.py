"""Round merged weights to 16 bits so that what training changed survives.

W + Δ is rounded where W itself is a number of 16 bits. Rounding to the nearest gives W again wherever Δ is less than
half of the distance to the next such number, so of a small Δ half may be lost, everywhere in the same direction. So
each sum becomes one of its two neighbours by chance, the nearer one the likelier, and its mean is the sum:

    P(away from zero) = (|x| - |low|) / (|high| - |low|)     low, high: x's neighbours, low being nearer to zero

A single number is off by more than by rounding to the nearest, but independently of all others.

Source: Gupta et al. 2015, Deep Learning with Limited Numerical Precision, section 3.1 (arXiv:1502.02551).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_AT_ONCE = 2**24
"""Numbers that are rounded at once."""


def holds(weight: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether every number of a tensor is one of `dtype`, too."""
    return torch.equal(weight, weight.to(dtype).to(weight.dtype))


def round_unbiased(exact: Tensor, dtype: torch.dtype, seed: str) -> Tensor:
    """Return each number rounded to one of its two neighbours by chance, so that its mean is the number.

    Args:
        exact: float32.
        dtype: of 16 bits.
        seed: gives the same bits every time on a device: the tensor's name.
    """
    generator = torch.Generator(exact.device).manual_seed(zlib.crc32(seed.encode()))
    rounded = torch.empty(exact.shape, dtype=dtype, device=exact.device)
    for part, into in zip(exact.reshape(-1).split(_AT_ONCE), rounded.view(-1).split(_AT_ONCE), strict=True):
        into.copy_(neighbours(part, dtype, torch.rand(part.shape, generator=generator, device=part.device)))
    return rounded


def neighbours(exact: Tensor, dtype: torch.dtype, chance: Tensor) -> Tensor:
    """Return the neighbour farther from zero where `chance`, of [0, 1), is less than how far a number is from the
    other; what is not finite in `dtype` stays so."""
    nearest = exact.to(dtype)
    bits = nearest.view(torch.int16)  # sign and magnitude: one more is the next number away from zero
    low = bits - (nearest.float().abs() > exact.abs()).to(torch.int16)
    high = low + 1
    below, above = low.view(dtype).float(), high.view(dtype).float()
    share = (exact - below) / (above - below)
    return torch.where(nearest.isfinite(), torch.where(chance < share, high, low).view(dtype), nearest)
