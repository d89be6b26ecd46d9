"""Products of rows grouped by expert: one launch for all experts, whatever their numbers of rows.

    multiply   y_i = s · x_{rows_i} W_{e(i)}          [S, K] · [E, K, N] → [S, N]
    outer      G_e = s · Σ_{i in e} x_iᵀ y_i          [S, M] · [S, N] → [E, M, N]       (an expert without rows: 0)

Three ways: torch's `grouped_mm` (CUTLASS), which below and beside SM90 and SM100 and for other dtypes than bfloat16
loops over experts on the host, so it is not used there; a Triton kernel, which reads gathered rows in place; and a
loop in plain torch, the reference and the CPU's way. `choose` says which, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from pronghorn.kernels.moe_rows import Rows, gather

Way = Literal["torch", "triton", "loop"]
_TORCH_MAJORS = (9, 10)
"""Compute capabilities for which torch has kernels of its own."""


def choose(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Way, str]:
    """The way that large products take, and why.

    Args:
        sizes: every K and N.
    """
    if device.type != "cuda":
        return "loop", f"plain torch, expert by expert, on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if not hasattr(torch, "_grouped_mm"):
        return "triton", "this torch has no grouped_mm"
    if major not in _TORCH_MAJORS:
        return "triton", f"torch's grouped_mm loops on the host on compute capability {major}.{minor}"
    if dtype is not torch.bfloat16:
        return "triton", f"torch's grouped_mm loops on the host in {str(dtype).removeprefix('torch.')}"
    if any(size % 8 for size in sizes):
        return "triton", f"torch's grouped_mm needs rows of whole 16 bytes, sizes are {sizes}"
    return "torch", f"torch's grouped_mm has kernels for compute capability {major}.{minor}"


def multiply(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    way: Way,
    *,
    rows: Rows | None = None,
    out: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Rows times their expert's weight.

    Args:
        x: [T, K], contiguous.
        weight: [E, K, N] in x's dtype, any strides (a transposed view is read as it lies).
        offsets: int32 [E], where each expert's rows end; the last is S.
        rows: which rows of x those of y are made of; None where they are the same.
        out: [S, N], contiguous: y is added to it. Not for `torch`'s way.
    Returns:
        [S, N] in x's dtype, or `out`.
    """
    if way == "triton":
        from pronghorn.kernels.grouped_gemm_triton import multiply as launch

        return launch(x, weight, offsets, None if rows is None else rows.tokens, out, scale)
    x = x if rows is None else gather(x, rows)
    if way == "torch":
        assert out is None and scale == 1.0, "grouped_mm neither adds nor scales"
        return torch._grouped_mm(x, weight, offs=offsets)
    y = x.new_empty(x.shape[0], weight.shape[2])
    for e, start, end in _groups(offsets):
        torch.mm(x[start:end], weight[e], out=y[start:end])
    return y.mul_(scale) if out is None else out.add_(y, alpha=scale)


def outer(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    way: Way,
    *,
    dtype: torch.dtype,
    x_rows: Rows | None = None,
    y_rows: Rows | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Each expert's sum of outer products: the gradient of its weight.

    Args:
        x: [T, M] and y: [T, N], contiguous, of one dtype; x_rows, y_rows as `multiply`'s.
        dtype: of the result; `torch`'s way has bfloat16 only, and leaves another to Triton.
    Returns:
        [E, M, N], contiguous.
    """
    if way == "triton" or (way == "torch" and (dtype is not x.dtype or scale != 1.0)):
        from pronghorn.kernels.grouped_gemm_triton import outer as launch

        x_tokens, y_tokens = (None if rows is None else rows.tokens for rows in (x_rows, y_rows))
        return launch(x, y, offsets, dtype, x_tokens, y_tokens, scale)
    x = x if x_rows is None else gather(x, x_rows)
    y = y if y_rows is None else gather(y, y_rows)
    if way == "torch":
        return torch._grouped_mm(x.t(), y, offs=offsets)
    wide = torch.promote_types(x.dtype, torch.float32)
    result = torch.zeros(len(offsets), x.shape[1], y.shape[1], dtype=dtype, device=x.device)
    for e, start, end in _groups(offsets):
        result[e] = (x[start:end].to(wide).t() @ y[start:end].to(wide)) * scale
    return result


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end) of experts that have rows, on the host."""
    for e, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        if end > start:
            yield e, start, end
