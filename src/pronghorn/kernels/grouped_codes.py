"""Products of rows grouped by expert, in 8 bits: a scale a row of what goes in, and one a column of what comes out.

    y_i  = s_i · (codes_{x, i} codes_{W, e(i)}ᵀ) · s_{W, e(i)}        x ≈ codes_x · s_x, W ≈ codes_W · s_W, by rows

Codes are e4m3 (`kernels.quantise`), or 8-bit integers of rotated rows (`kernels.int8`): of x · f and of W / f, with one
f a layout for all experts.

W lies in two layouts, quantised each by itself: [E, N, K] for x W with a scale for each of N columns of y, and
[E, K, N] for dy Wᵀ with a scale for each of K columns of dx. So tokens are quantised once, whatever experts they go to,
and not each of their rows; both layouts are read along the sum, as tensor cores of 8 bits need it.

Besides the plain way there is a Triton kernel. On Hopper TMA fetches its tiles, but for those of tokens' rows: e4m3's
are read in place, integers' gathered first for products with many columns, as was the faster for each. Torch's
`scaled_grouped_mm` takes up to half as long again, for exact sums up to 3.7 times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.grouped_gemm import GATHERED, Tile, Way, groups_of, tile_of
from pronghorn.kernels.int8 import quantise_rotated
from pronghorn.kernels.launch import TensorDescriptor, cdiv, launch, next_power_of_2, tl, triton, uses_tma
from pronghorn.kernels.moe_rows import Rows
from pronghorn.kernels.quantise import DTYPE, RowCodes, quantise_rows

MULTIPLE = 16
"""Numbers of a row that TMA fetches are a multiple of this."""


@dataclass(frozen=True, eq=False)
class Codes:
    """The weights of all experts in one layout."""

    codes: Tensor
    """[E, N, K]: e4m3, or integers where there are factors."""
    scales: Tensor
    """float32 [E, N]."""
    factors: Tensor | None = None
    """f [K], in the dtype of the rows that they multiply; None of e4m3."""

    @classmethod
    def of(cls, weight: Tensor, factors: Tensor | None = None) -> Codes:
        """Quantise W [E, N, K], any strides, by its last dimension; an expert at a time, which is copied.

        Args:
            factors: f [K], of all experts' columns, for integers of rotated rows; None for e4m3.
        """
        codes = torch.empty(weight.shape, dtype=DTYPE if factors is None else torch.int8, device=weight.device)
        scales = torch.empty(weight.shape[:2], device=weight.device)
        inverse = None if factors is None else 1 / factors.float()
        for dense, made, by in zip(weight.detach(), codes, scales, strict=True):
            dense = dense.contiguous()
            rows, of_rows = quantise_rows(dense) if inverse is None else quantise_rotated(dense, inverse)
            made.copy_(rows)
            by.copy_(of_rows.squeeze(1))
        return cls(codes, scales, factors)

    def of_rows(self, x: Tensor) -> RowCodes:
        """Quantise x [T, K] as these codes multiply it."""
        return quantise_rows(x) if self.factors is None else quantise_rotated(x, self.factors)

    def dequantise(self) -> Tensor:
        """Return codes · s in float32 [E, N, K], of integers rotated as they are."""
        return self.codes.float() * self.scales[:, :, None]


@dataclass(frozen=True, eq=False)
class CodedExperts:
    """W [E, K, N] in 8 bits, in the layouts of both products: two bytes a number, and 4 · (N + K) an expert."""

    forward: Codes | None
    """[E, N, K], with N scales an expert; None where x W isn't in 8 bits."""
    backward: Codes
    """[E, K, N], with K scales an expert."""
    exact: bool
    """Sums of e4m3 in float32 all the way, where the tensor cores' own sums keep some 14 bits."""

    @classmethod
    def of(cls, weight: Tensor, exact: bool, forward: bool = True) -> CodedExperts:
        """Quantise W [E, K, N], any strides, to e4m3, for both products or for the input gradient's alone."""
        return cls(Codes.of(weight.mT) if forward else None, Codes.of(weight), exact)

    def side(self, transposed: bool) -> Codes | None:
        """Return the layout of x W, or of dy Wᵀ if `transposed`; None where that product isn't in 8 bits."""
        return self.backward if transposed else self.forward


