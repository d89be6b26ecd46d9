"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), with Gemma's offset.

    r_t = (mean_h x_th² + eps)^(−1/2)        y_th = x_th · r_t · (w_h + offset)
    dx  = r · (dy∘w' − x·r² · mean_h(dy∘w'∘x))        dw = Σ_t dy_t ∘ x_t · r_t        w' = w + offset

Sums are in float32 (float64 for float64); y is rounded once.

RMSNorm in Triton: a program a row; for dw a few programs take every so many rows, and their sums are added after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton
from pronghorn.kernels.once import refuse_second_derivatives
from pronghorn.kernels.quantise import RowCodes, store_codes


def forward_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    codes: RowCodes | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y in `dtype`, or x's; r [..., 1] in float32 (float64)).

    Args:
        x: [..., H], contiguous; or [T, H] columns of a wider tensor.
        out: [T, H], where y is written, columns of a wider tensor perhaps.
        codes: where those of y [T, H] are written, if they are wanted.
    """
    wide = x.to(_wide(x))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (wide * rstd * (weight.to(wide.dtype) + offset)).to(dtype or x.dtype)
    y = y if out is None else out.copy_(y)
    if codes is not None:
        codes.fill_reference(y)
    return y, rstd


def backward_reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    weight_grad: bool,
    residual_grad: Tensor | None = None,
    out: Tensor | None = None,
    codes: RowCodes | None = None,
    columns: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (dx in x's dtype, dw in the weight's or None).

    Args:
        dy, x: [..., H], contiguous; or [T, H] columns of wider tensors.
        residual_grad: [..., H], of what x went on to besides, is added to dx before it is rounded.
        out: [T, H], where dx is written; it may be dy.
        codes: where those of dx · columns [T, H] are written, if they are wanted.
        columns: [H], given with `codes`.
    """
    wide, grad = x.to(rstd.dtype), dy.to(rstd.dtype)
    scaled = grad * (weight.to(rstd.dtype) + offset)
    dx = rstd * (scaled - wide * rstd.square() * (scaled * wide).mean(-1, keepdim=True))
    if residual_grad is not None:
        dx = dx + residual_grad.to(dx.dtype)
    dw = (grad * wide * rstd).flatten(0, -2).sum(0).to(weight.dtype) if weight_grad else None
    dx = dx.to(x.dtype) if out is None else out.copy_(dx)
    if codes is not None:
        codes.fill_reference(dx, columns)
    return dx, dw


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_PROGRAMS = 264
"""That sum dw: two a multiprocessor of a H200, the best of seven numbers there."""
SUM_ROWS, SUM_COLS = 64, 16
"""Of the programs' sums, that are loaded at a time, and that a program adds up."""


