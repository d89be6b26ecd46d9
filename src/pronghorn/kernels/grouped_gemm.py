"""Products of rows grouped by expert: one launch for all experts, whatever their numbers of rows.

    multiply   y_i = s · x_{rows_i} W_{e(i)}          [S, K] · [E, K, N] → [S, N]
    outer      G_e = s · Σ_{i in e} x_iᵀ y_i          [S, M] · [S, N] → [E, M, N]       (an expert without rows: 0)

Three ways: torch's `grouped_mm` (CUTLASS), which below and beside SM90 and SM100 and for other dtypes than bfloat16
loops over experts on the host, so it is not used there; a Triton kernel, which reads gathered rows in place; and a
loop in plain torch, the reference and the CPU's way. `choose` says which, and why.

In Triton the grid covers the most tiles that any grouping could need, ⌈S/ROWS⌉ + E, and each program finds its expert
from the offsets on the device (surplus ones return), so that the host never knows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from pronghorn.kernels.launch import TensorDescriptor, cdiv, launch, next_power_of_2, tl, triton, uses_tma
from pronghorn.kernels.moe_rows import Rows, gather

Way = Literal["torch", "triton", "loop"]
_TORCH_MAJORS = (9, 10)
"""Compute capabilities for which torch has kernels of its own."""
GATHERED = 1024
"""Columns of a result from which on tokens' rows are gathered, so that TMA can fetch them, where that is the faster:
of 768 it lost 8 % in 16 bits and 5 in integers, of 1,536 it gained 3 and 13."""


def choose(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Way, str]:
    """Return the way that large products take, and why.

    Args:
        sizes: every K and N.
    """
    if device.type != "cuda":
        return "loop", f"plain torch, expert by expert, on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if not hasattr(torch, "_grouped_mm"):
        return "triton", "this torch has no grouped_mm"
    if major not in _TORCH_MAJORS:
        return "triton", f"torch's grouped_mm loops on the host on compute capability {major}.{minor}"
    if dtype is not torch.bfloat16:
        return "triton", f"torch's grouped_mm loops on the host in {str(dtype).removeprefix('torch.')}"
    if any(size % 8 for size in sizes):
        return "triton", f"torch's grouped_mm needs rows of whole 16 bytes, sizes are {sizes}"
    return "torch", f"torch's grouped_mm has kernels for compute capability {major}.{minor}"


def groups_of(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first row, end) of experts that have rows, on the host."""
    for e, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        if end > start:
            yield e, start, end


@dataclass(frozen=True)
class Tile:
    """A program's tile of the result, and its step through the sum."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


def multiply_tile(dtype: torch.dtype, columns: int) -> Tile:
    """Return the tile for y = x W with that many columns.

    It fits 99 KB of shared memory, the least of Ampere to Blackwell.
    """
    if dtype is torch.float32:
        return Tile(64, 64, 32, 4, 2) if columns > 32 else Tile(64, 16, 32, 4, 2)
    return Tile(128, 128, 64, 8, 3) if columns > 64 else Tile(128, 16 if columns <= 16 else 64, 64, 4, 3)


def wide_tile(dtype: torch.dtype, columns: int, device: torch.device) -> Tile:
    """Return a tile for y = x W, twice as wide where a block may have 160 KB of shared memory (A100, H100, B200).

    One of Qwen3-30B-A3B's products took 0.82 instead of 0.98 ms (moe-ops.json).
    """
    if dtype is torch.float32 or columns <= 64 or device.type != "cuda":
        return multiply_tile(dtype, columns)
    properties: Any = torch.cuda.get_device_properties(device)
    has_room = properties.shared_memory_per_block_optin >= 160 * 1024
    return Tile(128, 256, 64, 8, 3) if has_room else multiply_tile(dtype, columns)


def tma_tile(x: Tensor, weight: Tensor) -> Tile | None:
    """Return the tile for y = x W whose tiles TMA fetches, or None where x [S, K] or W [C, K, N] has no descriptor."""
    _, depth, columns = weight.shape
    step, along = 64, 1 if weight.stride(1) == 1 else 2
    in_turn = weight.stride(along) == 1 and weight.stride(3 - along) == weight.shape[along]
    whole = in_turn and weight.stride(0) == depth * columns and depth % step == 0 and columns % 8 == 0
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    if not (whole and aligned and columns > 64 and x.element_size() == 2 and uses_tma(x.device)):
        return None
    return Tile(128, 128, step, 4, 3) if along == 1 else Tile(128, 256, step, 8, 4)


def outer_tile(dtype: torch.dtype, m: int, n: int) -> Tile:
    """Return the tile for G = xᵀ y: thin where a side is an adapter's rank."""
    wide = 64 if dtype is torch.float32 else 128
    rows, cols = (16 if size <= 16 else 32 if size <= 32 else wide for size in (m, n))
    return Tile(rows, cols, 32, 4 if rows * cols <= 64 * 64 else 8, 3)


