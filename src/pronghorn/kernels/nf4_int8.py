"""Write 4-bit weights out as 8-bit integers of turned rows, for products in integers (`kernels.int8`).

    codes = round(z / s)        z = (W / f) H, or (Wᵀ / f) H        by groups of 64 columns

f and s are those of the whole weight, found once. The values of 4 bits go through the products' dtype before they are
divided, so codes are those that `quantise_turned` makes of the weight as it is written out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.int8 import GROUP, hadamard
from pronghorn.kernels.launch import by_device, cdiv, launch, tl, triton
from pronghorn.kernels.nf4 import NF4Weight, _absmax, _tensors, write_out_reference

ALONG, ACROSS = (1, 128), (64, 2)
"""Rows, and groups of 64 columns, of a program's tile, for W and for Wᵀ."""
WARPS = 4


def fits(weight: NF4Weight) -> bool:
    """Tell whether no group of 64 lies in two blocks or two weights: rows, columns and blocks are multiples of it."""
    return not (weight.shape[0] % GROUP or weight.shape[1] % GROUP or weight.block % GROUP)


def write_turned_reference(weight: NF4Weight, factors: Tensor, scales: Tensor, out: Tensor, across: bool) -> None:
    """Write the codes of W / f, turned, into `out` [N, K]; or of Wᵀ / f into `out` [K, N] if `across`.

    Args:
        weight: one that `fits`, written out in the products' dtype.
        factors: f [K], or [N], in that dtype.
        scales: s, float32 [N], or [K].
        out: int8, maybe columns of a wider tensor.
    """
    dense = torch.empty(weight.shape, dtype=factors.dtype, device=out.device)
    write_out_reference(weight, dense)
    rows = dense.t() if across else dense
    wide = (rows.float() * (1 / factors.float())).to(factors.dtype).reshape(len(rows), -1, GROUP)
    turned = (wide.float() @ hadamard(out.device)).reshape(rows.shape)
    out.copy_((turned * (1 / scales)[:, None]).round())


@triton.jit
def _write_turned(
    packed_ptr,  # [N, K/2]
    table_ptr,  # [16]
    absmax_ptr,  # [N·K/block]
    levels_ptr,  # [256]
    outer_ptr,  # [blocks/256]
    offset_ptr,  # [1]
    factors_ptr,  # [K], or [N] if ACROSS
    scales_ptr,  # [N], or [K] if ACROSS
    h_ptr,  # [64, 64]
    out_ptr,  # [N, K], or [K, N] if ACROSS
    K, out_stride, count,  # groups of W in all, or of a row if ACROSS
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, OUTER: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = GROUP // 2
    each, half = tl.arange(0, GROUP), tl.arange(0, HALF)
    h = tl.load(h_ptr + each[:, None] * GROUP + each[None, :])
    if ACROSS:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        first = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        there = first < count
        at = row.to(tl.int64)[:, None] * count + tl.minimum(first, count - 1)[None, :]
    else:
        first = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
        there = first < count
        at = tl.minimum(first, count - 1)[None, :]
    absmax = _absmax(absmax_ptr, levels_ptr, outer_ptr, offset_ptr, at * GROUP // BLOCK, at >= 0, OUTER)[:, :, None]
    byte = tl.load(packed_ptr + at[:, :, None] * HALF + half[None, None, :]).to(tl.int32)
    high, low = tl.load(table_ptr + (byte >> 4)) * absmax, tl.load(table_ptr + (byte & 15)) * absmax
    values = tl.interleave(high, low).to(h_ptr.dtype.element_ty).to(tl.float32)
    if ACROSS:
        factor = tl.load(factors_ptr + row).to(tl.float32)
        factor = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), factor)
        wide = tl.reshape(values, (ROWS, GROUPS * GROUP)) * factor[:, None]
        z = tl.dot(h, wide.to(h.dtype), input_precision="ieee")
        col = tl.program_id(1) * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
        inside = col < K
        scale = tl.load(scales_ptr + col, mask=inside, other=1.0)
        z *= tl.div_rn(tl.full((GROUPS * GROUP,), 1.0, tl.float32), scale)[None, :]
        codes = (z + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # the nearest whole numbers, as in `int8`
        to = out_ptr + col.to(tl.int64)[:, None] * out_stride + row[None, :]
        tl.store(to, tl.trans(codes), mask=inside[:, None])
    else:
        in_row = K // GROUP
        columns = (first % in_row)[:, None] * GROUP + each[None, :]
        factor = tl.load(factors_ptr + columns).to(tl.float32)
        factor = tl.div_rn(tl.full((GROUPS, GROUP), 1.0, tl.float32), factor)
        z = tl.dot((tl.reshape(values, (GROUPS, GROUP)) * factor).to(h.dtype), h, input_precision="ieee")
        row = first // in_row
        scale = tl.load(scales_ptr + row, mask=there, other=1.0)
        z *= tl.div_rn(tl.full((GROUPS,), 1.0, tl.float32), scale)[:, None]
        codes = (z + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        to = out_ptr + row[:, None] * out_stride + columns
        tl.store(to, codes, mask=there[:, None])


def write_turned_triton(weight: NF4Weight, factors: Tensor, scales: Tensor, out: Tensor, across: bool) -> None:
    """Do what `write_turned` does, by its Triton kernel."""
    tensors, outer = _tensors(weight)
    n, k = weight.shape
    rows, groups = ACROSS if across else ALONG
    count = k // GROUP if across else n * k // GROUP
    grid = (n // rows, cdiv(count, groups)) if across else (cdiv(count, groups),)
    launch(
        _write_turned, grid, *tensors, factors, scales, hadamard(out.device, factors.dtype), out, k, out.stride(0),
        count, ROWS=rows, GROUPS=groups, GROUP=GROUP, BLOCK=weight.block, OUTER=outer, ACROSS=across, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


write_turned = by_device(write_turned_reference, write_turned_triton, at=3)
