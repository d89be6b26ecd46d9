"""An RMSNorm of each head, gated: y = x · r ∘ w ∘ silu(z), with r = (mean_d x_d² + eps)^(−1/2).

    n = x · r      e = dy ∘ w ∘ silu(z)      dx = r · (e − n · mean_d(e ∘ n))
    dz = dy ∘ w ∘ n ∘ silu'(z)               dw = Σ dy ∘ n ∘ silu(z)

In Triton: a program takes a tile of heads, whole.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton

ELEMENTS, WARPS = 4096, 4
"""Of a tile: so many heads as fit."""


def forward_reference(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return y [T, H, D].

    Args:
        x: [T, H, D], contiguous.
        z: [T, H, D], columns of a wider tensor perhaps.
        weight: [D].
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide) * (x.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * normed.to(x.dtype) * silu(z.to(wide))).to(x.dtype)


def backward_reference(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, weight_grad: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (dx, dz [T, H, D], dweight [D] or None).

    Args:
        dy, x: [T, H, D], contiguous.
        z: [T, H, D], columns of a wider tensor perhaps.
        out: [T, H, D], where dz is written; columns of a wider tensor perhaps.
    """
    with torch.enable_grad():
        x, z, weight = (y.detach().requires_grad_() for y in (x, z, weight))
        y = forward_reference(x, z, weight, eps)
    dx, dz, dw = torch.autograd.grad(y, (x, z, weight), dy)
    return dx, dz if out is None else out.copy_(dz), dw if weight_grad else None


@triton.jit
def _forward(
    x_ptr,  # [N, D]
    z_ptr,  # [T, H, D], tokens z_row and heads z_head apart
    w_ptr,  # [D]
    y_ptr,  # [N, D]
    N,  # T · H
    H, z_row, z_head, eps, D, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y of a tile of heads."""
    heads, cols = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (heads < N)[:, None] & (cols < D)[None, :]
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + heads[:, None] * D + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    at = ((heads // H) * z_row + (heads % H) * z_head)[:, None] + cols[None, :]
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    y = x * r[:, None] * w[None, :] * (z * tl.sigmoid(z))
    tl.store(y_ptr + heads[:, None] * D + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr,  # [N, D]
    z_ptr,  # [T, H, D], tokens z_row and heads z_head apart
    w_ptr,  # [D]
    dx_ptr,  # [N, D]
    dz_ptr,  # [T, H, D], tokens dz_row and heads dz_head apart
    dw_ptr,  # float32 [programs, D]; written with WEIGHT only
    N,  # T · H
    H, z_row, z_head, dz_row, dz_head, eps, D,
    WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx and dz of a tile of heads, and its part of dw."""
    heads, cols = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (heads < N)[:, None] & (cols < D)[None, :]
    flat = heads[:, None] * D + cols[None, :]
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + flat, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + flat, mask=inside, other=0.0).to(tl.float32)
    at = ((heads // H) * z_row + (heads % H) * z_head)[:, None] + cols[None, :]
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    n, s = x * r[:, None], tl.sigmoid(z)
    silu = z * s
    # back through the gate: dz = dy ∘ w ∘ n ∘ silu'(z)
    dz = dy * w[None, :] * n * s * (1 + z * (1 - s))
    at = ((heads // H) * dz_row + (heads % H) * dz_head)[:, None] + cols[None, :]
    tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)
    # back through the norm: dx = r · (e − n · mean_d(e ∘ n))
    e = dy * w[None, :] * silu
    dx = r[:, None] * (e - n * (tl.sum(e * n, 1) / D)[:, None])
    tl.store(dx_ptr + flat, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    # dw: this tile's Σ dy ∘ n ∘ silu(z)
    if WEIGHT:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * D + cols, tl.sum(dy * n * silu, 0), mask=cols < D)


def forward_triton(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do what `forward` does, by its Triton kernel."""
    tokens, heads, size = x.shape
    y, block = torch.empty_like(x, memory_format=torch.contiguous_format), next_power_of_2(size)
    rows = max(ELEMENTS // block, 1)
    launch(
        _forward, (cdiv(tokens * heads, rows),),
        x, z, weight, y, tokens * heads, heads, z.stride(0), z.stride(1), eps, size,
        ROWS=rows, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return y


def backward_triton(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, weight_grad: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what `backward` does, by its Triton kernel."""
    tokens, heads, size = x.shape
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dz = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    block = next_power_of_2(size)
    rows = max(ELEMENTS // block, 1)
    programs = cdiv(tokens * heads, rows)
    parts = torch.empty(programs, size, dtype=torch.float32, device=x.device) if weight_grad else dx
    launch(
        _backward, (programs,),
        dy, x, z, weight, dx, dz, parts, tokens * heads, heads,
        z.stride(0), z.stride(1), dz.stride(0), dz.stride(1), eps, size,
        WEIGHT=weight_grad, ROWS=rows, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return dx, dz, parts.sum(0).to(weight.dtype) if weight_grad else None


forward = by_device(forward_reference, forward_triton, float64=False)
backward = by_device(backward_reference, backward_triton, at=1, float64=False)
