"""An RMSNorm of each head, gated: y = rms_norm(x) ∘ w ∘ silu(z)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return y [T, H, D] of x and z [T, H, D]; weight [D]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide) * (x.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * normed.to(x.dtype) * silu(z.to(wide))).to(x.dtype)


def backward(dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dz [T, H, D], dweight [D])."""
    with torch.enable_grad():
        x, z, weight = (y.detach().requires_grad_() for y in (x, z, weight))
        y = forward(x, z, weight, eps)
    dx, dz, d_weight = torch.autograd.grad(y, (x, z, weight), dy)
    return dx, dz, d_weight
