"""Experts' weights in MXFP4, as gpt-oss is published: 4 bits a number (e2m1), one scale of 8 bits (e8m0) for 32.

    w = ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} · 2^(s − 127)        two numbers a byte, the lower 4 bits first

Stored are W_eᵀ, [E, N, K] with K packed; layers multiply x [S, K] by W_e [K, N], and dy [S, N] by W_eᵀ. A few experts
at a time are written out to 16 bits and multiplied, so that little more than the 4 bits is ever in memory.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.grouped_gemm import GATHERED, multiply, multiply_some, tma_tile, wide_tile
from pronghorn.kernels.launch import by_device, cdiv, launch, tl, triton
from pronghorn.kernels.moe_rows import Rows, gather
from pronghorn.kernels.packed import PackedExperts
from pronghorn.kernels.small_floats import decode_e2m1, unpack_e2m1

GROUP = 32
"""Numbers that share a scale."""
ROWS = 256
"""Blocks that a program writes out."""
SCRATCH = 2**28
"""Bytes of experts that are written out at a time: 8 of gpt-oss's gates and ups."""


class MXFP4Tensor(PackedExperts):
    """W [E, K, N] of all experts. Its parts: blocks uint8 [E, N, K/32, 16] and scales uint8 [E, N, K/32]."""

    def experts(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        blocks, scales = self.parts
        return write_out(blocks[first:last], scales[first:last], dtype).transpose(1, 2)


def write_out_reference(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of blocks uint8 [..., G, 16] and scales uint8 [..., G] as [..., 32·G] in `dtype`."""
    wide = torch.ldexp(unpack_e2m1(blocks), scales[..., None].int() - 127)
    return wide.flatten(-2).to(dtype)


@triton.jit
def _power(scales):
    """Return 2^(s − 128) in float32, into which the largest s fits; below 2⁻¹²⁶, s < 2, it is a bit of the mantissa."""
    s = scales.to(tl.int32)
    return tl.where(s < 2, 0x00200000 << s, (s - 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _write_out(
    blocks_ptr,  # uint8 [R, 16]
    scales_ptr,  # uint8 [R]
    out_ptr,  # [R, 32]
    count,  # R
    ROWS: tl.constexpr,
):
    """Write the numbers of ROWS blocks."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < count)[:, None]
    held = tl.load(blocks_ptr + rows[:, None] * 16 + tl.arange(0, 16)[None, :], mask=inside, other=0)
    scale = _power(tl.load(scales_ptr + rows, mask=rows < count, other=0))[:, None]  # half of it: hence · 2
    numbers = tl.reshape(tl.join(decode_e2m1(held & 15) * 2 * scale, decode_e2m1(held >> 4) * 2 * scale), (ROWS, 32))
    at = out_ptr + rows[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(at, numbers.to(out_ptr.dtype.element_ty), mask=inside)


def write_out_triton(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Do what `write_out` does, by its Triton kernel."""
    out = torch.empty(*scales.shape[:-1], scales.shape[-1] * GROUP, dtype=dtype, device=blocks.device)
    count = scales.numel()
    launch(_write_out, (cdiv(count, ROWS),), blocks, scales, out, count, ROWS=ROWS, num_warps=8)
    return out


write_out = by_device(write_out_reference, write_out_triton)


def multiply_packed_reference(
    x: Tensor, weight: PackedExperts, offsets: Tensor, rows: Rows | None = None, transposed: bool = False
) -> Tensor:
    """Multiply rows by their expert's weight: x W_e [S, N]; transposed, of dy [S, N]: dy W_eᵀ [S, K].

    Args:
        x: contiguous, 16 bits on a GPU.
        offsets, rows: as `grouped_gemm.multiply`'s.
    """
    dense = weight.dequantise().to(x.dtype)
    return multiply(x, dense.mT if transposed else dense, offsets, "loop", rows=rows)


def multiply_packed_triton(
    x: Tensor, weight: PackedExperts, offsets: Tensor, rows: Rows | None = None, transposed: bool = False
) -> Tensor:
    """Do what `multiply_packed` does, by Triton kernels over some experts at a time."""
    experts, k, n = weight.shape
    width, tokens = k if transposed else n, None if rows is None else rows.tokens
    y = x.new_empty(len(x) if tokens is None else len(tokens), width)
    together = weight.together
    step = max(together, SCRATCH // (k * n * x.itemsize) // together * together)
    for first in range(0, experts, step):
        dense = weight.experts(first, min(first + step, experts), x.dtype)
        dense = dense.mT if transposed else dense
        tile = tma_tile(x, dense) if len(y) and (tokens is None or width >= GATHERED) else None
        if tile is None:
            multiply_some(x, dense, offsets, tokens, y, first, wide_tile(x.dtype, width, x.device))
        else:
            if rows is not None and tokens is not None:
                x, tokens = gather(x, rows), None
            multiply_some(x, dense, offsets, None, y, first, tile, tma=True)
        del dense
    return y


multiply_packed = by_device(multiply_packed_reference, multiply_packed_triton)
