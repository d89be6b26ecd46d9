"""Products in 8-bit integers of rows that are rotated first, so that no number of a row stands out.

    z_t = ((x_t · f) cut into groups of 64) H        H: Hadamard's matrix / 8, its own inverse; x · f in 16 bits
    s_t = max_k |z_tk| / 127                         codes_tk = round(z_tk / s_t)
    y   = s_x · (codes_x codes_Wᵀ) · s_W             summed exactly, in 32 bits

f is a factor a column of x, and 1 / f one of W's: with f_k the root mean square of W's column k, what a channel of x
weighs in y decides what share of the 8 bits it gets, and a channel of x that is scaled up while W's column is scaled
down changes no code. H rotates both operands alike, which leaves x Wᵀ as it is and spreads an outlier over its group
(QuaRot: Ashkboos et al. 2024, arXiv:2404.00456).
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.launch import TensorDescriptor, cdiv, launch, next_power_of_2, tl, triton, uses_tma
from pronghorn.kernels.quantise import RowCodes, larger
from pronghorn.ranges import PRODUCTS, in_part

GROUP = 64
"""Columns that are rotated together; K is a multiple."""
LIMIT = 127.0
LONGEST = (2**31 - 1) // int(LIMIT) ** 2 // GROUP * GROUP
"""Columns that 32 bits have the sum of, whatever the codes."""
SMALLEST = 1e-30
"""The least scale: a row of zeros has it."""
IN_PLACE, BY_TMA = (128, 128, 128, 3, 8), (128, 128, 128, 3, 4)
"""Rows of x and of W and columns of both that a program multiplies at a time, stages, warps: two programs of this size
fit a multiprocessor of Hopper, so that one multiplies while the other stores. By TMA, which needs no threads to fetch
tiles, four warps are the faster."""
TOGETHER = 16
"""Tiles of rows that go through all tiles of columns one after the other, so that W's stay in the cache."""
FEWEST = 16
"""Rows of an operand of the tensor cores."""


class Setting(NamedTuple):
    """How rows of up to so many columns are rotated."""

    columns: float
    groups: int
    """Of a row, that a product takes at a time; of narrower rows as many as they have."""
    rows: int
    """Of a product, and of a program."""
    warps: int
    programs: int
    """Of a multiprocessor."""
    passes: int = 1
    """Over a row: one holds all of it in registers until its largest element is known, two read and rotate it again."""


SETTINGS = (
    Setting(1024, 16, 4, 4, 4),
    Setting(2048, 32, 4, 4, 8),
    Setting(3072, 16, 4, 4, 8),
    Setting(4096, 64, 2, 4, 8),
    Setting(8192, 32, 4, 4, 4),
    Setting(12288, 64, 1, 4, 8),
    Setting(20480, 32, 1, 2, 16, passes=2),
    Setting(math.inf, 64, 1, 4, 64, passes=2),
)
"""On Hopper the fastest that were tried; rows of 12,288 columns and more:
benchmarks/results/reports/integers-on-an-h200.txt."""
ELSEWHERE = Setting(math.inf, 32, 1, 4, 16, passes=2)
"""Fits the shared memory of every card, and no rows of tensor memory, in whose layouts Triton can't find the largest
element (sm_100). Not measured."""


