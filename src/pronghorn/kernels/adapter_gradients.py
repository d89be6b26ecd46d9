"""The two products of LoRA adapters' gradients (Hu et al. 2021, arXiv:2106.09685) that read dy, which is wide.

    dya  = s · dy B              and from it dA = dyaᵀ x
    dB_i = s · dy_iᵀ xa_i        dy_i: adapter i's columns of dy, xa_i: its columns of xa = x Aᵀ

B holds the adapters' own along its diagonal. By torch each product reads dy; the Triton kernel reads it once for all.

In Triton a program walks down a block of rows of some columns of dy, a chunk. Their dB stays in registers on the way;
their dya is written tile by tile. Both are parts, in float32, which a second kernel adds in order: nothing is added
atomically.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pronghorn.device import HOPPER
from pronghorn.kernels.launch import cdiv, launch, next_power_of_2, tl, triton
from pronghorn.ranges import ADAPTERS, in_part

MAX_RANK = 32
"""The rank up to which one reading pays: what it writes in parts grows with the rank."""
MAX_ADAPTERS = 3
"""The most that a group has: of q, k and v."""


def suits(dy: Tensor, xa: Tensor, columns: list[slice], ranks: list[int]) -> bool:
    """Tell whether the Triton kernel serves: 16 bits, adapters of one small rank, Hopper (not measured elsewhere)."""
    if not dy.is_cuda or torch.cuda.get_device_capability(dy.device) != HOPPER:
        return False
    laid_out = dy.dtype in (torch.bfloat16, torch.float16) and dy.stride(1) == 1 and xa.is_contiguous()
    laid_out = laid_out and dy.stride(0) % 8 == 0  # rows begin where 16 bytes do: else it is slower than torch
    return laid_out and len(columns) <= MAX_ADAPTERS and len(set(ranks)) == 1 and ranks[0] <= MAX_RANK


def products_reference(
    dy: Tensor,
    b: Tensor,
    xa: Tensor,
    columns: list[slice],
    ranks: list[int],
    scale: float,
    dtype: torch.dtype,
    both: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Do what `products` does, in plain torch."""
    dya = torch.addmm(dy.new_empty(1, 1), dy, b, beta=0, alpha=scale)
    if both is not None:
        torch.cat([dy, dya], 1, out=both)
    parts = zip(columns, xa.split(ranks, 1), strict=True)
    found = [matmul(dy[:, mine].t(), part, dtype) for mine, part in parts]
    return dya, found if scale == 1 else [db.mul_(scale) for db in found]


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`; a GPU's float32 sums are not rounded to the dtype of a first."""
    if a.is_cuda and dtype is torch.float32 and a.dtype is not dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


TOKENS = 64
"""Rows of a tile."""


SUMMED, TOGETHER = 512, 16
"""Elements that a program of the second kernel adds up, and parts that it loads at a time."""


INTERPRETED = 8
"""Multiprocessors that are reckoned with where there is no GPU."""


@dataclass(frozen=True)
class Tile:
    """A program's columns, its warps, and the tiles that are under way."""

    cols: int
    warps: int
    stages: int


def tile(width: int, rank: int) -> Tile:
    """Return the tile for dy [T, width] and a padded rank.

    Measured on an H200, one program a multiprocessor (rank 16, 8,192 tokens): for N = 28,672 512 columns take 145 µs
    and 256 take 169; for 3,072 it is 30 and 29. At rank 32 a fourth stage takes 191 µs instead of 203 for 28,672, and
    saves nothing for 16,384 and below.
    """
    return Tile(512, 8, 3) if width >= 4096 and rank <= 16 else Tile(256, 4, 4 if width > 16384 else 3)


@triton.jit
def _chunk(chunk, start0, start1, start2, end0, end1, end2, COLS: tl.constexpr):
    """Return (adapter, first column, end of the adapter's columns) of a chunk, which has one adapter's columns only."""
    first1 = (end0 - start0 + COLS - 1) // COLS
    first2 = first1 + (end1 - start1 + COLS - 1) // COLS
    if chunk >= first2:
        adapter, start, end = 2, start2 + (chunk - first2) * COLS, end2
    elif chunk >= first1:
        adapter, start, end = 1, start1 + (chunk - first1) * COLS, end1
    else:
        adapter, start, end = 0, start0 + chunk * COLS, end0
    return adapter, start, end


@triton.jit(do_not_specialize=["steps"])
def _parts(
    dy_ptr,  # [T, N], rows dy_row apart
    b_ptr,  # [N, RANKS]
    xa_ptr,  # [T, RANKS]
    both_ptr,  # [T, N + RANKS]; written with BOTH only
    dya_ptr,  # float32 [chunks, T, RANK]
    db_ptr,  # float32 [blocks, N, RANK]
    T, N, dy_row,
    steps,  # tiles in a block of rows
    start0, start1, start2, end0, end1, end2,  # of each adapter's columns; 0 and 0 where there is no adapter
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BOTH: tl.constexpr,
    TOKENS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the parts of dya and dB of one chunk and block of rows, without s."""
    # ranks are known when it is compiled: else rows of xa that aren't whole 32 bytes could not be loaded ahead
    RANKS: tl.constexpr = ADAPTERS * RANK
    chunk, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    adapter, start, end = _chunk(tl.program_id(0), start0, start1, start2, end0, end1, end2, COLS)
    cols, tokens, k = start + tl.arange(0, COLS), tl.arange(0, TOKENS), tl.arange(0, R)
    mine, known = (cols < end)[None, :], (k < RANK)[None, :]
    within = (cols < end)[:, None] & known
    first = adapter * RANK
    b = tl.load(b_ptr + cols.to(tl.int64)[:, None] * RANKS + first + k[None, :], mask=within, other=0.0)

    begin = block * steps * TOKENS
    dy_ptr += begin * dy_row
    both_ptr += begin * (N + RANKS)
    xa_ptr += begin * RANKS + first
    dya_ptr += (chunk * T + begin) * RANK
    db = tl.zeros((COLS, R), tl.float32)
    # a tile of dy is read once for three uses: dB's sum over rows, dya's part of these columns, and the copy
    for step in tl.range(0, tl.minimum(steps, tl.cdiv(T - begin, TOKENS)).to(tl.int32), num_stages=STAGES):
        there = (begin + step * TOKENS + tokens < T)[:, None]
        dy = tl.load(dy_ptr + tokens[:, None] * dy_row + cols[None, :], mask=there & mine, other=0.0)
        xa = tl.load(xa_ptr + tokens[:, None] * RANKS + k[None, :], mask=there & known, other=0.0)
        db = tl.dot(tl.trans(dy), xa, db, input_precision="ieee")
        dya = tl.dot(dy, b, input_precision="ieee")
        tl.store(dya_ptr + tokens[:, None] * RANK + k[None, :], dya, mask=there & known)
        if BOTH:
            tl.store(both_ptr + tokens[:, None] * (N + RANKS) + cols[None, :], dy, mask=there & mine)
        dy_ptr += TOKENS * dy_row
        both_ptr += TOKENS * (N + RANKS)
        xa_ptr += TOKENS * RANKS
        dya_ptr += TOKENS * RANK
    tl.store(db_ptr + (block * N + cols)[:, None] * RANK + k[None, :], db, mask=within)


@triton.jit
def _add_up(parts_ptr, at, size, first, end, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the elements `at` [BLOCK] of the parts from `first` to `end`, of `size` each; always in one order."""
    part = tl.arange(0, TOGETHER)[:, None]
    parts_ptr += part.to(tl.int64) * size + at[None, :]
    total = tl.zeros((TOGETHER, BLOCK), tl.float32)
    for before in range(first, end, TOGETHER):
        mask = (before + part < end) & (at < size)[None, :]
        # int64: all parts together may have more than 2³¹ elements
        total += tl.load(parts_ptr + tl.full((), before, tl.int64) * size, mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["blocks", "chunks0", "chunks1", "chunks2"])
def _sums(
    dya_parts_ptr,  # float32 [chunks, T, RANK]
    db_parts_ptr,  # float32 [blocks, N, RANK]
    dya_ptr,  # [T, RANKS]
    db_ptr,  # [N, RANK]
    both_ptr,  # [T, N + RANKS]; written with BOTH only
    T, N, scale, blocks,
    chunks0, chunks1, chunks2,  # of each adapter's columns
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, BOTH: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up BLOCK elements of one adapter's dya or, in the programs after those of dya, of dB."""
    RANKS: tl.constexpr = ADAPTERS * RANK
    each = (T * RANK + BLOCK - 1) // BLOCK
    adapter = tl.program_id(0) // each
    at = (tl.program_id(0) % each) * BLOCK + tl.arange(0, BLOCK)
    if adapter < ADAPTERS:  # dya: the chunks of this adapter's columns
        end = chunks0 + tl.where(adapter > 0, chunks1, 0) + tl.where(adapter > 1, chunks2, 0)
        first = end - tl.where(adapter == 0, chunks0, tl.where(adapter == 1, chunks1, chunks2))
        total = scale * _add_up(dya_parts_ptr, at, T * RANK, first, end, TOGETHER, BLOCK)
        token, k = (at // RANK).to(tl.int64), adapter * RANK + at % RANK
        dya = total.to(dya_ptr.dtype.element_ty)
        tl.store(dya_ptr + token * RANKS + k, dya, mask=at < T * RANK)
        if BOTH:
            tl.store(both_ptr + token * (N + RANKS) + N + k, dya, mask=at < T * RANK)
    else:  # dB, of all adapters: the blocks of rows
        at += (adapter - ADAPTERS) * each * BLOCK
        total = scale * _add_up(db_parts_ptr, at, N * RANK, 0, blocks, TOGETHER, BLOCK)
        tl.store(db_ptr + at, total.to(db_ptr.dtype.element_ty), mask=at < N * RANK)


def products_triton(
    dy: Tensor,
    b: Tensor,
    xa: Tensor,
    columns: list[slice],
    ranks: list[int],
    scale: float,
    dtype: torch.dtype,
    both: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Do what `products` does, by its Triton kernels."""
    (tokens, width), rank, padded = dy.shape, ranks[0], max(16, next_power_of_2(ranks[0]))
    shape = tile(width, padded)
    missing = [0] * (MAX_ADAPTERS - len(columns))
    starts, ends = [mine.start for mine in columns] + missing, [mine.stop for mine in columns] + missing
    chunks = [cdiv(end - start, shape.cols) for start, end in zip(starts, ends, strict=True)]
    steps = cdiv(cdiv(tokens, TOKENS), max(1, _processors(dy.device) // sum(chunks)))
    blocks = cdiv(tokens, steps * TOKENS)
    dya_parts = dy.new_empty(sum(chunks), tokens, rank, dtype=torch.float32)
    db_parts = dy.new_empty(blocks, width, rank, dtype=torch.float32)
    launch(
        _parts, (sum(chunks), blocks),
        dy, b, xa, dy if both is None else both, dya_parts, db_parts, tokens, width, dy.stride(0), steps,
        *starts, *ends, ADAPTERS=len(columns), RANK=rank, R=padded, BOTH=both is not None, TOKENS=TOKENS,
        COLS=shape.cols, STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip
    # parts of dB's rows without an adapter are never written: what is added up there is given to nobody
    dya, db = dy.new_empty(tokens, sum(ranks)), dy.new_empty(width, rank, dtype=dtype)
    programs = len(columns) * cdiv(tokens * rank, SUMMED) + cdiv(width * rank, SUMMED)
    launch(
        _sums, (programs,),
        dya_parts, db_parts, dya, db, dya if both is None else both, tokens, width, scale, blocks, *chunks,
        ADAPTERS=len(columns), RANK=rank, BOTH=both is not None, TOGETHER=TOGETHER, BLOCK=SUMMED,
    )  # fmt: skip
    return dya, [db[mine] for mine in columns]


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED


@in_part(ADAPTERS)
def products(
    dy: Tensor,
    b: Tensor,
    xa: Tensor,
    columns: list[slice],
    ranks: list[int],
    scale: float,
    dtype: torch.dtype,
    both: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return (dya [T, R] in dy's dtype, each dB [N_i, r_i] in `dtype`), summed in float32.

    Args:
        dy: [T, N]; b: [N, R], contiguous, and xa: [T, R], in dy's dtype.
        columns: each adapter's of dy; ranks: the adapters', R together.
        scale: s.
        both: [T, N + R], contiguous; dy and dya are written there side by side, where adapters have all columns.
    """
    if suits(dy, xa, columns, ranks):
        return products_triton(dy, b, xa, columns, ranks, scale, dtype, both)
    return products_reference(dy, b, xa, columns, ranks, scale, dtype, both)
