"""Write 4-bit weights out as 8-bit integers of rotated rows, for products in integers (`kernels.int8`).

    codes = round(z / s)        z = (W / f) H, or (Wᵀ / f) H        by groups of 64 columns

f and s are those of the whole weight, found once (`precision.int8.RotatedWeight`). W / f is rounded to the products'
dtype, as every row is that is rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.int8 import GROUP, hadamard, nearest
from pronghorn.kernels.launch import by_device, cdiv, launch, tl, triton
from pronghorn.kernels.nf4 import NF4Weight, _absmax, _tensors, write_out_reference

ALONG, ACROSS = (32, 2, 4), (64, 2, 4)
"""Rows and groups of 64 columns of W that a program reads, and its warps: for the codes of W, and of Wᵀ, whose groups
are 64 rows of W."""


def fits(weight: NF4Weight) -> bool:
    """Tell whether no group of 64 lies in two blocks or two weights: rows, columns and blocks are multiples of it."""
    return not (weight.shape[0] % GROUP or weight.shape[1] % GROUP or weight.block % GROUP)


def write_rotated_reference(
    weight: NF4Weight, factors: Tensor, scales: Tensor, out: Tensor, dtype: torch.dtype, across: bool
) -> None:
    """Write the codes of W / f, rotated, into `out` [N, K]; or of Wᵀ / f into `out` [K, N] if `across`.

    Args:
        weight: one that `fits`.
        factors: 1 / f, float32 [K], or [N].
        scales: 1 / s, float32 [N], or [K].
        out: int8, maybe columns of a wider tensor.
        dtype: of the products.
    """
    dense = torch.empty(weight.shape, device=out.device)
    write_out_reference(weight, dense)
    rows = dense.t() if across else dense
    wide = (rows * factors).to(dtype).reshape(len(rows), -1, GROUP)
    rotated = (wide.float() @ hadamard(out.device)).reshape(rows.shape)
    out.copy_((rotated * scales[:, None]).round())


@triton.jit
def _write_rotated(
    packed_ptr,  # [N, K/2]
    table_ptr,  # [16]
    absmax_ptr,  # [N·K/block]
    levels_ptr,  # [256]
    outer_ptr,  # [blocks/256]
    offset_ptr,  # [1]
    factors_ptr,  # 1 / f [K], or [N] if ACROSS
    scales_ptr,  # 1 / s [N], or [K] if ACROSS
    h_ptr,  # [64, 64], in the products' dtype
    out_ptr,  # [N, K], or [K, N] if ACROSS
    N, K, out_stride,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, OUTER: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    COLS: tl.constexpr = GROUPS * GROUP
    each, half = tl.arange(0, GROUP), tl.arange(0, GROUP // 2)
    h = tl.load(h_ptr + each[:, None] * GROUP + each[None, :])
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = (row < N)[:, None] & (group < K // GROUP)[None, :]
    at = row[:, None] * (K // GROUP) + group[None, :]
    absmax = _absmax(absmax_ptr, levels_ptr, outer_ptr, offset_ptr, at * GROUP // BLOCK, there, OUTER)[:, :, None]
    bytes_ = at[:, :, None] * (GROUP // 2) + half[None, None, :]
    byte = tl.load(packed_ptr + bytes_, mask=there[:, :, None], other=0).to(tl.int32)
    high, low = tl.load(table_ptr + (byte >> 4)) * absmax, tl.load(table_ptr + (byte & 15)) * absmax
    values = tl.reshape(tl.interleave(high, low), (ROWS, COLS))
    if ACROSS:
        by_row = tl.load(factors_ptr + row, mask=row < N, other=0.0)
        by_col = tl.load(scales_ptr + col, mask=col < K, other=0.0)
        z = tl.dot(h, (values * by_row[:, None]).to(h.dtype), input_precision="ieee") * by_col[None, :]
    else:
        by_row = tl.load(scales_ptr + row, mask=row < N, other=0.0)
        by_col = tl.load(factors_ptr + col, mask=col < K, other=0.0)
        wide = tl.reshape((values * by_col[None, :]).to(h.dtype), (ROWS * GROUPS, GROUP))
        z = tl.reshape(tl.dot(wide, h, input_precision="ieee"), (ROWS, COLS)) * by_row[:, None]
    codes = nearest(z)
    if ACROSS:
        to = out_ptr + col.to(tl.int64)[:, None] * out_stride + row[None, :]
        tl.store(to, tl.trans(codes), mask=(col < K)[:, None] & (row < N)[None, :])
    else:
        to = out_ptr + row[:, None] * out_stride + col[None, :]
        tl.store(to, codes, mask=(row < N)[:, None] & (col < K)[None, :])


def write_rotated_triton(
    weight: NF4Weight, factors: Tensor, scales: Tensor, out: Tensor, dtype: torch.dtype, across: bool
) -> None:
    """Do what `write_rotated` does, by its Triton kernel."""
    tensors, outer = _tensors(weight)
    rows, groups, warps = ACROSS if across else ALONG
    h = hadamard(out.device, dtype)
    grid = (cdiv(weight.shape[0], rows), cdiv(weight.shape[1], groups * GROUP))
    launch(
        _write_rotated, grid, *tensors, factors, scales, h, out, *weight.shape, out.stride(0),
        ROWS=rows, GROUPS=groups, GROUP=GROUP, BLOCK=weight.block, OUTER=outer, ACROSS=across, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip


write_rotated = by_device(write_rotated_reference, write_rotated_triton, at=3)