@triton.jit
def _forward(
    x_ptr, w_ptr, y_ptr, r_ptr, codes_ptr, scales_ptr, x_stride, y_stride, H, eps, offset,
    CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise a row, and quantise it: x, y, codes [T, H]; w [H]; r, scales [T]."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    r = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(r_ptr + row, r)
    y = (x * r * w).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * y_stride + cols, y, mask=inside)
    if CODES:
        part: tl.constexpr = 128 // y_ptr.dtype.element_ty.primitive_bitwidth
        at = tl.max_contiguous(tl.arange(0, BLOCK), part)  # as many a thread as of y: or r is summed in another order
        store_codes(tl.where(inside, y.to(tl.float32), 0.0), codes_ptr + row * H, scales_ptr + row, at, inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, r_ptr, more_ptr, dx_ptr, dw_ptr, columns_ptr, codes_ptr, scales_ptr,
    dy_stride, x_stride, dx_stride, T, H, offset, programs,
    WEIGHT: tl.constexpr, MORE: tl.constexpr, CODES: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx of every `programs`-th row and quantise it, and write the program's part of dw.

    dy, x, more (added to dx), dx, codes: [T, H]; w, columns: [H]; r, scales: [T]; dw: [programs, H].
    """
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0).to(tl.int64), T, programs, num_stages=STAGES):
        x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row)
        g = dy * w
        dx = r * (g - x * r * r * (tl.sum(g * x, 0) / H))
        if MORE:
            dx += tl.load(more_ptr + row * H + cols, mask=inside, other=0.0).to(tl.float32)
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * dx_stride + cols, dx, mask=inside)
        if CODES:
            part: tl.constexpr = 128 // dx_ptr.dtype.element_ty.primitive_bitwidth
            at = tl.max_contiguous(tl.arange(0, BLOCK), part)  # as in `_forward`
            c = tl.load(columns_ptr + at, mask=inside, other=0.0).to(tl.float32)
            scaled = tl.where(inside, dx.to(tl.float32) * c, 0.0)
            store_codes(scaled, codes_ptr + row * H, scales_ptr + row, at, inside)
        if WEIGHT:
            dw += dy * x * r
    if WEIGHT:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * H + cols, dw, mask=inside)


@triton.jit
def _sum(parts_ptr, dw_ptr, N, H, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sum dw of N programs' [N, H]; torch's sum and its rounding take 10 µs at N = 264, H = 4,096, this 4."""
    cols, rows = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, N, ROWS):
        inside = (start + rows < N)[:, None] & (cols < H)[None, :]
        total += tl.load(parts_ptr + (start + rows)[:, None] * H + cols[None, :], mask=inside, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), mask=cols < H)


def forward_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    codes: RowCodes | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what `forward` does, by its Triton kernels."""
    size = x.shape[-1]
    y = torch.empty_like(x, dtype=dtype or x.dtype, memory_format=torch.contiguous_format) if out is None else out
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    launch(
        _forward, (rstd.numel(),),
        x, weight, y, rstd, *(codes or (y, rstd)), x.stride(-2), y.stride(-2), size, eps, offset,
        CODES=codes is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return y, rstd


def backward_triton(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    weight_grad: bool,
    residual_grad: Tensor | None = None,
    out: Tensor | None = None,
    codes: RowCodes | None = None,
    columns: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do what `backward` does, by the kernels; `residual_grad` is contiguous."""
    assert codes is None or columns is not None
    size, count = x.shape[-1], rstd.numel()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    programs = min(count, _PROGRAMS) if weight_grad else count
    parts = torch.empty(programs, size, dtype=torch.float32, device=x.device) if weight_grad else rstd
    block, read = next_power_of_2(size), [x, dy] + ([] if residual_grad is None else [residual_grad])
    ahead = stages(block, sum(each.element_size() for each in read)) if weight_grad else 1
    launch(
        _backward, (programs,),
        dy, x, weight, rstd, dy if residual_grad is None else residual_grad, dx, parts,
        weight if columns is None else columns, *(codes or (dx, rstd)),
        dy.stride(-2), x.stride(-2), dx.stride(-2), count, size, offset, programs,
        WEIGHT=weight_grad, MORE=residual_grad is not None, CODES=codes is not None, STAGES=ahead, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    if not weight_grad:
        return dx, None
    dw = torch.empty_like(weight)
    launch(_sum, (cdiv(size, SUM_COLS),), parts, dw, programs, size, ROWS=SUM_ROWS, COLS=SUM_COLS)
    return dx, dw


def stages(block: int, bytes_: int) -> int:
    """Return how many rows of `block` elements, `bytes_` each in all tensors together, a loop has under way.

    Two of them lie in shared memory, of which the smallest card has 99 KB a block.
    """
    return 3 if 2 * block * bytes_ <= 84 * 1024 else 1


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: [..., H], contiguous.
        weight: [H], any float dtype.
    Returns:
        [..., H] in x's dtype.
    """
    return _RMSNorm.apply(x, weight, eps, offset)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        y, rstd = forward(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = backward(dy.contiguous(), x, weight, rstd, ctx.offset, ctx.needs_input_grad[1])
        return dx, dw, None, None


forward = by_device(forward_reference, forward_triton)
backward = by_device(backward_reference, backward_triton, at=1)
