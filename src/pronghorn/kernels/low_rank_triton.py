"""Tiles that a low-rank product xa bᵀ is added to on the way, in Triton.

Tensor cores leave a thread two neighbouring columns of a product; loads and stores want eight (16 bytes). So the rows
of xa and of b are dealt to the product such that a thread is left with the eight that it also loads:

    the product's row     [again][warp][half: 2][lane: 8]         its column     [block][j: 4][lane: 4][i: 2]
    the tile's row        [again][half: 2][warp][lane: 8]         its column     [block][lane: 4][j: 4][i: 2]

where again, half, block, j and i are a thread's own. Where a card's products lie otherwise, the compiler moves them.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(32)
"""Columns of a block; a tile's are a multiple of it, its rows of 16 times the warps."""


@triton.jit
def places(row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(rows [M, 1], columns [M, 32]) of the tile [ROWS, COLS] that begins there, block after block."""
    m = tl.arange(0, ROWS * COLS // BLOCK)[:, None]
    return (row + m % ROWS).to(tl.int64), col + m // ROWS * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def product_rows(row, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[ROWS]: the row of xa at each of the product's."""
    m = tl.arange(0, ROWS)
    again, warp, half, lane = m // (16 * WARPS), m // 16 % WARPS, m // 8 % 2, m % 8
    return row + ((again * 2 + half) * WARPS + warp) * 8 + lane


@triton.jit
def product_cols(col, COLS: tl.constexpr):
    """[COLS]: the row of b at each of the product's columns."""
    m = tl.arange(0, COLS)
    block, j, lane, i = m // BLOCK, m // 8 % 4, m // 2 % 4, m % 2
    return col + block * BLOCK + lane * 8 + j * 2 + i


@triton.jit
def load(ptr, at, end, row, first, rank, R: tl.constexpr):
    """[N, R]: the columns from `first` on, `rank` of them, of the rows `at` [N] before `end`; the rest is zero."""
    k = tl.arange(0, R)[None, :]
    known = (at < end)[:, None] & (k < rank)
    return tl.load(ptr + at.to(tl.int64)[:, None] * row + first + k, mask=known, other=0.0)


@triton.jit
def product(xa, b, ROWS: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr):
    """[M, 32]: xa bᵀ in float32 at `places`, of xa's rows at `product_rows` and b's at `product_cols`."""
    low = tl.dot(xa, tl.trans(b), input_precision="ieee")
    low = tl.reshape(low, (ROWS // (16 * WARPS), WARPS, 2, 8, COLS // BLOCK, 4, 4, 2))
    low = tl.permute(low, (4, 0, 2, 1, 3, 6, 5, 7))
    return tl.reshape(low, (ROWS * COLS // BLOCK, BLOCK))
