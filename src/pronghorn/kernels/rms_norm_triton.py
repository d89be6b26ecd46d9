"""RMSNorm in Triton: a program a row; for dw a few programs take every so many rows, and their sums are added after."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, next_power_of_2

_PROGRAMS = 264
"""That sum dw: two a multiprocessor of a H200, the best of seven numbers there."""
SUM_ROWS, SUM_COLS = 64, 16
"""Of the programs' sums, that are loaded at a time, and that a program adds up."""


@triton.jit
def _forward(x_ptr, w_ptr, y_ptr, r_ptr, x_stride, y_stride, H, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    r = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(r_ptr + row, r)
    tl.store(y_ptr + row * y_stride + cols, (x * r * w).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, r_ptr, more_ptr, dx_ptr, dw_ptr, dy_stride, x_stride, dx_stride, T, H, offset, programs,
    WEIGHT: tl.constexpr, MORE: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        tl.store(dx_ptr + row * dx_stride + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if WEIGHT:
            dw += dy * x * r
    if WEIGHT:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * H + cols, dw, mask=inside)


@triton.jit
def _sum(parts_ptr, dw_ptr, N, H, ROWS: tl.constexpr, COLS: tl.constexpr):
    """dw from N programs' [N, H]; torch's sum and its rounding take 10 µs at N = 264, H = 4,096, this 4."""
    cols, rows = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, N, ROWS):
        inside = (start + rows < N)[:, None] & (cols < H)[None, :]
        total += tl.load(parts_ptr + (start + rows)[:, None] * H + cols[None, :], mask=inside, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), mask=cols < H)


def forward(
    x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `rms_norm.forward`."""
    size = x.shape[-1]
    y = torch.empty_like(x, dtype=dtype or x.dtype, memory_format=torch.contiguous_format) if out is None else out
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    launch(
        _forward,
        (rstd.numel(),),
        x,
        weight,
        y,
        rstd,
        x.stride(-2),
        y.stride(-2),
        size,
        eps,
        offset,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    weight_grad: bool,
    residual_grad: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `rms_norm.backward`; `residual_grad` is contiguous."""
    size, count = x.shape[-1], rstd.numel()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    programs = min(count, _PROGRAMS) if weight_grad else count
    parts = torch.empty(programs, size, dtype=torch.float32, device=x.device) if weight_grad else rstd
    block, read = next_power_of_2(size), [x, dy] + ([] if residual_grad is None else [residual_grad])
    ahead = stages(block, sum(each.element_size() for each in read)) if weight_grad else 1
    launch(
        _backward, (programs,),
        dy, x, weight, rstd, dy if residual_grad is None else residual_grad, dx, parts,
        dy.stride(-2), x.stride(-2), dx.stride(-2), count, size, offset, programs,
        WEIGHT=weight_grad, MORE=residual_grad is not None, STAGES=ahead, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    if not weight_grad:
        return dx, None
    dw = torch.empty_like(weight)
    launch(_sum, (cdiv(size, SUM_COLS),), parts, dw, programs, size, ROWS=SUM_ROWS, COLS=SUM_COLS)
    return dx, dw


def stages(block: int, bytes_: int) -> int:
    """Rows under way in a loop over rows of `block` elements, `bytes_` each in all tensors together. Two of them lie in
    shared memory, of which the smallest card has 99 KB a block."""
    return 3 if 2 * block * bytes_ <= 84 * 1024 else 1


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
