"""Products of rows grouped by expert, in 8 bits: a scale a row of what goes in, and one a column of what comes out.

    y_i  = s_i · (codes_{x, i} codes_{W, e(i)}ᵀ) · s_{W, e(i)}        x ≈ codes_x · s_x, W ≈ codes_W · s_W, by rows

W lies in two layouts, quantised each by itself: [E, N, K] for x W with a scale for each of N columns of y, and
[E, K, N] for dy Wᵀ with a scale for each of K columns of dx. So tokens are quantised once, whatever experts they go to,
and not each of their rows; both layouts are read along the sum, as tensor cores of 8 bits need it.

Two ways besides the plain one: torch's `scaled_grouped_mm` (CUTLASS; Hopper, bfloat16), which wants rows gathered, and
a Triton kernel, which reads them in place, for all else from Ada on. `choose_fp8` says which, and why. Formats:
`kernels.quantise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.grouped_gemm import Tile, Way, groups_of, tile_of
from pronghorn.kernels.launch import cdiv, launch, next_power_of_2, tl, triton
from pronghorn.kernels.moe_rows import Rows, gather
from pronghorn.kernels.quantise import DTYPE, quantise_rows

MULTIPLE = 16
"""Sizes that torch's product takes are a multiple of this."""


@dataclass(frozen=True, eq=False)
class Codes:
    """The weights of all experts in one layout."""

    codes: Tensor
    """e4m3 [E, N, K]."""
    scales: Tensor
    """float32 [E, N]."""

    @classmethod
    def of(cls, weight: Tensor) -> Codes:
        """Quantise W [E, N, K], any strides, by its last dimension; an expert at a time, which is copied."""
        codes = torch.empty(weight.shape, dtype=DTYPE, device=weight.device)
        scales = torch.empty(weight.shape[:2], device=weight.device)
        for dense, made, by in zip(weight.detach(), codes, scales, strict=True):
            rows, factors = quantise_rows(dense.contiguous())
            made.copy_(rows)
            by.copy_(factors.squeeze(1))
        return cls(codes, scales)

    def dequantise(self) -> Tensor:
        """Return codes · s in float32 [E, N, K]."""
        return self.codes.float() * self.scales[:, :, None]


@dataclass(frozen=True, eq=False)
class FP8Experts:
    """W [E, K, N] in 8 bits, in the layouts of both products: two bytes a number, and 4 · (N + K) an expert."""

    forward: Codes | None
    """[E, N, K], with N scales an expert; None where x W isn't in 8 bits."""
    backward: Codes
    """[E, K, N], with K scales an expert."""
    exact: bool
    """Sums in float32 all the way, where the tensor cores' own sums keep some 14 bits."""

    @classmethod
    def of(cls, weight: Tensor, exact: bool, forward: bool = True) -> FP8Experts:
        """Quantise W [E, K, N], any strides, for both products or for the input gradient's alone."""
        return cls(Codes.of(weight.mT) if forward else None, Codes.of(weight), exact)

    def side(self, transposed: bool) -> Codes | None:
        """Return the layout of x W, or of dy Wᵀ if `transposed`; None where that product isn't in 8 bits."""
        return self.backward if transposed else self.forward


def choose_fp8(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Way, str]:
    """Return the way that grouped products in 8 bits take, and why.

    Args:
        dtype: of the results.
        sizes: every K and N.
    """
    if device.type != "cuda":
        return "loop", f"plain torch, expert by expert, on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return "triton", f"torch's scaled_grouped_mm by rows is for Hopper, this is compute capability {major}.{minor}"
    if not hasattr(torch.nn.functional, "scaled_grouped_mm"):
        return "triton", f"torch {torch.__version__} has no scaled_grouped_mm"
    if dtype is not torch.bfloat16:
        return "triton", f"torch's scaled_grouped_mm gives bfloat16, not {str(dtype).removeprefix('torch.')}"
    if any(size % MULTIPLE for size in sizes):
        return "triton", f"torch's scaled_grouped_mm needs multiples of {MULTIPLE}, sizes are {sizes}"
    return "torch", "torch's scaled_grouped_mm has kernels for Hopper"


def fp8_tile(columns: int, depth: int, device: torch.device, exact: bool = False) -> Tile:
    """Return the tile of a product in 8 bits, larger where a block may have 200 KB of shared memory (H100, B200).

    Exact sums need as many registers again: their tile stays narrow. A step that divides the sum needs no masks.
    """
    step = 128 if depth % 128 == 0 or depth % 64 else 64
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        if properties.shared_memory_per_block_optin >= 200 * 1024:
            return Tile(128, 128 if exact or columns <= 128 else 256, step, 8, 4)
    return Tile(128, 128, step, 8, 3)