def choose_coded(device: torch.device, sizes: tuple[int, ...], integers: bool = False) -> tuple[Way, str]:
    """Return the way that grouped products in 8 bits take, and why.

    Args:
        sizes: every K and N.
        integers: codes are integers, not e4m3.
    """
    if device.type != "cuda":
        return "loop", f"plain torch, expert by expert, on {device.type}"
    if not uses_tma(device):
        return "triton", "tiles are read in place: TMA is used on Hopper"
    if any(size % MULTIPLE for size in sizes):
        return "triton", f"tiles are read in place: TMA needs multiples of {MULTIPLE}, sizes are {sizes}"
    gathered = f", or gathered for {GATHERED:,} columns and more" if integers else ""
    return "triton", f"TMA fetches tiles; those of tokens' rows are read in place{gathered}"


def coded_tile(columns: int, device: torch.device, exact: bool = False, integers: bool = False) -> Tile:
    """Return the tile of a product in 8 bits, larger where a block may have 200 KB of shared memory (H100, B200).

    Exact sums need as many registers again: their tile stays narrow, and two programs share a multiprocessor. So do
    those of integers, on Hopper with four warps, of which each has more of the tile.
    """
    if integers and uses_tma(device):
        return Tile(128, 128, 128, 4, 3)
    if device.type == "cuda" and not integers:
        properties: Any = torch.cuda.get_device_properties(device)
        if properties.shared_memory_per_block_optin >= 200 * 1024:
            return Tile(128, 128, 128, 4, 3) if exact or columns <= 128 else Tile(128, 256, 128, 8, 4)
    return Tile(128, 128, 128, 8, 3)


