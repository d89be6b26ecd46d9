"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), with Gemma's offset.

    r_t = (mean_h x_th² + eps)^(−1/2)        y_th = x_th · r_t · (w_h + offset)
    dx  = r · (dy∘w' − x·r² · mean_h(dy∘w'∘x))        dw = Σ_t dy_t ∘ x_t · r_t        w' = w + offset

Sums are in float32 (float64 for float64); y is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = backward(dy.contiguous(), x, weight, rstd, ctx.offset, ctx.needs_input_grad[1])
        return dx, dw, None, None


def forward(
    x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (y in `dtype`, or x's; r [..., 1] in float32 (float64)).

    Args:
        x: [..., H], contiguous; or [T, H] columns of a wider tensor.
        out: [T, H], where y is written, columns of a wider tensor perhaps.
    """
    if x.is_cuda:
        from pronghorn.kernels.rms_norm_triton import forward as launch

        return launch(x, weight, eps, offset, dtype, out)
    wide = x.to(_wide(x))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (wide * rstd * (weight.to(wide.dtype) + offset)).to(dtype or x.dtype)
    return (y if out is None else out.copy_(y)), rstd


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
    """Return (dx in x's dtype, dw in the weight's or None).

    Args:
        dy, x: [..., H], contiguous; or [T, H] columns of wider tensors.
        residual_grad: [..., H], of what x went on to besides, is added to dx before it is rounded.
        out: [T, H], where dx is written; it may be dy.
    """
    if x.is_cuda:
        from pronghorn.kernels.rms_norm_triton import backward as launch

        return launch(dy, x, weight, rstd, offset, weight_grad, residual_grad, out)
    wide, grad = x.to(rstd.dtype), dy.to(rstd.dtype)
    scaled = grad * (weight.to(rstd.dtype) + offset)
    dx = rstd * (scaled - wide * rstd.square() * (scaled * wide).mean(-1, keepdim=True))
    if residual_grad is not None:
        dx = dx + residual_grad.to(dx.dtype)
    dw = (grad * wide * rstd).flatten(0, -2).sum(0).to(weight.dtype) if weight_grad else None
    return (dx.to(x.dtype) if out is None else out.copy_(dx)), dw


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