@cache
def hadamard(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return H [64, 64], which any dtype holds exactly."""
    index = torch.arange(GROUP, device=device)
    shared = index[:, None] & index[None, :]
    for shift in (4, 2, 1):
        shared = shared ^ (shared >> shift)
    return ((1 - 2 * (shared & 1)).float() / 8).to(dtype)


def quantise_rotated_reference(x: Tensor, factors: Tensor) -> RowCodes:
    """Do what `quantise_rotated` does, in plain torch."""
    wide = (x.float() * factors.float()).to(x.dtype).unflatten(1, (-1, GROUP))
    with torch.autocast(x.device.type, enabled=False):  # which weights may be quantised under
        rotated = (wide.float() @ hadamard(x.device)).reshape(x.shape)
    scales = (rotated.abs().amax(1, keepdim=True) * (1 / LIMIT)).clamp(min=SMALLEST)
    return RowCodes((rotated * (1 / scales)).round().to(torch.int8), scales)


@triton.jit
def _rotate(x_ptr, factors_ptr, columns, K, h):
    """Return (x · f) H in float32 of groups of rows."""
    x = tl.load(x_ptr + columns, mask=columns < K, other=0.0)
    f = tl.load(factors_ptr + columns, mask=columns < K, other=0.0)
    # one product of 16 bits is float32's, rounded
    x = x * f if f.dtype == x.dtype else (x.to(tl.float32) * f).to(x.dtype)
    return tl.dot(x, h, input_precision="ieee")


@triton.jit
def nearest(x):
    """Return the integers in 8 bits that are nearest to x in float32: its last bits where 1.5 · 2^23 is added to it."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _rotated(
    x_ptr,  # [T, K]
    factors_ptr,  # [K]
    codes_ptr,  # [T, K]
    scales_ptr,  # [T]
    x_stride, T, K, PROGRAMS,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # H: -1 where i and j share an odd number of bits
    shared = tl.arange(0, GROUP)[:, None] & tl.arange(0, GROUP)[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    h = ((1 - 2 * (shared & 1)).to(tl.float32) * 0.125).to(x_ptr.dtype.element_ty)
    lanes = tl.arange(0, ROWS * GROUPS)
    columns = (lanes % GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    SIZE: tl.constexpr = GROUPS * GROUP
    for first in tl.range(tl.program_id(0) * ROWS, T, PROGRAMS * ROWS, num_stages=1):
        # the last row more than once, and the same is stored of it each time
        row = tl.minimum(first + lanes // GROUPS, T - 1).to(tl.int64)[:, None]
        x, codes = x_ptr + row * x_stride, codes_ptr + row * K
        most = tl.zeros((ROWS * GROUPS, GROUP), dtype=tl.float32)
        kept = ()
        if PARTS > 0:
            for part in tl.static_range(PARTS):
                z = _rotate(x + part * SIZE, factors_ptr + part * SIZE, columns, K - part * SIZE, h)
                most = larger(most, z)
                kept = kept + (z,)  # type: ignore[assignment]  # noqa: RUF005 (no star in kernels)
        else:
            for start in range(0, K, SIZE):
                most = larger(most, _rotate(x + start, factors_ptr + start, columns, K - start, h))
        bits = most.to(tl.int32, bitcast=True)  # whose order is that of the numbers, with NaN as the largest
        largest = tl.max(tl.reshape(tl.max(bits, 1), (ROWS, GROUPS)), 1).to(tl.float32, bitcast=True)
        scale = larger(largest * (1.0 / 127.0), tl.full((ROWS,), 1e-30, tl.float32))
        tl.store(scales_ptr + tl.minimum(first + tl.arange(0, ROWS), T - 1), scale)
        inverse = tl.broadcast_to(tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale)[:, None], (ROWS, GROUPS))
        inverse = tl.reshape(inverse, (ROWS * GROUPS,))[:, None]
        if PARTS > 0:
            for part in tl.static_range(PARTS):
                tl.store(codes + part * SIZE + columns, nearest(kept[part] * inverse), mask=columns < K - part * SIZE)
        else:
            for start in range(0, K, SIZE):  # x is in the cache
                z = _rotate(x + start, factors_ptr + start, columns, K - start, h)
                tl.store(codes + start + columns, nearest(z * inverse), mask=columns < K - start)


@cache
def _card(device: torch.device) -> tuple[tuple[Setting, ...], int]:
    """Return the settings for a device, and its multiprocessors."""
    if device.type != "cuda":
        return SETTINGS, 1
    card = torch.cuda.get_device_properties(device)
    return SETTINGS if card.major == 9 else (ELSEWHERE,), card.multi_processor_count


def quantise_rotated_triton(x: Tensor, factors: Tensor, setting: Setting | None = None) -> RowCodes:
    """Do what `quantise_rotated` does, by its Triton kernel."""
    count, size = x.shape
    made = RowCodes(torch.empty(count, size, dtype=torch.int8, device=x.device), torch.empty(count, 1, device=x.device))
    settings, multiprocessors = _card(x.device)
    setting = setting or next(each for each in settings if size <= each.columns)
    groups = max(min(setting.groups, next_power_of_2(size // GROUP)), cdiv(FEWEST, setting.rows))
    parts = cdiv(size, groups * GROUP) if setting.passes == 1 else 0
    programs = min(cdiv(count, setting.rows), setting.programs * multiprocessors)
    launch(
        _rotated, (programs,), x, factors, *made, x.stride(0), count, size, programs,
        PARTS=parts, GROUPS=groups, ROWS=setting.rows, GROUP=GROUP, num_warps=setting.warps,
    )  # fmt: skip
    return made


def quantise_rotated(x: Tensor, factors: Tensor) -> RowCodes:
    """Return the codes of x · factors, rotated by groups of 64 columns; a row that isn't finite has a scale that isn't.

    Args:
        x: [T, K] in 16 bits, its rows contiguous, K a multiple of 64.
        factors: [K] in float32 or, which is faster, in x's dtype, none so small or large that x times it leaves that
            one's range.
    """
    return quantise_rotated_triton(x, factors) if x.is_cuda else quantise_rotated_reference(x, factors)


def int8_product_reference(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Do what `int8_product` does, in plain torch: sums beyond 2^24 are rounded to 24 bits."""
    return ((a.float() @ b.float().t()) * a_scales * b_scales.view(1, -1)).to(dtype)


@triton.jit
def _product(
    a,  # [M, K]: its descriptor with TMA, else where it lies
    b,  # [N, K], the same
    c_ptr,  # [M, N]
    a_scales_ptr,  # [M]
    b_scales_ptr,  # [N]
    M, N, K,
    TMA: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (TOGETHER * tiles_n) * TOGETHER
    size = min(tiles_m - first, TOGETHER)
    row = (first + (tile % (TOGETHER * tiles_n)) % size) * BM
    col = (tile % (TOGETHER * tiles_n)) // size * BN
    rows, cols, ks = row + tl.arange(0, BM), col + tl.arange(0, BN), tl.arange(0, BK)
    if not TMA:
        a_ptr = a + (rows % M).to(tl.int64)[:, None] * K + ks[None, :]
        b_ptr = b + (cols % N).to(tl.int64)[None, :] * K + ks[:, None]
    sums = tl.zeros((BM, BN), dtype=tl.int32)
    for k in range(0, K, BK):
        if TMA:  # zeros past M, N and K
            x, w = a.load([row, k]), b.load([col, k]).T
        else:
            if WHOLE:  # tiles end with the rows
                x, w = tl.load(a_ptr), tl.load(b_ptr)
            else:
                left = K - k
                x = tl.load(a_ptr, mask=ks[None, :] < left, other=0)
                w = tl.load(b_ptr, mask=ks[:, None] < left, other=0)
            a_ptr += BK
            b_ptr += BK
        sums = tl.dot(x, w, sums, input_precision="ieee", out_dtype=tl.int32)
    a_scales = tl.load(a_scales_ptr + rows, mask=rows < M, other=0.0)
    b_scales = tl.load(b_scales_ptr + cols, mask=cols < N, other=0.0)
    y = sums.to(tl.float32) * a_scales[:, None] * b_scales[None, :]
    to = c_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(to, y.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def int8_product_triton(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, tma: bool | None = None
) -> Tensor:
    """Do what `int8_product` does, by its Triton kernel, whose tiles TMA fetches if `tma`, or where it serves."""
    (m, k), n = a.shape, len(b)
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    if tma is None:
        tma = uses_tma(a.device) and (a.data_ptr() | b.data_ptr()) % 16 == 0
    bm, bn, bk, stages, warps = BY_TMA if tma else IN_PLACE
    left, right = (TensorDescriptor.from_tensor(each, [rows, bk]) if tma else each for each, rows in ((a, bm), (b, bn)))
    launch(
        _product, (cdiv(m, bm) * cdiv(n, bn),), left, right, out, a_scales, b_scales, m, n, k,
        TMA=tma, WHOLE=k % bk == 0, BM=bm, BN=bn, BK=bk, TOGETHER=TOGETHER, num_stages=stages, num_warps=warps,
    )  # fmt: skip
    return out


@in_part(PRODUCTS)
def int8_product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (a · a_scales) (b · b_scales)ᵀ [M, N] in `dtype`.

    Args:
        a: int8 [M, K]; a_scales: float32 [M, 1]; b: int8 [N, K]; b_scales: float32 [N]. All contiguous.
    """
    product = int8_product_triton if a.is_cuda else int8_product_reference
    return product(a, a_scales, b, b_scales, dtype)
