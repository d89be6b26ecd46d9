"""4-bit weights written out in Triton: a program some blocks of values, each byte read once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch
from pronghorn.kernels.nf4 import NF4Weight

BYTES = 4096
"""Of codes, that a program reads."""
WARPS = 4
ALONG, ACROSS = (1, 64), (64, 1)
"""Rows and blocks of values of a program's tile, for codes as they lie and for their transpose."""
CODE_WARPS = 2


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
    inverse_ptr,  # [N]
    out_ptr,  # [N, K], or [K, N] if ACROSS
    N, K, out_stride,
    HALF: tl.constexpr,  # bytes a block
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, OUTER: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    row_blocks = K // (2 * HALF)
    inside = (row < N)[:, None] & (block < row_blocks)[None, :]
    at = row[:, None] * row_blocks + block[None, :]
    absmax = _absmax(absmax_ptr, levels_ptr, outer_ptr, offset_ptr, at, inside, OUTER)
    factor = (absmax * tl.load(inverse_ptr + row, mask=row < N, other=1.0)[:, None])[:, :, None]
    bytes_ = at[:, :, None] * HALF + tl.arange(0, HALF)[None, None, :]
    byte = tl.load(packed_ptr + bytes_, mask=inside[:, :, None], other=0).to(tl.int32)
    high, low = tl.load(table_ptr + (byte >> 4)) * factor, tl.load(table_ptr + (byte & 15)) * factor
    codes = tl.interleave(high, low).to(out_ptr.dtype.element_ty).reshape(ROWS, BLOCKS * 2 * HALF)
    col = tl.program_id(1) * (BLOCKS * 2 * HALF) + tl.arange(0, BLOCKS * 2 * HALF)
    there = (row < N)[:, None] & (col < K)[None, :]
    if ACROSS:
        to = out_ptr + col.to(tl.int64)[:, None] * out_stride + row[None, :]
        tl.store(to, tl.trans(codes), mask=tl.trans(there))
    else:
        tl.store(out_ptr + row[:, None] * out_stride + col[None, :], codes, mask=there)


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
        HALF=half, BLOCKS=blocks, OUTER=outer, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def write_codes(weight: NF4Weight, inverse: Tensor, out: Tensor, across: bool) -> None:
    """As `nf4.write_codes`."""
    tensors, outer = _tensors(weight)
    rows, blocks = ACROSS if across else ALONG
    grid = (cdiv(weight.shape[0], rows), cdiv(weight.shape[1], blocks * weight.block))
    launch(
        _write_codes, grid, *tensors, inverse, out, *weight.shape, out.stride(0),
        HALF=weight.block // 2, ROWS=rows, BLOCKS=blocks, OUTER=outer, ACROSS=across, num_warps=CODE_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
