"""Rows of tokens to the experts and back; nothing is added up in memory.

    gather    x'_i = x_{tokens_i}                     a token is read once and written to each of its rows
    combine   y_t = Σ_k w_tk · (x_{rows_tk} + b_{e_tk})

Sums are in float32 (float64 for float64), over k in order: equal bits every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """S = T·K rows made of T tokens', each K times; int32."""

    tokens: Tensor
    """[S], the token of each row."""
    places: Tensor
    """[T, K], the rows of each token: the inverse."""


def gather(x: Tensor, rows: Rows) -> Tensor:
    """Args: x: [T, H], contiguous. Returns [S, H]."""
    if x.is_cuda:
        from pronghorn.kernels.moe_rows_triton import gather as launch

        return launch(x, rows.places)
    return x.index_select(0, rows.tokens)


def combine(
    x: Tensor, rows: Tensor, weights: Tensor | None = None, bias: Tensor | None = None, experts: Tensor | None = None
) -> Tensor:
    """The sum of each token's rows.

    Args:
        x: [S, H], contiguous.
        rows: int32 [T, K], which rows of x are a token's.
        weights: [T, K], any float dtype; None for ones.
        bias: [E, H], added to each row by its expert before it is weighted, with experts: integers [T, K].
    Returns:
        [T, H] in x's dtype.
    """
    if x.is_cuda:
        from pronghorn.kernels.moe_rows_triton import combine as launch

        return launch(x, rows, weights, bias, experts)
    wide = torch.promote_types(x.dtype, torch.float32)
    picked = x[rows].to(wide)
    if bias is not None and experts is not None:
        picked = picked + bias.to(wide)[experts]
    if weights is not None:
        picked = picked * weights.to(wide).unsqueeze(-1)
    return picked.sum(1).to(x.dtype)
