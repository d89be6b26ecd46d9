"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) on one tensor of all heads, with qk-norm where there is.

    x̂ = rms_norm(x) · (w + offset)  per head, where the family has qk-norm; else x
    (y₁, y₂) = (x̂₁·c − x̂₂·s, x̂₂·c + x̂₁·s)        x̂₁, x̂₂: the halves of a head, c and s: cos and sin of its position
    (dx̂₁, dx̂₂) = (dy₁·c + dy₂·s, dy₂·c − dy₁·s)  and from there as in `kernels.rms_norm`

The product of q, k and v leaves [T, (H + 2·H_kv)·D]; q and k are rotated in place, v stays. Where cos and sin have
D_r < D columns (partial RoPE) the first D_r columns of a head are rotated, as halves of D_r, and the others stay.

In Triton a program rotates some heads of some tokens; in the backward, all heads of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pronghorn.kernels import rms_norm
from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton


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
        """Return the columns of q and k."""
        return (self.query + self.key_value) * self.dim

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views q [T, H, D], k and v [T, H_kv, D] of [T, (H + 2·H_kv)·D]."""
        heads = qkv.view(qkv.shape[0], -1, self.dim)
        values = self.key_value if self.value is None else self.value
        q, k, v = heads.split([self.query, self.key_value, values], 1)
        return q, k, v


def forward_reference(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v for attention. Without qk-norm they are views of `qkv`, which is rotated in place.

    Args:
        qkv: [T, (H + 2·H_kv)·D], contiguous.
        cos, sin: [T, D_r], both halves equal.
    """
    q, k, v = heads.split(qkv)
    if heads.query_norm is None or heads.key_norm is None:
        q.copy_(_turn(q, cos, sin))
        k.copy_(_turn(k, cos, sin))
        return q, k, v
    normed = [
        rms_norm.forward(x, w, heads.eps, heads.offset)[0] for x, w in ((q, heads.query_norm), (k, heads.key_norm))
    ]
    return _turn(normed[0], cos, sin), _turn(normed[1], cos, sin), v