@triton.jit
def tile_of(offsets_ptr, tile, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return (expert, first row, the expert's last row + 1) of a tile, where each expert's rows are cut into tiles.

    The expert is E past the last tile.
    """
    ids = tl.arange(0, EXPERTS)
    ends = tl.load(offsets_ptr + ids, mask=ids < E, other=0)
    starts = tl.load(offsets_ptr + ids - 1, mask=(ids > 0) & (ids < E), other=0)
    tiles = tl.where(ids < E, (ends - starts + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where((ids < E) & (upto <= tile), 1, 0), 0)  # so many have all of their tiles before this one
    mine = ids == expert
    start = tl.sum(tl.where(mine, starts + (tile - upto + tiles) * ROWS, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return expert, start, end


@triton.jit
def _multiply(
    x,  # [T, K]: its descriptor with TMA, else where it lies
    w,  # [last − first, K, N], any strides; with TMA the descriptor of [.. · K, N], or with TRANSPOSED of [.. · N, K]
    y_ptr,  # [S, N]
    offsets_ptr,  # int32 [E]
    rows_ptr,  # int32 [S]; read with GATHER only
    N, K, w_expert, w_k, w_n, scale,
    first, last,  # of the experts whose weights w has
    E: tl.constexpr, EXPERTS: tl.constexpr, TMA: tl.constexpr, TRANSPOSED: tl.constexpr, GATHER: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write a tile of y, of one expert's rows; with ADD, add it to what y holds."""
    across = tl.cdiv(N, COLS)
    expert, start, end = tile_of(offsets_ptr, tl.program_id(0) // across, E, EXPERTS, ROWS)
    if (expert >= first) & (expert < last):
        column = (tl.program_id(0) % across) * COLS
        rows, cols = start + tl.arange(0, ROWS), column + tl.arange(0, COLS)
        # Rows outside read one that is inside, or by TMA other experts': their results are not stored.
        source = tl.minimum(rows, end - 1)
        if GATHER:
            source = tl.load(rows_ptr + source)
        depth = tl.arange(0, DEPTH)
        if not TMA:
            left_ptr = x + source.to(tl.int64)[:, None] * K + depth[None, :]
            right_ptr = w + (expert - first).to(tl.int64) * w_expert + depth.to(tl.int64)[:, None] * w_k
            right_ptr += cols.to(tl.int64)[None, :] * w_n
        known = (cols < N)[None, :]
        total = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, DEPTH):
            if TMA:
                left = x.load([start, k])
                if TRANSPOSED:
                    right = w.load([(expert - first) * N + column, k]).T
                else:
                    right = w.load([(expert - first) * K + k, column])
            else:
                left = tl.load(left_ptr, mask=(depth < K - k)[None, :], other=0.0)
                right = tl.load(right_ptr, mask=(depth < K - k)[:, None] & known, other=0.0)
                left_ptr += DEPTH
                right_ptr += DEPTH * w_k
            total = tl.dot(left, right, total, input_precision="ieee")
        total *= scale
        y = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        inside = (rows < end)[:, None] & (cols < N)[None, :]
        if ADD:
            total += tl.load(y, mask=inside, other=0.0).to(tl.float32)
        tl.store(y, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _outer(
    x_ptr,  # [T, M]
    y_ptr,  # [T, N]
    g_ptr,  # [E, M, N]
    offsets_ptr,  # int32 [E]
    x_rows_ptr, y_rows_ptr,  # int32 [S]; read with X_GATHER, Y_GATHER only
    M, N, scale,
    X_GATHER: tl.constexpr, Y_GATHER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add up a tile of one expert's G; zeros for an expert without rows."""
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


def multiply_triton(
    x: Tensor, weight: Tensor, offsets: Tensor, rows: Tensor | None, out: Tensor | None, scale: float
) -> Tensor:
    """Do what `multiply` does, by the kernels."""
    count, columns = len(x) if rows is None else len(rows), weight.shape[2]
    y = x.new_empty(count, columns) if out is None else out
    multiply_some(x, weight, offsets, rows, y, 0, multiply_tile(x.dtype, columns), scale, out is not None)
    return y


def multiply_some(
    x: Tensor, weight: Tensor, offsets: Tensor, rows: Tensor | None, y: Tensor, first: int, tile: Tile,
    scale: float = 1.0, add: bool = False, tma: bool = False,
) -> None:  # fmt: skip
    """Multiply the rows of the experts from `first` on whose weights [C, K, N] are given; write to y [S, N], or add.

    Args:
        x, offsets, rows: of all experts, as `multiply_triton`'s.
        tma: whether TMA fetches tiles, those of `tma_tile`; without `rows`.
    """
    experts, (some, depth, columns) = len(offsets), weight.shape
    transposed = weight.stride(1) == 1
    left: Any = x
    right: Any = weight
    if tma:
        left = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        flat = (weight.mT if transposed else weight).flatten(0, 1)
        right = TensorDescriptor.from_tensor(flat, [tile.cols, tile.depth] if transposed else [tile.depth, tile.cols])
    grid = (cdiv(len(y), tile.rows) + experts) * cdiv(columns, tile.cols)
    launch(
        _multiply, (grid,),
        left, right, y, offsets, offsets if rows is None else rows, columns, depth, *weight.stride(), scale,
        first, first + some,
        E=experts, EXPERTS=next_power_of_2(experts), TMA=tma, TRANSPOSED=tma and transposed,
        GATHER=rows is not None, ADD=add,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def outer_triton(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    x_rows: Tensor | None,
    y_rows: Tensor | None,
    scale: float,
) -> Tensor:
    """Do what `outer` does, by its Triton kernels."""
    (m, n), experts = (x.shape[1], y.shape[1]), len(offsets)
    result = torch.empty(experts, m, n, dtype=dtype, device=x.device)
    tile = outer_tile(x.dtype, m, n)
    launch(
        _outer, (cdiv(m, tile.rows) * cdiv(n, tile.cols), experts),
        x, y, result, offsets, offsets if x_rows is None else x_rows, offsets if y_rows is None else y_rows, m, n,
        scale, X_GATHER=x_rows is not None, Y_GATHER=y_rows is not None,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return result


def multiply(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    way: Way,
    *,
    rows: Rows | None = None,
    out: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Multiply rows by their expert's weight.

    Args:
        x: [T, K], contiguous.
        weight: [E, K, N] in x's dtype, any strides (a transposed view is read as it lies).
        offsets: int32 [E], where each expert's rows end; the last is S.
        rows: which rows of x those of y are made of; None where they are the same.
        out: [S, N], contiguous: y is added to it. Not for `torch`'s way.
    Returns:
        [S, N] in x's dtype, or `out`.
    """
    if way == "triton":
        return multiply_triton(x, weight, offsets, None if rows is None else rows.tokens, out, scale)
    x = x if rows is None else gather(x, rows)
    if way == "torch":
        assert out is None and scale == 1.0, "grouped_mm neither adds nor scales"
        return torch._grouped_mm(x, weight, offs=offsets)
    y = x.new_empty(x.shape[0], weight.shape[2])
    for e, start, end in groups_of(offsets):
        torch.mm(x[start:end], weight[e], out=y[start:end])
    return y.mul_(scale) if out is None else out.add_(y, alpha=scale)


def outer(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    way: Way,
    *,
    dtype: torch.dtype,
    x_rows: Rows | None = None,
    y_rows: Rows | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Add up each expert's outer products: the gradient of its weight.

    Args:
        x: [T, M] and y: [T, N], contiguous, of one dtype; x_rows, y_rows as `multiply`'s.
        dtype: of the result; `torch`'s way has bfloat16 only, and leaves another to Triton.
    Returns:
        [E, M, N], contiguous.
    """
    if way == "triton" or (way == "torch" and (dtype is not x.dtype or scale != 1.0)):
        x_tokens, y_tokens = (None if rows is None else rows.tokens for rows in (x_rows, y_rows))
        return outer_triton(x, y, offsets, dtype, x_tokens, y_tokens, scale)
    x = x if x_rows is None else gather(x, x_rows)
    y = y if y_rows is None else gather(y, y_rows)
    if way == "torch":
        return torch._grouped_mm(x.t(), y, offs=offsets)
    wide = torch.promote_types(x.dtype, torch.float32)
    result = torch.zeros(len(offsets), x.shape[1], y.shape[1], dtype=dtype, device=x.device)
    for e, start, end in groups_of(offsets):
        result[e] = (x[start:end].to(wide).t() @ y[start:end].to(wide)) * scale
    return result
