"""Round merged weights to 16 bits so that what training changed survives.

W + Δ is rounded where W itself is a number of 16 bits. Rounding to the nearest gives W again wherever Δ is less than
half of the distance to the next such number, so of a small Δ half may be lost, everywhere in the same direction:

    lost = <W + Δ - nearest(W + Δ), Δ> / <Δ, Δ>     of a whole tensor

Where that is more than `MOST_LOST`, each sum becomes one of its two neighbours by chance, the nearer one the likelier,
and its mean is the sum:

    P(away from zero) = (|x| - |low|) / (|high| - |low|)     low, high: x's neighbours, low being nearer to zero

A single number is off by more than by rounding to the nearest, but independently of all others. So a tensor that was
changed by much more than its numbers are apart is rounded to the nearest.

Source: Gupta et al. 2015, Deep Learning with Limited Numerical Precision, section 3.1 (arXiv:1502.02551).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

MOST_LOST = 0.01
"""Of an adapter's change of a tensor, by rounding to the nearest."""
_AT_ONCE = 2**24
"""Numbers that are rounded at once."""


def holds(weight: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether every number of a tensor is one of `dtype`, too."""
    return torch.equal(weight, weight.to(dtype).to(weight.dtype))


def round_merged(plain: Tensor, merged: Tensor, dtype: torch.dtype, seed: str) -> Tensor:
    """Return a merged weight in 16 bits: by chance where rounding to the nearest would lose what the adapter changed.

    Args:
        plain: float32, without the adapter.
        merged: float32, with it; of the same shape.
        dtype: bfloat16 or float16.
        seed: as `round_unbiased` takes it.
    """
    by_chance = holds(plain, dtype) and abs(lost(plain, merged, dtype)) > MOST_LOST
    return round_unbiased(merged, dtype, seed) if by_chance else merged.to(dtype)


def lost(plain: Tensor, merged: Tensor, dtype: torch.dtype) -> float:
    """Return which share of merged - plain, both float32, is lost along itself by rounding to the nearest: 0 is none, 1
    all. It is less than 0 where the change grows, and NaN where a number is not finite in `dtype`."""
    along = whole = 0.0
    for before, after in zip(plain.reshape(-1).split(_AT_ONCE), merged.reshape(-1).split(_AT_ONCE), strict=True):
        change = after - before
        along += ((after - after.to(dtype).float()) * change).sum().item()
        whole += change.square().sum().item()
    return along / whole if whole else 0.0


def round_unbiased(exact: Tensor, dtype: torch.dtype, seed: str) -> Tensor:
    """Return each number rounded to one of its two neighbours by chance, so that its mean is the number.

    Args:
        exact: float32.
        dtype: bfloat16 or float16.
        seed: gives the same bits every time on a device: the tensor's name.
    """
    generator = torch.Generator(exact.device).manual_seed(zlib.crc32(seed.encode()))
    rounded = torch.empty(exact.shape, dtype=dtype, device=exact.device)
    for part, into in zip(exact.reshape(-1).split(_AT_ONCE), rounded.view(-1).split(_AT_ONCE), strict=True):
        draws = torch.randint(2**16, part.shape, generator=generator, dtype=torch.int32, device=part.device)
        by_bits = dtype is torch.bfloat16 and bool(part.isfinite().all())
        into.copy_(bfloat16_by_bits(part, draws) if by_bits else neighbours(part, dtype, chances(draws)))
    return rounded


def chances(draws: Tensor) -> Tensor:
    """Return integers of 16 bits as multiples of 2^-16 in [0, 1), the largest first."""
    return (2**16 - 1 - draws).float() / 2**16


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


def bfloat16_by_bits(exact: Tensor, draws: Tensor) -> Tensor:
    """Return `neighbours(exact, torch.bfloat16, chances(draws))` of finite numbers, in a quarter of the time.

    bfloat16 is the upper half of float32: adding a draw to the lower half carries into the upper one as often as the
    lower half says. `draws` is overwritten.
    """
    return draws.add_(exact.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
