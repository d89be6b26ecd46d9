"""Quantise the rows of a matrix to e4m3 (FP8 formats: Micikevicius et al. 2022, arXiv:2209.05433).

    s_t = max_k |x_tk · c_k| · (1/448)      codes_tk = e4m3(x_tk · c_k · (1 / s_t))        x · c ≈ codes · s

c is a factor a column: the scales of a weight's rows, which the product dy W needs on the other side. So that c can be
read in 16 bits, these are bfloat16 numbers (`weight_scales`).

A kernel that makes x and sees whole rows of it can write codes in the same pass, to the bits that `quantise_rows` gives
of the x that it stored: by `store_codes` if it holds a row, by `store_codes_of_parts` if it goes over a row in parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton

LIMIT = 448.0
"""The largest number in e4m3."""
SMALLEST = 1e-30
"""The least scale: a row of zeros has it, and a row of smaller numbers than it stands for becomes zeros."""
DTYPE = torch.float8_e4m3fn
ROW_SCALES = "_pronghorn_row_scales"
"""The attribute of a frozen weight that processes share, and whose codes are written out for each product: the scales
of its rows, from when it was whole."""
PER_WARP = 2048
"""Columns of a row that a warp holds."""
WIDEST = 32768
"""Columns of a row that a program holds in registers."""


class RowCodes(NamedTuple):
    """The rows of a matrix in 8 bits: x · c ≈ codes · scales."""

    codes: Tensor
    """e4m3 [T, K]."""
    scales: Tensor
    """float32 [T, 1]."""

    @classmethod
    def like(cls, x: Tensor) -> RowCodes:
        """Make room for the codes of x [T, K]."""
        count, size = x.shape
        codes = torch.empty(count, size, dtype=DTYPE, device=x.device)
        return cls(codes, torch.empty(count, 1, dtype=torch.float32, device=x.device))

    def fill_reference(self, x: Tensor, columns: Tensor | None = None) -> None:
        """Write what `quantise_rows` returns, in plain torch."""
        for mine, made in zip(self, quantise_rows_reference(x, columns), strict=True):
            mine.copy_(made)


def quantise_rows_reference(x: Tensor, columns: Tensor | None = None) -> RowCodes:
    """Return the codes of x [T, K]; a row that isn't finite has codes that are NaN.

    Args:
        x: [T, K], its rows contiguous; may be columns of a wider tensor.
        columns: c [K], any float dtype; None for ones.
    """
    wide = x.float() if columns is None else x.float() * columns.float()
    scales = (wide.abs().amax(1, keepdim=True) * (1 / LIMIT)).clamp(min=SMALLEST)
    return RowCodes((wide * (1 / scales)).to(DTYPE), scales)


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
        store_codes(x, codes_ptr + row * K, scales_ptr + row, cols, inside)
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
def store_codes(x, codes_ptr, scale_ptr, cols, inside):
    """Quantise a row that is held as a whole: x float32, as it was stored (times c), zero outside."""
    scale = _scale(x)
    tl.store(scale_ptr, scale)
    tl.store(codes_ptr + cols, (x * tl.div_rn(1.0, scale)).to(codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def larger(most, x):
    """Return the larger one of `most` and |x|; NaN if either is."""
    return tl.maximum(most, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_codes_of_parts(x_ptr, columns_ptr, codes_ptr, scale_ptr, most, K, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a row of K columns that this program has just stored, and reads again from the cache.

    most: any number of entries, of which the largest is the row's largest |x · c|.
    """
    scale = _scale(most)
    tl.store(scale_ptr, scale)
    inverse = tl.div_rn(1.0, scale)
    tl.debug_barrier()  # other threads than those that read now may have stored
    for start in range(0, K, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
        if COLUMNS:
            x *= tl.load(columns_ptr + cols, mask=cols < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
        tl.store(codes_ptr + cols, (x * inverse).to(codes_ptr.dtype.element_ty), mask=cols < K)


@triton.jit
def _scale(x):
    """Return max |x| / 448, at least 1e-30; NaN if x has one, which a maximum alone would drop."""
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


@triton.jit
def _codes_across(
    w_ptr,  # [N, K]
    inverse_ptr,  # [N]
    out_ptr,  # [K, N]
    N, K, out_stride, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (rows < N)[:, None] & (cols < K)[None, :]
    w = tl.load(w_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    codes = (w * tl.load(inverse_ptr + rows, mask=rows < N, other=0.0)[:, None]).to(out_ptr.dtype.element_ty)
    to = out_ptr + cols.to(tl.int64)[:, None] * out_stride + rows[None, :]
    tl.store(to, tl.trans(codes), mask=tl.trans(inside))


def quantise_rows_triton(x: Tensor, columns: Tensor | None = None) -> RowCodes:
    """Do what `quantise_rows` does, by its Triton kernel."""
    count, size = x.shape
    made = RowCodes.like(x)
    whole = size <= WIDEST
    block = next_power_of_2(size) if whole else 4096
    warps = min(max(block // PER_WARP, 4), 16)
    launch(
        _rows, (count,), x, made.scales if columns is None else columns, *made, x.stride(0), size,
        COLUMNS=columns is not None, WHOLE=whole, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return made


def transposed_triton(codes: Tensor) -> Tensor:
    """Do what `transposed` does, by its Triton kernel."""
    rows, cols = codes.shape
    out = torch.empty(cols, rows, dtype=codes.dtype, device=codes.device)
    grid = (cdiv(rows, 64), cdiv(cols, 64))
    launch(_transpose, grid, codes.view(torch.uint8), out.view(torch.uint8), rows, cols, ROWS=64, COLS=64, num_warps=4)
    return out


def write_codes_across_triton(weight: Tensor, inverse: Tensor, out: Tensor) -> None:
    """Do what `write_codes_across` does, by its Triton kernel."""
    rows, cols = weight.shape
    grid = (cdiv(rows, 64), cdiv(cols, 64))
    launch(_codes_across, grid, weight, inverse, out, rows, cols, out.stride(0), ROWS=64, COLS=64, num_warps=4)


def write_codes_across_reference(weight: Tensor, inverse: Tensor, out: Tensor) -> None:
    """Write e4m3(w_nk · inverse_n) of a weight [N, K] into `out` [K, N], which may be columns of a wider tensor.

    Args:
        weight: contiguous; inverse: 1 / s, float32 [N], of scales that are at least `weight_scales` of its rows, since
            what is larger than e4m3's largest number is NaN for one of the two implementations and not for the other.
    """
    codes = (weight.float() * inverse[:, None]).to(DTYPE)
    out.view(torch.uint8).copy_(codes.view(torch.uint8).t())


write_codes_across = by_device(write_codes_across_reference, write_codes_across_triton)
quantise_rows = by_device(quantise_rows_reference, quantise_rows_triton)


def weight_scales(most: Tensor) -> Tensor:
    """Return the scales, float32 [N] and bfloat16 numbers each, of rows whose largest entries are `most`."""
    scales = (most.float() * (1 / LIMIT)).clamp(min=SMALLEST)
    rounded = scales.bfloat16()
    up = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))  # not down: the largest entry would not fit
    return torch.where(rounded.float() < scales, up, rounded).float()


def transposed(codes: Tensor) -> Tensor:
    """Return codes [N, K] as [K, N], contiguous."""
    if codes.is_cuda:
        return transposed_triton(codes)
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
