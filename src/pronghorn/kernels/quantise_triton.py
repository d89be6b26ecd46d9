"""Quantising in Triton: a program a row, read once where the row fits into registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, next_power_of_2
from pronghorn.kernels.quantise import DTYPE

PER_WARP = 2048
"""Columns of a row that a warp holds."""
WIDEST = 32768
"""Columns of a row that a program holds in registers."""


@triton.jit
def _rows(
    x_ptr,  # [T, K]
    columns_ptr,  # [K]
    codes_ptr,  # [T, K]
    scales_ptr,  # [T]
    x_stride, K,
    COLUMNS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        inside = cols < K
        x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
        if COLUMNS:
            x *= tl.load(columns_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        scale = _scale(x)
        tl.store(scales_ptr + row, scale)
        tl.store(codes_ptr + row * K + cols, (x * tl.div_rn(1.0, scale)).to(codes_ptr.dtype.element_ty), mask=inside)
    else:
        scale = 0.0
        for start in range(0, K, BLOCK):
            inside = start + cols < K
            x = tl.load(x_ptr + row * x_stride + start + cols, mask=inside, other=0.0).to(tl.float32)
            if COLUMNS:
                x *= tl.load(columns_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
            scale = tl.maximum(scale, _scale(x), propagate_nan=tl.PropagateNan.ALL)
        tl.store(scales_ptr + row, scale)
        inverse = tl.div_rn(1.0, scale)
        for start in range(0, K, BLOCK):
            inside = start + cols < K
            x = tl.load(x_ptr + row * x_stride + start + cols, mask=inside, other=0.0).to(tl.float32)
            if COLUMNS:
                x *= tl.load(columns_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
            tl.store(codes_ptr + row * K + start + cols, (x * inverse).to(codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale(x):
    """max |x| / 448, at least 1e-30; NaN if x has one, which a maximum alone would drop."""
    bad = tl.max((x != x).to(tl.int32), 0)
    most = tl.max(tl.abs(x), 0)
    return tl.where(bad > 0, float("nan"), tl.maximum(most * (1.0 / 448.0), 1e-30))


@triton.jit
def _transpose(
    x_ptr,  # [N, K], bytes
    y_ptr,  # [K, N], bytes
    N, K, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (rows < N)[:, None] & (cols < K)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], mask=inside, other=0)
    tl.store(y_ptr + cols.to(tl.int64)[:, None] * N + rows[None, :], tl.trans(x), mask=tl.trans(inside))


def quantise_rows(x: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `quantise.quantise_rows`."""
    count, size = x.shape
    codes = torch.empty(count, size, dtype=DTYPE, device=x.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    whole = size <= WIDEST
    block = next_power_of_2(size) if whole else 4096
    warps = min(max(block // PER_WARP, 4), 16)
    launch(
        _rows, (count,), x, scales if columns is None else columns, codes, scales, x.stride(0), size,
        COLUMNS=columns is not None, WHOLE=whole, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return codes, scales


def transposed(codes: Tensor) -> Tensor:
    """As `quantise.transposed`."""
    rows, cols = codes.shape
    out = torch.empty(cols, rows, dtype=codes.dtype, device=codes.device)
    grid = (cdiv(rows, 64), cdiv(cols, 64))
    launch(_transpose, grid, codes.view(torch.uint8), out.view(torch.uint8), rows, cols, ROWS=64, COLS=64, num_warps=4)
    return out
