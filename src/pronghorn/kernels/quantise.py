"""Quantise the rows of a matrix to e4m3 (FP8 formats: Micikevicius et al. 2022, arXiv:2209.05433).

    s_t = max_k |x_tk · c_k| · (1/448)      codes_tk = e4m3(x_tk · c_k · (1 / s_t))        x · c ≈ codes · s

c is a factor a column: the scales of a weight's rows, which the product dy W needs on the other side. So that c can be
read in 16 bits, these are bfloat16 numbers (`weight_scales`).
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 448.0
"""The largest number in e4m3."""
SMALLEST = 1e-30
"""The least scale: a row of zeros has it, and a row of smaller numbers than it stands for becomes zeros."""
DTYPE = torch.float8_e4m3fn


def quantise_rows(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (codes e4m3 [T, K], scales float32 [T, 1]) of x [T, K]; a row that isn't finite has codes that are NaN.

    Args:
        x: [T, K], its rows contiguous; may be columns of a wider tensor.
        columns: c [K], any float dtype; None for ones.
    """
    if x.is_cuda:
        from pronghorn.kernels.quantise_triton import quantise_rows as launch

        return launch(x, columns)
    return quantise_rows_reference(x, columns)


def quantise_rows_reference(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Do the same in plain torch."""
    wide = x.float() if columns is None else x.float() * columns.float()
    scales = (wide.abs().amax(1, keepdim=True) * (1 / LIMIT)).clamp(min=SMALLEST)
    return (wide * (1 / scales)).to(DTYPE), scales


def weight_scales(most: Tensor) -> Tensor:
    """Return the scales, float32 [N] and bfloat16 numbers each, of rows whose largest entries are `most`."""
    scales = (most.float() * (1 / LIMIT)).clamp(min=SMALLEST)
    rounded = scales.bfloat16()
    up = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))  # not down: the largest entry would not fit
    return torch.where(rounded.float() < scales, up, rounded).float()


def transposed(codes: Tensor) -> Tensor:
    """Return codes [N, K] as [K, N], contiguous."""
    if codes.is_cuda:
        from pronghorn.kernels.quantise_triton import transposed as launch

        return launch(codes)
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
