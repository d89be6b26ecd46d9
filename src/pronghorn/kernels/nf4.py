"""Write 4-bit weights out (NF4: Dettmers et al. 2023, arXiv:2305.14314), in bitsandbytes' storage and to its bits.

    w_i = table[code_i] · a_(i / 64)        a_b = levels[code_b] · a'_(b / 256) + offset, where statistics are nested

Two codes a byte, the first one in the high half. As 8 bits for a product in FP8 (`kernels.quantise`):

    s_n = max_b |a_nb| / 448        codes_nk = e4m3(table[code_nk] · (a_nb · (1 / s_n)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, cdiv, launch, tl, triton
from pronghorn.kernels.quantise import DTYPE, weight_scales

BYTES = 4096
"""Of codes, that a program reads."""
WARPS = 4
ALONG, ACROSS = (1, 64), (64, 1)
"""Rows and blocks of values of a program's tile, for codes as they lie and for their transpose."""
CODE_WARPS = 2


@dataclass(frozen=True, eq=False)
class NF4Weight:
    """One 4-bit weight W [N, K] as bitsandbytes stores it."""

    packed: Tensor
    """uint8 [N·K/2], two codes a byte."""
    table: Tensor
    """float32 [16]."""
    absmax: Tensor
    """a, float32 [N·K/64]; or its codes, uint8, if statistics are nested."""
    shape: tuple[int, int]
    block: int
    levels: Tensor | None = None
    """float32 [256], of nested statistics."""
    outer: Tensor | None = None
    """a', float32 [blocks/256]."""
    outer_block: int = 256
    offset: Tensor | None = None
    """float32, one number."""

    @classmethod
    def of(cls, parameter: Any) -> NF4Weight:
        """Read a `Params4bit`."""
        state = parameter.quant_state
        packed = parameter.data.view(torch.uint8).reshape(-1)
        shape = (state.shape[0], state.shape[1])
        if not state.nested:
            return cls(packed, state.code, state.absmax, shape, state.blocksize)
        inner = state.state2
        outer = (inner.code, inner.absmax, inner.blocksize, state.offset)
        return cls(packed, state.code, state.absmax, shape, state.blocksize, *outer)

    def statistics(self) -> Tensor:
        """Return a, float32 [N·K/64]."""
        if self.levels is None or self.outer is None or self.offset is None:
            return self.absmax
        outer = self.outer.repeat_interleave(self.outer_block)[: len(self.absmax)]
        return self.levels[self.absmax.int()] * outer + self.offset

    def row_scales(self) -> Tensor:
        """Return s, float32 [N]; of rows that no block crosses."""
        most = self.statistics().abs().view(self.shape[0], -1).amax(1)
        return weight_scales(most * self.table.abs().max())


def write_out_reference(weight: NF4Weight, out: Tensor) -> None:
    """Write W into `out` [N, K], contiguous, in its dtype."""
    out.copy_(_values(weight, weight.statistics()))


def write_codes_reference(weight: NF4Weight, inverse: Tensor, out: Tensor, across: bool = False) -> None:
    """Write W's codes into `out` [N, K], or [K, N] if `across`; either may be columns of a wider tensor.

    Args:
        inverse: 1 / s, float32 [N].
    """
    factors = (weight.statistics().view(weight.shape[0], -1) * inverse[:, None]).flatten()
    codes = _values(weight, factors).to(DTYPE).view(torch.uint8)
    out.view(torch.uint8).copy_(codes.t() if across else codes)


def _values(weight: NF4Weight, factors: Tensor) -> Tensor:
    """Return table[code] · factor in float32 [N, K], a factor a block."""
    packed = weight.packed.int()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: weight.shape[0] * weight.shape[1]]
    each = factors.repeat_interleave(weight.block)[: len(codes)]
    return (weight.table[codes] * each).view(weight.shape)


@triton.jit
def _absmax(absmax_ptr, levels_ptr, outer_ptr, offset_ptr, at, inside, OUTER: tl.constexpr):
    """Return a of the blocks `at`, in float32; product and sum are rounded apart (no fused multiply-add)."""
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
    tl.store(out_ptr + to, values, mask=to // 2 < count)


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
    """Return the tensors that the kernels read, and blocks an outer statistic (0 if statistics aren't nested)."""
    if weight.levels is None or weight.outer is None or weight.offset is None:
        return (weight.packed, weight.table, weight.absmax, weight.table, weight.table, weight.table), 0
    nested = weight.levels, weight.outer, weight.offset
    return (weight.packed, weight.table, weight.absmax, *nested), weight.outer_block


def write_out_triton(weight: NF4Weight, out: Tensor) -> None:
    """Do what `write_out` does, by its Triton kernel."""
    tensors, outer = _tensors(weight)
    half, count = weight.block // 2, weight.packed.numel()
    blocks = max(BYTES // half, 1)
    launch(
        _write_out, (cdiv(count, blocks * half),), *tensors, out, count,
        HALF=half, BLOCKS=blocks, OUTER=outer, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def write_codes_triton(weight: NF4Weight, inverse: Tensor, out: Tensor, across: bool = False) -> None:
    """Do what `write_codes` does, by its Triton kernel."""
    tensors, outer = _tensors(weight)
    rows, blocks = ACROSS if across else ALONG
    grid = (cdiv(weight.shape[0], rows), cdiv(weight.shape[1], blocks * weight.block))
    launch(
        _write_codes, grid, *tensors, inverse, out, *weight.shape, out.stride(0),
        HALF=weight.block // 2, ROWS=rows, BLOCKS=blocks, OUTER=outer, ACROSS=across, num_warps=CODE_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


write_out = by_device(write_out_reference, write_out_triton, at=1)


def dequantise(parameter: Any) -> Tensor:
    """Return the values of a `Params4bit` as [N, K], in the dtype that it was quantised from."""
    from bitsandbytes.functional import dequantize_4bit

    state = parameter.quant_state
    if parameter.is_cuda or not state.shape[-1] % state.blocksize:
        return dequantize_4bit(parameter.data, state)
    # on the CPU bitsandbytes 0.50 takes scales of other blocks where rows end inside one
    out = torch.empty(tuple(state.shape), dtype=state.dtype, device=parameter.device)
    write_out(NF4Weight.of(parameter), out)
    return out


write_codes = by_device(write_codes_reference, write_codes_triton, at=2)
