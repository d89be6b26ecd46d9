"""Multiply e4m3 codes whose rows have scales, by whichever of torch's products the installed version has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import UnsupportedError

Product = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype, bool], Tensor]
"""(a e4m3 [M, K], b e4m3 [N, K], a's scales [M, 1], b's [N], dtype, fast sums) → [M, N]."""


@cache
def row_product(device: torch.device) -> Product:
    """Return torch's product by rows: `torch.nn.functional.scaled_mm`, or `torch._scaled_mm` before that was public.

    The private one has no promise to keep its arguments, so it multiplies a small example first.

    Raises:
        UnsupportedError: torch has neither, or the private one gives other numbers.
    """
    if hasattr(torch.nn.functional, "scaled_mm"):
        return public
    try:
        sizes = torch.arange(16, device=device)
        a, b = (sizes % 4).float().repeat(16, 1).to(torch.float8_e4m3fn), torch.eye(16, device=device)
        scales = 2.0 ** (sizes % 3)
        out = private(a, b.to(torch.float8_e4m3fn), scales[:, None], scales, torch.bfloat16, False)
        right = torch.equal(out.float(), a.float() * scales[:, None] * scales)
        reason = "torch._scaled_mm gives other numbers than its operands'"
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        right, reason = False, str(error).splitlines()[0].rstrip(".")
    if not right:
        raise UnsupportedError(
            f"8-bit products with torch {torch.__version__}: {reason}",
            "install torch 2.13 or newer, or leave compute out",
        )
    return private


def public(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply by torch's public function."""
    functional: Any = torch.nn.functional
    rows = functional.ScalingType.RowWise
    product: Tensor = functional.scaled_mm(
        a, b.t(), a_scales, rows, b_scales.view(1, -1), rows, output_dtype=dtype, use_fast_accum=fast
    )
    return product


def private(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply by the function that torch had before."""
    return torch._scaled_mm(a, b.t(), a_scales, b_scales.view(1, -1), out_dtype=dtype, use_fast_accum=fast)