@triton.jit
def _multiply_codes(
    x,  # codes [S, K], or [T, K] with GATHER: its descriptor with TMA, else where it lies
    w,  # codes [E · N, K], the same
    x_scales_ptr,  # float32 [S], or [T] with GATHER
    w_scales_ptr,  # float32 [E, N]
    y_ptr,  # [S, N]
    offsets_ptr,  # int32 [E]
    rows_ptr,  # int32 [S]; read with GATHER only
    N, K,
    E: tl.constexpr, EXPERTS: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr, WHOLE: tl.constexpr,
    EXACT: tl.constexpr, INTEGERS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write a tile of y, of one expert's rows."""
    across = tl.cdiv(N, COLS)
    expert, start, end = tile_of(offsets_ptr, tl.program_id(0) // across, E, EXPERTS, ROWS)
    if expert < E:
        first = (tl.program_id(0) % across) * COLS
        rows, cols = start + tl.arange(0, ROWS), first + tl.arange(0, COLS)
        # Rows and columns outside read one that is inside, or by TMA other experts': their results are not
        # stored.
        source = tl.minimum(rows, end - 1)
        if GATHER:
            source = tl.load(rows_ptr + source)
        of_w = expert.to(tl.int64) * N + tl.minimum(cols, N - 1)
        depth = tl.arange(0, DEPTH)
        if not TMA:
            left_ptr = x + source.to(tl.int64)[:, None] * K + depth[None, :]
            right_ptr = w + of_w[None, :] * K + depth[:, None]
        total = tl.zeros((ROWS, COLS), tl.int32 if INTEGERS else tl.float32)
        for k in range(0, K, DEPTH):
            if TMA:  # zeros past K
                left, right = x.load([start, k]), w.load([expert * N + first, k]).T
            else:
                if WHOLE:
                    left, right = tl.load(left_ptr), tl.load(right_ptr)
                else:
                    left = tl.load(left_ptr, mask=(depth < K - k)[None, :], other=0.0)
                    right = tl.load(right_ptr, mask=(depth < K - k)[:, None], other=0.0)
                left_ptr += DEPTH
                right_ptr += DEPTH
            if INTEGERS:
                total = tl.dot(left, right, total, input_precision="ieee", out_dtype=tl.int32)
            elif EXACT:  # the tensor cores add up one step only: their own sums keep too few bits
                total = tl.dot(left, right, total, input_precision="ieee", max_num_imprecise_acc=DEPTH)
            else:
                total = tl.dot(left, right, total, input_precision="ieee")
        scales = tl.load(x_scales_ptr + source)[:, None] * tl.load(w_scales_ptr + of_w)[None, :]
        y = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        inside = (rows < end)[:, None] & (cols < N)[None, :]
        tl.store(y, (total.to(tl.float32) * scales).to(y_ptr.dtype.element_ty), mask=inside)


def multiply_codes_triton(
    codes: Tensor, scales: Tensor, weight: Codes, offsets: Tensor, rows: Tensor | None, dtype: torch.dtype, exact: bool,
    tma: bool,
) -> Tensor:  # fmt: skip
    """Do what `multiply_codes_reference` does, by its Triton kernel, whose tiles TMA fetches if `tma`.

    Args:
        exact: sums of e4m3 in float32 all the way; those of integers are always exact.
    """
    experts, columns, depth = weight.codes.shape
    integers = weight.factors is not None
    tile = coded_tile(columns, codes.device, exact, integers)
    y = torch.empty(len(codes) if rows is None else len(rows), columns, dtype=dtype, device=codes.device)
    if not len(y):
        return y
    x: Any = codes
    w: Any = weight.codes.view(experts * columns, depth)
    if tma:
        x = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        w = TensorDescriptor.from_tensor(w, [tile.cols, tile.depth])
    launch(
        _multiply_codes, ((cdiv(len(y), tile.rows) + experts) * cdiv(columns, tile.cols),),
        x, w, scales, weight.scales, y, offsets, offsets if rows is None else rows, columns, depth,
        E=experts, EXPERTS=next_power_of_2(experts), TMA=tma, GATHER=rows is not None,
        WHOLE=depth % tile.depth == 0, EXACT=exact, INTEGERS=integers,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def multiply_codes_reference(
    codes: Tensor, scales: Tensor, weight: Codes, offsets: Tensor, rows: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply rows in 8 bits by their expert's weight, in plain torch; of integers in float64, since their sums go
    beyond float32's 2^24.

    Args:
        codes, scales: [T, K] and float32 [T, 1], as `Codes.of_rows` returns them.
        offsets, rows: as `grouped_gemm.multiply`'s; of the rows the tokens.
        dtype: of the result [S, N].
    """
    wide = torch.float32 if weight.factors is None else torch.float64
    x = codes.to(wide) * scales
    x = x if rows is None else x[rows]
    y = torch.empty(len(x), weight.codes.shape[1], dtype=dtype, device=x.device)
    for e, start, end in groups_of(offsets):
        y[start:end] = (x[start:end] @ (weight.codes[e].to(wide) * weight.scales[e][:, None]).t()).to(dtype)
    return y


def multiply_coded(
    x: Tensor | RowCodes, weight: CodedExperts, offsets: Tensor, dtype: torch.dtype, rows: Rows | None = None,
    transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply rows by their expert's weight in 8 bits: x W_e [S, N]; transposed, of dy: dy W_eᵀ [S, K].

    Args:
        x: [T, K], or its codes; transposed: [T, N].
        offsets, rows: as `grouped_gemm.multiply`'s.
        dtype: of the result.
    """
    side, tokens = weight.side(transposed), None if rows is None else rows.tokens
    assert side is not None
    codes, scales = x if isinstance(x, RowCodes) else side.of_rows(x)
    if not codes.is_cuda:
        return multiply_codes_reference(codes, scales, side, offsets, tokens, dtype)
    tma = codes.shape[1] % MULTIPLE == 0 and uses_tma(codes.device)
    integers, columns = side.factors is not None, side.codes.shape[1]
    if tma and tokens is not None and integers and columns >= GATHERED:
        codes, scales, tokens = codes.index_select(0, tokens), scales.index_select(0, tokens), None
    tma = tma and tokens is None  # which reads rows in their order
    return multiply_codes_triton(codes, scales, side, offsets, tokens, dtype, weight.exact, tma)
