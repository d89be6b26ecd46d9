"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) on one tensor of all heads, with qk-norm where there is.

    x̂ = rms_norm(x) · (w + offset)  per head, where the family has qk-norm; else x
    (y₁, y₂) = (x̂₁·c − x̂₂·s, x̂₂·c + x̂₁·s)        x̂₁, x̂₂: the halves of a head, c and s: cos and sin of its position

The product of q, k and v leaves [T, (H + 2·H_kv)·D]; q and k are turned where they lie, v stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pronghorn.kernels import rms_norm


@dataclass(frozen=True)
class Heads:
    """How the columns of a merged q, k, v tensor are laid out, and its norms."""

    query: int
    key_value: int
    dim: int
    query_norm: Tensor | None = None
    """[D], or None without qk-norm."""
    key_norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    value: int | None = None
    """Heads of v; None for as many as of k."""

    def without_values(self) -> Heads:
        """Return the layout of q and k alone, without norms."""
        return replace(self.without_norms(), value=0)

    def without_norms(self) -> Heads:
        """Return the same layout without norms."""
        return replace(self, query_norm=None, key_norm=None)

    @property
    def turned(self) -> int:
        """Columns of q and k."""
        return (self.query + self.key_value) * self.dim

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views q [T, H, D], k and v [T, H_kv, D] of [T, (H + 2·H_kv)·D]."""
        heads = qkv.view(qkv.shape[0], -1, self.dim)
        values = self.key_value if self.value is None else self.value
        q, k, v = heads.split([self.query, self.key_value, values], 1)
        return q, k, v


def forward(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for attention. Without qk-norm they are views of `qkv`, which is turned in place.

    Args:
        qkv: [T, (H + 2·H_kv)·D], contiguous.
        cos, sin: [T, D], both halves equal.
    """
    if qkv.is_cuda:
        from pronghorn.kernels.rope_triton import forward as launch

        return launch(qkv, cos, sin, heads)
    q, k, v = heads.split(qkv)
    if heads.query_norm is None or heads.key_norm is None:
        q.copy_(_turn(q, cos, sin))
        k.copy_(_turn(k, cos, sin))
        return q, k, v
    normed = [
        rms_norm.forward(x, w, heads.eps, heads.offset)[0] for x, w in ((q, heads.query_norm), (k, heads.key_norm))
    ]
    return _turn(normed[0], cos, sin), _turn(normed[1], cos, sin), v


def backward_(
    dqkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, qkv: Tensor | None, weight_grad: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of `forward`'s argument, in place of that of its results.

    Args:
        dqkv: [T, H + 2·H_kv, D], contiguous: dq, dk and dv side by side.
        qkv: what `forward` was given, where there is qk-norm.
        weight_grad: whether the norms' weights have gradients, too.
    Returns:
        ([T, (H + 2·H_kv)·D], the same storage; d query_norm and d key_norm [D], or None).
    """
    if dqkv.is_cuda:
        from pronghorn.kernels.rope_triton import backward_ as launch

        return launch(dqkv, cos, sin, heads, qkv, weight_grad)
    dq, dk, _ = heads.split(dqkv)
    raw = (None, None) if qkv is None else heads.split(qkv)[:2]
    weight_grads: list[Tensor | None] = []
    for grad, x, weight in ((dq, raw[0], heads.query_norm), (dk, raw[1], heads.key_norm)):
        turned, dw = _turn(grad, cos, -sin), None
        if x is not None and weight is not None:
            x = x.contiguous()
            _, rstd = rms_norm.forward(x, weight, heads.eps, heads.offset)
            turned, dw = rms_norm.backward(turned, x, weight, rstd, heads.offset, weight_grad)
        grad.copy_(turned)
        weight_grads.append(dw)
    return dqkv.flatten(1), weight_grads[0], weight_grads[1]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, -1)
    c, s = (y.to(wide)[:, None, : x.shape[-1] // 2] for y in (cos, sin))
    return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)