def backward_reference_(
    dqkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, qkv: Tensor | None, weight_grad: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient of `forward`'s argument, in place of that of its results.

    Args:
        dqkv: [T, H + 2·H_kv, D], contiguous: dq, dk and dv side by side.
        qkv: what `forward` was given, where there is qk-norm.
        weight_grad: whether the norms' weights have gradients, too.
    Returns:
        ([T, (H + 2·H_kv)·D], the same storage; d query_norm and d key_norm [D], or None).
    """
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
    turned, rest = x.to(wide).split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    c, s = (y.to(wide)[:, None, : y.shape[-1] // 2] for y in (cos, sin))
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1).to(x.dtype)


HEADS = 8
"""Heads of a token that a program of the forward rotates."""
COLUMNS = 256
"""Of halves of heads, that a warp of it rotates: with norms 2 warps a program, else 4. Measured on an H200: 99 to 104 %
of a copy (heads of 128 with norms), 98 and 99 (of 128 and 64 without)."""


@triton.jit
def _pair(TURNED: tl.constexpr, HALF: tl.constexpr):
    """Return the columns of a head that make pairs, [HALF] and [HALF]: TURNED pairs to rotate, then those that stay."""
    col = tl.arange(0, HALF)
    if TURNED == HALF:
        return col, HALF + col
    return col + tl.where(col < TURNED, 0, TURNED), col + tl.where(col < TURNED, TURNED, HALF)


@triton.jit
def _turn_of(
    cos_ptr, sin_ptr,  # [T, 2·TURNED]
    token, real, TURNED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return cosines and sines of tokens' pairs: 1 and 0 of those that stay."""
    col = tl.arange(0, HALF)[None, :]
    at, turned = token * 2 * TURNED + col, real
    if TURNED < HALF:
        turned = real & (col < TURNED)
    c = tl.load(cos_ptr + at, mask=turned, other=1.0).to(tl.float32)
    return c, tl.load(sin_ptr + at, mask=turned, other=0.0).to(tl.float32)


@triton.jit
def _normed(a, b, w_ptr, eps, offset, TURNED: tl.constexpr, HALF: tl.constexpr):
    """Return (â, b̂, a·r, b·r, wa, wb, r) of heads [.., HALF] with columns a and b; w: [2·HALF]."""
    first, second = _pair(TURNED, HALF)
    wa = tl.load(w_ptr + first[None, :]).to(tl.float32) + offset
    wb = tl.load(w_ptr + second[None, :]).to(tl.float32) + offset
    r = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    return a * r * wa, b * r * wb, a * r, b * r, wa, wb, r


@triton.jit(do_not_specialize=["T"])  # it differs from row to row, the instructions don't
def _forward(
    qkv_ptr,  # [T, (H + 2·H_kv)·D], rows stride apart
    q_ptr, k_ptr,  # [T, H, D] and [T, H_kv, D]; without NORM the same memory
    cos_ptr, sin_ptr,  # [T, 2·TURNED]
    qw_ptr, kw_ptr,  # [D], D = 2·HALF; read with NORM only
    T, stride, q_stride, k_stride,  # elements from token to token
    q_heads, k_heads, eps, offset, NORM: tl.constexpr, EVEN: tl.constexpr, Q_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm and rotate some heads of some tokens; EVEN: no program has fewer of them than it could take."""
    # blocks of heads side by side: a grid's other axes are too short for tokens
    block, tokens = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    if block < Q_BLOCKS:
        x_ptr, y_ptr, y_stride, w_ptr, first, heads = qkv_ptr, q_ptr, q_stride, qw_ptr, block * HEADS, q_heads
    else:
        x_ptr, y_ptr, y_stride, w_ptr = qkv_ptr + q_heads * 2 * HALF, k_ptr, k_stride, kw_ptr
        first, heads = (block - Q_BLOCKS) * HEADS, k_heads
    m, col = tl.arange(0, TOKENS * HEADS), tl.arange(0, HALF)[None, :]
    token, head = (tokens * TOKENS + m // HEADS).to(tl.int64), first + m % HEADS
    if EVEN:
        real = tl.full((TOKENS * HEADS, HALF), True, tl.int1)
    else:
        real = ((token < T) & (head < heads))[:, None] & (col < HALF)
    left, right = _pair(TURNED, HALF)
    x = x_ptr + (token * stride + head * 2 * HALF)[:, None]
    y = y_ptr + (token * y_stride + head * 2 * HALF)[:, None]
    a = tl.load(x + left[None, :], mask=real, other=0.0).to(tl.float32)
    b = tl.load(x + right[None, :], mask=real, other=0.0).to(tl.float32)
    if TOKENS == 1:  # one row for all heads
        c, s = _turn_of(cos_ptr, sin_ptr, tokens.to(tl.int64), col < HALF, TURNED, HALF)
    else:
        c, s = _turn_of(cos_ptr, sin_ptr, token[:, None], real, TURNED, HALF)
    if NORM:
        a, b, _, _, _, _, _ = _normed(a, b, w_ptr, eps, offset, TURNED, HALF)
        a = a.to(qkv_ptr.dtype.element_ty).to(tl.float32)  # rounded where the model rounds: between norm and RoPE
        b = b.to(qkv_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y + left[None, :], (a * c - b * s).to(y_ptr.dtype.element_ty), mask=real)
    tl.store(y + right[None, :], (b * c + a * s).to(y_ptr.dtype.element_ty), mask=real)


@triton.jit
def _unturn_heads(
    grad_ptr, x_ptr,  # [heads, 2·HALF]
    w_ptr,  # [2·HALF]
    dw_ptr,  # float32 [2·HALF]
    c, s,  # [1, HALF]
    heads, eps, offset,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, HEADS: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write dx of a token's heads over dy, and the token's part of dw."""
    head = tl.arange(0, HEADS)[:, None]
    left, right = _pair(TURNED, HALF)
    real = (head < heads) & (tl.arange(0, HALF)[None, :] < HALF)
    first, second = head * 2 * HALF + left[None, :], head * 2 * HALF + right[None, :]
    ya = tl.load(grad_ptr + first, mask=real, other=0.0).to(tl.float32)
    yb = tl.load(grad_ptr + second, mask=real, other=0.0).to(tl.float32)
    # back through the rotation
    da = ya * c + yb * s
    db = yb * c - ya * s
    # back through the norm: dw = Σ dx̂ ∘ x·r, and dx = r (g − x·r · mean(g ∘ x·r)) with g = dx̂ ∘ (w + offset)
    if NORM:
        a = tl.load(x_ptr + first, mask=real, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + second, mask=real, other=0.0).to(tl.float32)
        _, _, ar, br, wa, wb, r = _normed(a, b, w_ptr, eps, offset, TURNED, HALF)
        if WEIGHT:
            tl.store(dw_ptr + left, tl.sum(da * ar, 0))
            tl.store(dw_ptr + right, tl.sum(db * br, 0))
        ga, gb = da * wa, db * wb
        mean = ((tl.sum(ga * ar, 1) + tl.sum(gb * br, 1)) / (2 * HALF))[:, None]
        da, db = r * (ga - ar * mean), r * (gb - br * mean)
    tl.store(grad_ptr + first, da.to(grad_ptr.dtype.element_ty), mask=real)
    tl.store(grad_ptr + second, db.to(grad_ptr.dtype.element_ty), mask=real)


@triton.jit
def _backward(
    dqkv_ptr, qkv_ptr,  # [T, (H + 2·H_kv)·D], rows stride apart
    cos_ptr, sin_ptr,  # [T, 2·TURNED]
    qw_ptr, kw_ptr,  # [D], D = 2·HALF; read with NORM only
    dw_ptr,  # float32 [T, 2, D]: of q's norm and k's; written with WEIGHT only
    stride, q_heads, k_heads, eps, offset,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    TURNED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write dx of a token's q and k over dy."""
    token = tl.program_id(0).to(tl.int64)
    c, s = _turn_of(cos_ptr, sin_ptr, token, tl.arange(0, HALF)[None, :] < HALF, TURNED, HALF)
    dq, q = dqkv_ptr + token * stride, qkv_ptr + token * stride
    dw = dw_ptr + token * 4 * HALF
    _unturn_heads(dq, q, qw_ptr, dw, c, s, q_heads, eps, offset, NORM, WEIGHT, Q, TURNED, HALF)
    dk, k, dw = dq + q_heads * 2 * HALF, q + q_heads * 2 * HALF, dw + 2 * HALF
    _unturn_heads(dk, k, kw_ptr, dw, c, s, k_heads, eps, offset, NORM, WEIGHT, K, TURNED, HALF)


def forward_triton(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `forward` does, by its Triton kernel; half a head is a power of two."""
    q, k, v = heads.split(qkv)
    norm = heads.query_norm is not None
    to_q, to_k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)) if norm else (q, k)
    half = heads.dim // 2
    warps = 2 if norm and half < COLUMNS else 4
    tokens = max(1, warps * COLUMNS // (HEADS * half))
    q_blocks, k_blocks = cdiv(heads.query, HEADS), cdiv(heads.key_value, HEADS)
    even = len(qkv) % tokens == heads.query % HEADS == heads.key_value % HEADS == 0
    launch(
        _forward, ((q_blocks + k_blocks) * cdiv(len(qkv), tokens),),
        qkv, to_q, to_k, cos, sin, heads.query_norm if norm else cos, heads.key_norm if norm else cos,
        len(qkv), qkv.stride(0), to_q.stride(0), to_k.stride(0), heads.query, heads.key_value, heads.eps, heads.offset,
        NORM=norm, EVEN=even, Q_BLOCKS=q_blocks, BLOCKS=q_blocks + k_blocks, TOKENS=tokens, HEADS=HEADS,
        TURNED=cos.shape[1] // 2, HALF=half, num_warps=warps,
    )  # fmt: skip
    return to_q, to_k, v


def backward_triton_(
    dqkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, qkv: Tensor | None, weight_grad: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Do what `backward_` does, by its Triton kernel.

    A program leaves its token's part of the weights' gradients, which are summed after.
    """
    query, key = heads.query_norm, heads.key_norm
    norm = query is not None and key is not None
    weight_grad = norm and weight_grad
    dw = torch.empty(len(dqkv), 2, heads.dim, dtype=torch.float32, device=dqkv.device) if weight_grad else dqkv
    columns = heads.query * heads.dim
    warps = 16 if columns > 8192 else 8 if columns > (4096 if norm else 2048) else 4  # by registers, of wide heads
    launch(
        _backward, (len(dqkv),),
        dqkv, qkv if norm else dqkv, cos, sin, query if norm else cos, key if norm else cos, dw,
        dqkv.stride(0), heads.query, heads.key_value, heads.eps, heads.offset,
        NORM=norm, WEIGHT=weight_grad, Q=next_power_of_2(heads.query),
        K=next_power_of_2(heads.key_value), TURNED=cos.shape[1] // 2, HALF=heads.dim // 2, num_warps=warps,
    )  # fmt: skip
    if not weight_grad or query is None or key is None:
        return dqkv.flatten(1), None, None
    whole = dw.sum(0)
    return dqkv.flatten(1), whole[0].to(query.dtype), whole[1].to(key.dtype)


forward = by_device(forward_reference, forward_triton)
backward_ = by_device(backward_reference_, backward_triton_)