@triton.jit
def _multiply_codes(
    x_ptr,  # e4m3 [T, K]
    x_scales_ptr,  # float32 [T]
    w_ptr,  # e4m3 [E, N, K]
    w_scales_ptr,  # float32 [E, N]
    y_ptr,  # [S, N]
    offsets_ptr,  # int32 [E]
    rows_ptr,  # int32 [S]; read with GATHER only
    N, K,
    E: tl.constexpr, EXPERTS: tl.constexpr, GATHER: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write a tile of y, of one expert's rows."""
    across = tl.cdiv(N, COLS)
    expert, start, end = tile_of(offsets_ptr, tl.program_id(0) // across, E, EXPERTS, ROWS)
    if expert < E:
        rows = start + tl.arange(0, ROWS)
        cols = (tl.program_id(0) % across) * COLS + tl.arange(0, COLS)
        # Rows and columns outside read one that is inside: their results are not stored.
        source = tl.minimum(rows, end - 1)
        if GATHER:
            source = tl.load(rows_ptr + source)
        of_w = expert.to(tl.int64) * N + tl.minimum(cols, N - 1)
        depth = tl.arange(0, DEPTH)
        x = x_ptr + source.to(tl.int64)[:, None] * K + depth[None, :]
        w = w_ptr + of_w[None, :] * K + depth[:, None]
        total = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, DEPTH):
            if WHOLE:
                left, right = tl.load(x), tl.load(w)
            else:
                left = tl.load(x, mask=(depth < K - k)[None, :], other=0.0)
                right = tl.load(w, mask=(depth < K - k)[:, None], other=0.0)
            if EXACT:  # the tensor cores add up one step only: their own sums keep too few bits
                total = tl.dot(left, right, total, input_precision="ieee", max_num_imprecise_acc=DEPTH)
            else:
                total = tl.dot(left, right, total, input_precision="ieee")
            x += DEPTH
            w += DEPTH
        total *= tl.load(x_scales_ptr + source)[:, None] * tl.load(w_scales_ptr + of_w)[None, :]
        y = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(y, total.to(y_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < N)[None, :])


def multiply_codes_triton(
    codes: Tensor, scales: Tensor, weight: Codes, offsets: Tensor, rows: Tensor | None, dtype: torch.dtype, exact: bool
) -> Tensor:
    """Do what `multiply_codes` does, by its Triton kernel."""
    experts, columns, depth = weight.codes.shape
    tile = fp8_tile(columns, depth, codes.device, exact)
    y = torch.empty(len(codes) if rows is None else len(rows), columns, dtype=dtype, device=codes.device)
    grid = (cdiv(len(y), tile.rows) + experts) * cdiv(columns, tile.cols)
    launch(
        _multiply_codes, (grid,),
        codes, scales, weight.codes, weight.scales, y, offsets, offsets if rows is None else rows, columns, depth,
        E=experts, EXPERTS=next_power_of_2(experts), GATHER=rows is not None, WHOLE=depth % tile.depth == 0,
        EXACT=exact, ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def multiply_codes_torch(codes: Tensor, scales: Tensor, weight: Codes, offsets: Tensor, exact: bool) -> Tensor:
    """Multiply gathered rows by torch's product, in bfloat16."""
    functional: Any = torch.nn.functional
    by_rows = functional.ScalingType.RowWise
    product: Tensor = functional.scaled_grouped_mm(
        codes, weight.codes.mT, scales.flatten(), by_rows, weight.scales, by_rows, offs=offsets,
        output_dtype=torch.bfloat16, use_fast_accum=not exact,
    )  # fmt: skip
    return product


def multiply_codes_reference(
    codes: Tensor, scales: Tensor, weight: Codes, offsets: Tensor, rows: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Do what `multiply_codes` does, in plain torch."""
    x = codes.float() * scales
    x = x if rows is None else x[rows]
    y = torch.empty(len(x), weight.codes.shape[1], dtype=dtype, device=x.device)
    for e, start, end in groups_of(offsets):
        y[start:end] = x[start:end] @ (weight.codes[e].float() * weight.scales[e][:, None]).t()
    return y


def multiply_codes(
    codes: Tensor, scales: Tensor, weight: Codes, offsets: Tensor, way: Way,
    *, rows: Rows | None = None, dtype: torch.dtype, exact: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply rows in 8 bits by their expert's weight.

    Args:
        codes, scales: e4m3 [T, K] and float32 [T, 1], as `quantise_rows` returns them.
        offsets, rows: as `grouped_gemm.multiply`'s.
        dtype: of the result.
        exact: sums in float32 all the way.
    Returns:
        [S, N] in `dtype`.
    """
    if way == "loop":
        return multiply_codes_reference(codes, scales, weight, offsets, None if rows is None else rows.tokens, dtype)
    if way == "triton":
        tokens = None if rows is None else rows.tokens
        return multiply_codes_triton(codes, scales, weight, offsets, tokens, dtype, exact)
    assert dtype is torch.bfloat16, "scaled_grouped_mm gives bfloat16"
    if rows is not None:
        codes = gather(codes.view(torch.int16), rows).view(DTYPE)
        scales = scales[rows.tokens]
    return multiply_codes_torch(codes, scales, weight, offsets, exact)


def multiply_fp8(
    x: Tensor, weight: FP8Experts, offsets: Tensor, rows: Rows | None = None, transposed: bool = False,
    way: Way | None = None,
) -> Tensor:  # fmt: skip
    """Quantise rows and multiply them by their expert's weight: x W_e [S, N]; transposed, of dy: dy W_eᵀ [S, K].

    Args:
        x: [T, K] in the dtype of the result; transposed: [T, N].
        offsets, rows: as `grouped_gemm.multiply`'s.
        way: another one than `choose_fp8`'s.
    """
    codes, scales = quantise_rows(x)
    side = weight.side(transposed)
    assert side is not None
    way = way or choose_fp8(x.device, x.dtype, tuple(side.codes.shape[1:]))[0]
    return multiply_codes(codes, scales, side, offsets, way, rows=rows, dtype=x.dtype, exact=weight.exact)
