"""Both skinny products of adapters' gradients in Triton, reading dy once.

A program walks down the rows of one chunk of dy's columns. What they give of dB stays in registers on the way; what the
columns give of dya is written for each tile of tokens. Both are parts, in float32, which a second kernel adds in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ADAPTERS = 3
"""The most that a group has: of q, k and v."""


@dataclass(frozen=True)
class Tile:
    """A program's tile of dy, how many of them it walks down, and how."""

    tokens: int
    cols: int
    steps: int
    warps: int
    stages: int
    evict: str = ""
    swap: bool = False
    summed: int = 512
    together: int = 8


@triton.jit
def _chunk(chunk, start0, start1, start2, end0, end1, end2, COLS: tl.constexpr):
    """(adapter, first column, end of the adapter's columns) of the chunk-th chunk; none goes beyond an adapter."""
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
    dy_ptr, b_ptr, xa_ptr, dya_ptr, db_ptr, copy_ptr, T, N, dy_row, copy_row, ranks, rank, steps,
    start0, start1, start2, end0, end1, end2,
    R: tl.constexpr, COPY: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
    EVICT: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    chunk, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    adapter, start, end = _chunk(tl.program_id(0), start0, start1, start2, end0, end1, end2, COLS)
    cols, tokens, k = start + tl.arange(0, COLS), tl.arange(0, TOKENS), tl.arange(0, R)
    mine, ours = (cols < end)[None, :], (k < rank)[None, :]
    within = (cols < end)[:, None] & ours
    first = adapter * rank
    b = tl.load(b_ptr + cols.to(tl.int64)[:, None] * ranks + first + k[None, :], mask=within, other=0.0)

    begin = block * steps * TOKENS
    dy_ptr += begin * dy_row
    copy_ptr += begin * copy_row
    xa_ptr += begin * ranks + first
    dya_ptr += (chunk * T + begin) * rank
    db = tl.zeros((R, COLS), tl.float32) if SWAP else tl.zeros((COLS, R), tl.float32)
    for step in tl.range(0, tl.minimum(steps, tl.cdiv(T - begin, TOKENS)).to(tl.int32), num_stages=STAGES):
        there = (begin + step * TOKENS + tokens < T)[:, None]
        at = tokens[:, None] * dy_row + cols[None, :]
        dy = tl.load(dy_ptr + at, mask=there & mine, other=0.0, eviction_policy=EVICT)
        xa = tl.load(xa_ptr + tokens[:, None] * ranks + k[None, :], mask=there & ours, other=0.0)
        if SWAP:
            db = tl.dot(tl.trans(xa), dy, db, input_precision="ieee")
            dya = tl.trans(tl.dot(tl.trans(b), tl.trans(dy), input_precision="ieee"))
        else:
            db = tl.dot(tl.trans(dy), xa, db, input_precision="ieee")
            dya = tl.dot(dy, b, input_precision="ieee")
        tl.store(dya_ptr + tokens[:, None] * rank + k[None, :], dya, mask=there & ours)
        if COPY:
            tl.store(copy_ptr + tokens[:, None] * copy_row + cols[None, :], dy, mask=there & mine)
        dy_ptr += TOKENS * dy_row
        copy_ptr += TOKENS * copy_row
        xa_ptr += TOKENS * ranks
        dya_ptr += TOKENS * rank
    if SWAP:
        db = tl.trans(db)
    tl.store(db_ptr + (block * N + cols)[:, None] * rank + k[None, :], db, mask=within)


@triton.jit
def _add_up(parts_ptr, at, size, first, end, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """The elements `at` of the parts from `first` to `end`, of `size` elements each, added in one order always."""
    part = tl.arange(0, TOGETHER)[:, None]
    from_ptr = parts_ptr + part.to(tl.int64) * size + at[None, :]
    total = tl.zeros((TOGETHER, BLOCK), tl.float32)
    for before in range(first, end, TOGETHER):
        mask = (before + part < end) & (at < size)[None, :]
        total += tl.load(from_ptr + tl.full((), before, tl.int64) * size, mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["blocks", "chunks0", "chunks1", "chunks2"])
def _sums(
    dya_parts_ptr, db_parts_ptr, dya_ptr, db_ptr, T, N, dya_row, ranks, rank, blocks, scale,
    chunks0, chunks1, chunks2, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program adds up BLOCK elements of one adapter's dya, or, after all of these, of dB."""
    programs = (T * rank + BLOCK - 1) // BLOCK
    adapter = tl.program_id(0) // programs
    at = (tl.program_id(0) % programs) * BLOCK + tl.arange(0, BLOCK)
    if adapter < ranks // rank:
        first, end = chunks0, chunks0 + chunks1
        if adapter == 0:
            first, end = end - end, chunks0
        if adapter == 2:
            first, end = end, end + chunks2
        total = scale * _add_up(dya_parts_ptr, at, T * rank, first, end, TOGETHER, BLOCK)
        to = (at // rank).to(tl.int64) * dya_row + adapter * rank + at % rank
        tl.store(dya_ptr + to, total.to(dya_ptr.dtype.element_ty), mask=at < T * rank)
    else:
        at += (adapter - ranks // rank) * programs * BLOCK
        total = scale * _add_up(db_parts_ptr, at, N * rank, 0, blocks, TOGETHER, BLOCK)
        tl.store(db_ptr + at, total.to(db_ptr.dtype.element_ty), mask=at < N * rank)


def products(
    dy: Tensor,
    b: Tensor,
    xa: Tensor,
    columns: list[slice],
    ranks_each: list[int],
    scale: float,
    dtype: torch.dtype,
    copy: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """As `adapter_gradients.products`."""
    (tokens, width), ranks = dy.shape, b.shape[1]
    rank = ranks // len(columns)
    tile = tile or Tile(64, 256, 8, 4, 3)
    starts = [c.start for c in columns] + [0] * (ADAPTERS - len(columns))
    ends = [c.stop for c in columns] + [0] * (ADAPTERS - len(columns))
    chunks = [triton.cdiv(end - start, tile.cols) for start, end in zip(starts, ends, strict=True)]
    blocks = triton.cdiv(tokens, tile.tokens * tile.steps)
    dya_parts = dy.new_empty(sum(chunks), tokens, rank, dtype=torch.float32)
    db_parts = dy.new_empty(blocks, width, rank, dtype=torch.float32)
    _parts[(sum(chunks), blocks)](
        dy, b, xa, dya_parts, db_parts, dy if copy is None else copy, tokens, width, dy.stride(0),
        0 if copy is None else copy.stride(0), ranks, rank, tile.steps, *starts, *ends,
        R=max(16, triton.next_power_of_2(rank)), COPY=copy is not None, TOKENS=tile.tokens, COLS=tile.cols,
        STAGES=tile.stages, EVICT=tile.evict, SWAP=tile.swap, num_warps=tile.warps,
    )  # fmt: skip
    dya = dy.new_empty(tokens, ranks) if copy is None else copy[:, width:]
    db = dy.new_empty(width, rank, dtype=dtype)
    summed = tile.summed
    programs = len(columns) * triton.cdiv(tokens * rank, summed) + triton.cdiv(width * rank, summed)
    _sums[(programs,)](
        dya_parts, db_parts, dya, db, tokens, width, dya.stride(0), ranks, rank, blocks, scale, *chunks,
        TOGETHER=tile.together, BLOCK=summed,
    )  # fmt: skip
    return dya, [db[mine] for mine in columns]
