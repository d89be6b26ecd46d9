"""Experts' weights in MXFP4, as gpt-oss is published: 4 bits a number (e2m1), one scale of 8 bits (e8m0) for 32.

    w = ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} · 2^(s − 127)        two numbers a byte, the lower 4 bits first

Stored are W_eᵀ, [E, N, K] with K packed; layers multiply x [S, K] by W_e [K, N], and dy [S, N] by W_eᵀ. The kernels
read 4 bits, write bfloat16 into shared memory and multiply that: nothing dense is ever in the device's memory.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.grouped_gemm import Tile, multiply, tile_of
from pronghorn.kernels.launch import cdiv, launch, next_power_of_2, tl, triton
from pronghorn.kernels.moe_rows import Rows
from pronghorn.kernels.packed import PackedTensor
from pronghorn.kernels.small_floats import decode_e2m1, unpack_e2m1

GROUP = 32
"""Numbers that share a scale."""
TILE = Tile(128, 128, 64, 8, 3)
BYTES = 4096
"""That a program writes out."""


class MXFP4Tensor(PackedTensor):
    """W [E, K, N] of all experts. Its parts: blocks uint8 [E, N, K/32, 16] and scales uint8 [E, N, K/32]."""

    def dequantise(self) -> Tensor:
        blocks, scales = self.parts
        return write_out(blocks, scales, self.dtype).transpose(1, 2)


def write_out_reference(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Do what `write_out` does, in plain torch."""
    wide = torch.ldexp(unpack_e2m1(blocks), scales[..., None].int() - 127)
    return wide.flatten(-2).to(dtype)


@triton.jit
def _power(scales):
    """Return 2^(s − 127) in float32, infinity for s = 255."""
    bits = scales.to(tl.int32) << 23
    return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _tile(
    blocks_ptr, scales_ptr, lines, end, start, K, LINES: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return numbers [LINES, WIDE] from column `start` on of lines that are below `end`, in float32; 0 elsewhere."""
    inside = (lines < end)[:, None]
    line = lines.to(tl.int64)[:, None]
    packed = start // 2 + tl.arange(0, WIDE // 2)[None, :]
    held = tl.load(blocks_ptr + line * (K // 2) + packed, mask=inside & (packed < K // 2), other=0)
    group = start // GROUP + tl.arange(0, WIDE // GROUP)[None, :]
    scale = tl.load(scales_ptr + line * (K // GROUP) + group, mask=inside & (group < K // GROUP), other=0)
    numbers = tl.reshape(tl.join(decode_e2m1(held & 15), decode_e2m1(held >> 4)), (LINES, WIDE // GROUP, GROUP))
    return tl.reshape(numbers * _power(scale)[:, :, None], (LINES, WIDE))


@triton.jit
def _write_out(
    blocks_ptr,  # [R, K / 2]
    scales_ptr,  # [R, K / GROUP]
    out_ptr,  # [R, K]
    count,  # R · K / 2
    BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the numbers of BYTES bytes."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    held = tl.load(blocks_ptr + at, mask=at < count, other=0)
    scale = _power(tl.load(scales_ptr + at * 2 // GROUP, mask=at < count, other=0))
    numbers = tl.reshape(tl.join(decode_e2m1(held & 15) * scale, decode_e2m1(held >> 4) * scale), (2 * BYTES,))
    to = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + to, numbers.to(out_ptr.dtype.element_ty), mask=to < 2 * count)


@triton.jit
def _multiply(
    x_ptr,  # [T, K], or dy [S, N] to be multiplied by Wᵀ
    blocks_ptr,  # [E, N, K / 2]
    scales_ptr,  # [E, N, K / GROUP]
    y_ptr,  # [S, N], or dx [S, K]
    offsets_ptr,  # [E]
    rows_ptr,  # [S]
    N, K,
    E: tl.constexpr, EXPERTS: tl.constexpr, GATHER: tl.constexpr, ACROSS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply a tile: x W; with ACROSS, dy Wᵀ."""
    width = K if ACROSS else N
    depth = N if ACROSS else K
    across = tl.cdiv(width, COLS)
    expert, start, end = tile_of(offsets_ptr, tl.program_id(0) // across, E, EXPERTS, ROWS)
    if expert < E:
        rows = start + tl.arange(0, ROWS)
        first = (tl.program_id(0) % across) * COLS
        source = tl.minimum(rows, end - 1)  # rows outside read one that is inside: their results are not stored
        if GATHER:
            source = tl.load(rows_ptr + source)
        steps = tl.arange(0, DEPTH)
        x = x_ptr + source.to(tl.int64)[:, None] * depth + steps[None, :]
        blocks = blocks_ptr + expert.to(tl.int64) * N * (K // 2)
        scales = scales_ptr + expert.to(tl.int64) * N * (K // GROUP)
        total = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, depth, DEPTH):
            left = tl.load(x + k, mask=(steps < depth - k)[None, :], other=0.0)
            if ACROSS:
                right = _tile(blocks, scales, k + steps, N, first, K, DEPTH, COLS, GROUP)
            else:
                right = tl.trans(_tile(blocks, scales, first + tl.arange(0, COLS), N, k, K, COLS, DEPTH, GROUP))
            total = tl.dot(left, right.to(left.dtype), total, input_precision="ieee")
        cols = first + tl.arange(0, COLS)
        y = y_ptr + rows.to(tl.int64)[:, None] * width + cols[None, :]
        tl.store(y, total.to(y_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < width)[None, :])


def write_out_triton(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Do what `write_out` does, by its Triton kernel."""
    out = torch.empty(*scales.shape[:-1], scales.shape[-1] * GROUP, dtype=dtype, device=blocks.device)
    grid = (cdiv(blocks.numel(), BYTES),)
    launch(_write_out, grid, blocks, scales, out, blocks.numel(), BYTES=BYTES, GROUP=GROUP, num_warps=8)
    return out


def multiply_triton(
    x: Tensor, weight: MXFP4Tensor, offsets: Tensor, rows: Tensor | None, transposed: bool, tile: Tile = TILE
) -> Tensor:
    """Do what `multiply_packed` does, by its Triton kernel."""
    experts, k, n = weight.shape
    count, width = len(x) if rows is None else len(rows), k if transposed else n
    y = x.new_empty(count, width)
    grid = (cdiv(count, tile.rows) + experts) * cdiv(width, tile.cols)
    launch(
        _multiply, (grid,), x, *weight.parts, y, offsets, offsets if rows is None else rows, n, k,
        E=experts, EXPERTS=next_power_of_2(experts), GATHER=rows is not None, ACROSS=transposed, GROUP=GROUP,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def write_out(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of blocks uint8 [..., G, 16] and scales uint8 [..., G] as [..., 32·G] in `dtype`."""
    if blocks.is_cuda:
        return write_out_triton(blocks, scales, dtype)
    return write_out_reference(blocks, scales, dtype)


def multiply_packed(
    x: Tensor, weight: MXFP4Tensor, offsets: Tensor, rows: Rows | None = None, transposed: bool = False
) -> Tensor:
    """Multiply rows by their expert's weight: x W_e [S, N]; transposed, of dy [S, N]: dy W_eᵀ [S, K].

    Args:
        x: contiguous, 16 bits on a GPU.
        offsets, rows: as `grouped_gemm.multiply`'s.
    """
    if x.is_cuda:
        return multiply_triton(x, weight, offsets, None if rows is None else rows.tokens, transposed)
    dense = weight.dequantise().to(x.dtype)
    return multiply(x, dense.mT if transposed else dense, offsets, "loop", rows=rows)
