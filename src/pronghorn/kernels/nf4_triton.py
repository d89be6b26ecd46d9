"""4-bit weights written out in Triton: a program some blocks of values, each byte read once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch
from pronghorn.kernels.nf4 import NF4Weight

BYTES = 2048
"""Of codes, that a program reads."""


@triton.jit
def _absmax(absmax_ptr, levels_ptr, outer_ptr, offset_ptr, at, inside, OUTER: tl.constexpr):
    """a of the blocks `at`, in float32; product and sum are rounded apart (no fused multiply-add)."""
    if OUTER == 0:
        return tl.load(absmax_ptr + at, mask=inside, other=0.0)
    code = tl.load(absmax_ptr + at, mask=inside, other=0).to(tl.int32)
    outer = tl.load(outer_ptr + at // OUTER, mask=inside, other=0.0)
    return tl.load(levels_ptr + code) * outer + tl.load(offset_ptr)


@triton.jit
def _write_out(
    packed_ptr,  # [N·K/2]
    table_ptr,  # [16]
    absmax_ptr,  # [blocks]
    levels_ptr,  # [256]
    outer_ptr,  # [blocks/256]
    offset_ptr,  # [1]
    out_ptr,  # [N·K]
    count,  # of bytes
    HALF: tl.constexpr,  # bytes a block
    BLOCKS: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    inside = at < count
    byte = tl.load(packed_ptr + at, mask=inside, other=0).to(tl.int32)
    scale = _absmax(absmax_ptr, levels_ptr, outer_ptr, offset_ptr, block, block * HALF < count, OUTER)[:, None]
    high, low = tl.load(table_ptr + (byte >> 4)) * scale, tl.load(table_ptr + (byte & 15)) * scale
    values = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    to = block[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(out_ptr + to, values, mask=to < 2 * count)


@triton.jit
def _write_codes(
    packed_ptr,  # [N, K/2]
    table_ptr,  # [16]
    absmax_ptr,  # [N, K/block]
    levels_ptr,  # [256]
    outer_ptr,  # [blocks/256]
    offset_ptr,  # [1]
    scales_ptr,  # [N]
    out_ptr,  # [N, K], or [K, N] if ACROSS
    N, K, out_stride,
    HALF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, OUTER: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    bytes_ = tl.program_id(1) * (COLS // 2) + tl.arange(0, COLS // 2)
    inside = (rows < N)[:, None] & (bytes_ < K // 2)[None, :]
    at = rows[:, None] * (K // 2) + bytes_[None, :]
    byte = tl.load(packed_ptr + at, mask=inside, other=0).to(tl.int32)
    absmax = _absmax(absmax_ptr, levels_ptr, outer_ptr, offset_ptr, at // HALF, inside, OUTER)
    row_scale = tl.load(scales_ptr + rows, mask=rows < N, other=1.0)[:, None]
    high, low = tl.load(table_ptr + (byte >> 4)) * absmax, tl.load(table_ptr + (byte & 15)) * absmax
    values = tl.interleave(high / row_scale, low / row_scale).to(out_ptr.dtype.element_ty)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = (rows < N)[:, None] & (cols < K)[None, :]
    if ACROSS:
        to = out_ptr + cols.to(tl.int64)[:, None] * out_stride + rows[None, :]
        tl.store(to, tl.trans(values), mask=tl.trans(there))
    else:
        tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], values, mask=there)


def _tensors(weight: NF4Weight) -> tuple[tuple[Tensor, ...], int]:
    """The tensors that the kernels read, and blocks that share an outer statistic (0 if statistics aren't nested)."""
    if weight.levels is None or weight.outer is None or weight.offset is None:
        return (weight.packed, weight.table, weight.absmax, weight.table, weight.table, weight.table), 0
    nested = weight.levels, weight.outer, weight.offset
    return (weight.packed, weight.table, weight.absmax, *nested), weight.outer_block


def write_out(weight: NF4Weight, out: Tensor) -> None:
    """As `nf4.write_out`."""
    tensors, outer = _tensors(weight)
    half, count = weight.block // 2, weight.packed.numel()
    blocks = max(BYTES // half, 1)
    launch(
        _write_out, (cdiv(count, blocks * half),), *tensors, out, count,
        HALF=half, BLOCKS=blocks, OUTER=outer, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def write_codes(weight: NF4Weight, scales: Tensor, out: Tensor, across: bool) -> None:
    """As `nf4.write_codes`."""
    tensors, outer = _tensors(weight)
    rows, cols = (64, 128) if across else (8, 512)
    grid = (cdiv(weight.shape[0], rows), cdiv(weight.shape[1], cols))
    launch(
        _write_codes, grid, *tensors, scales, out, *weight.shape, out.stride(0),
        HALF=weight.block // 2, ROWS=rows, COLS=cols, OUTER=outer, ACROSS=across, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
