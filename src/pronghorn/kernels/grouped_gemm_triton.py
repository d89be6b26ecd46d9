"""Grouped products in Triton: the grid covers the most tiles that any grouping could need, ⌈S/ROWS⌉ + E, and each
program finds its expert from the offsets on the device (surplus ones return), so that the host never knows them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, next_power_of_2


@dataclass(frozen=True)
class Tile:
    """A program's tile of the result, and its step through the sum."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


def multiply_tile(dtype: torch.dtype, columns: int) -> Tile:
    """The tile for y = x W with that many columns: within 99 KB of shared memory, the least of Ampere to Blackwell."""
    if dtype is torch.float32:
        return Tile(64, 64, 32, 4, 2) if columns > 32 else Tile(64, 16, 32, 4, 2)
    return Tile(128, 128, 64, 8, 3) if columns > 64 else Tile(128, 16 if columns <= 16 else 64, 64, 4, 3)


def outer_tile(dtype: torch.dtype, m: int, n: int) -> Tile:
    """The tile for G = xᵀ y: thin where a rank is."""
    wide = 64 if dtype is torch.float32 else 128
    rows, cols = (16 if size <= 16 else 32 if size <= 32 else wide for size in (m, n))
    return Tile(rows, cols, 32, 4 if rows * cols <= 64 * 64 else 8, 3)


@triton.jit
def _tile_of(offsets_ptr, tile, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, end row) of the tile-th tile when each expert's rows are cut into tiles; expert E past the
    last."""
    ids = tl.arange(0, EXPERTS)
    ends = tl.load(offsets_ptr + ids, mask=ids < E, other=0)
    starts = tl.load(offsets_ptr + ids - 1, mask=(ids > 0) & (ids < E), other=0)
    tiles = tl.where(ids < E, (ends - starts + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where((ids < E) & (upto <= tile), 1, 0), 0)
    mine = ids == expert
    start = tl.sum(tl.where(mine, starts + (tile - upto + tiles) * ROWS, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return expert, start, end


@triton.jit
def _multiply(
    x_ptr, w_ptr, y_ptr, offsets_ptr, rows_ptr, N, K, w_expert, w_k, w_n, scale,
    E: tl.constexpr, EXPERTS: tl.constexpr, GATHER: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, COLS)
    expert, start, end = _tile_of(offsets_ptr, tl.program_id(0) // across, E, EXPERTS, ROWS)
    if expert < E:
        rows = start + tl.arange(0, ROWS)
        cols = (tl.program_id(0) % across) * COLS + tl.arange(0, COLS)
        # Rows outside read one that is inside: their results are not stored.
        source = tl.minimum(rows, end - 1)
        if GATHER:
            source = tl.load(rows_ptr + source)
        depth = tl.arange(0, DEPTH)
        x = x_ptr + source.to(tl.int64)[:, None] * K + depth[None, :]
        w = w_ptr + expert.to(tl.int64) * w_expert + depth.to(tl.int64)[:, None] * w_k
        w += cols.to(tl.int64)[None, :] * w_n
        known = (cols < N)[None, :]
        total = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, DEPTH):
            left = tl.load(x, mask=(depth < K - k)[None, :], other=0.0)
            right = tl.load(w, mask=(depth < K - k)[:, None] & known, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
            x += DEPTH
            w += DEPTH * w_k
        total *= scale
        y = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        inside = (rows < end)[:, None] & (cols < N)[None, :]
        if ADD:
            total += tl.load(y, mask=inside, other=0.0).to(tl.float32)
        tl.store(y, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _outer(
    x_ptr, y_ptr, g_ptr, offsets_ptr, x_rows_ptr, y_rows_ptr, M, N, scale,
    X_GATHER: tl.constexpr, Y_GATHER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, COLS)
    expert = tl.program_id(1)
    m = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    n = (tl.program_id(0) % across) * COLS + tl.arange(0, COLS)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(start, end, DEPTH):
        rows = first + tl.arange(0, DEPTH)
        known = rows < end
        x_rows = rows
        y_rows = rows
        if X_GATHER:
            x_rows = tl.load(x_rows_ptr + rows, mask=known, other=0)
        if Y_GATHER:
            y_rows = tl.load(y_rows_ptr + rows, mask=known, other=0)
        x = x_ptr + x_rows.to(tl.int64)[:, None] * M + m[None, :]
        y = y_ptr + y_rows.to(tl.int64)[:, None] * N + n[None, :]
        x = tl.load(x, mask=known[:, None] & (m < M)[None, :], other=0.0)
        y = tl.load(y, mask=known[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(tl.trans(x), y, total, input_precision="ieee")
    g = g_ptr + expert.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(g, (total * scale).to(g_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def multiply(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    out: Tensor | None,
    scale: float,
    tile: Tile | None = None,
) -> Tensor:
    """As `grouped_gemm.multiply`; another tile than `multiply_tile`'s is for measuring."""
    experts, depth, columns = weight.shape
    count = len(x) if rows is None else len(rows)
    y = x.new_empty(count, columns) if out is None else out
    tile = tile or multiply_tile(x.dtype, columns)
    grid = (cdiv(count, tile.rows) + experts) * cdiv(columns, tile.cols)
    launch(
        _multiply, (grid,),
        x, weight, y, offsets, offsets if rows is None else rows, columns, depth, *weight.stride(), scale,
        E=experts, EXPERTS=next_power_of_2(experts), GATHER=rows is not None, ADD=out is not None,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def outer(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    x_rows: Tensor | None,
    y_rows: Tensor | None,
    scale: float,
    tile: Tile | None = None,
) -> Tensor:
    """As `grouped_gemm.outer`."""
    (m, n), experts = (x.shape[1], y.shape[1]), len(offsets)
    result = torch.empty(experts, m, n, dtype=dtype, device=x.device)
    tile = tile or outer_tile(x.dtype, m, n)
    launch(
        _outer, (cdiv(m, tile.rows) * cdiv(n, tile.cols), experts),
        x, y, result, offsets, offsets if x_rows is None else x_rows, offsets if y_rows is None else y_rows, m, n,
        scale, X_GATHER=x_rows is not None, Y_GATHER=y_rows is not None,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return result
