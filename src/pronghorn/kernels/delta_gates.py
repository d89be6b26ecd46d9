"""The two gates of a gated delta net, of each token and value head.

β = σ(b)      g = −exp(A) · softplus(a + dt)      db = dβ · β (1 − β)      da = −dg · exp(A) · σ(a + dt)

A is `decay` and dt is `step`, parameters of a head. The tensors are small: what counts is that each way is one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pronghorn.kernels.launch import by_device, cdiv, launch, tl, triton

BLOCK, WARPS = 1024, 4


def forward_reference(b: Tensor, a: Tensor, decay: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g in float32 (float64), β in b's dtype), each [T, H].

    Args:
        b, a: [T, H], columns of a wider tensor perhaps.
        decay, step: A and dt, [H].
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    return -decay.to(wide).exp() * softplus(a.to(wide) + step), b.sigmoid()


def backward_reference(
    dg: Tensor, d_beta: Tensor, b: Tensor, a: Tensor, decay: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (db, da) [T, H] in the dtypes of b and a.

    Args:
        dg, d_beta: [T, H], contiguous.
        b, a, decay, step: as `forward` was given.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    beta = b.to(wide).sigmoid()
    da = dg * -decay.to(wide).exp() * (a.to(wide) + step).sigmoid()
    return (d_beta * beta * (1 - beta)).to(b.dtype), da.to(a.dtype)


@triton.jit
def _forward(
    b_ptr, a_ptr,  # [T, H], rows b_row and a_row apart
    decay_ptr, step_ptr,  # [H]
    g_ptr,  # float32 [T, H]
    beta_ptr,  # [T, H]
    b_row, a_row,
    N,  # T · H
    H, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK elements of g and β."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, head = i // H, i % H
    a = tl.load(a_ptr + row * a_row + head, mask=i < N, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + head, mask=i < N, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(decay_ptr + head).to(tl.float32))
    x = a + tl.load(step_ptr + head).to(tl.float32)
    soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))  # softplus x; exp x itself would overflow
    tl.store(g_ptr + i, -rate * soft, mask=i < N)
    tl.store(beta_ptr + i, tl.sigmoid(b).to(beta_ptr.dtype.element_ty), mask=i < N)


@triton.jit
def _backward(
    dg_ptr, d_beta_ptr,  # [T, H]
    b_ptr, a_ptr,  # [T, H], rows b_row and a_row apart
    decay_ptr, step_ptr,  # [H]
    db_ptr, da_ptr,  # [T, H]
    b_row, a_row,
    N,  # T · H
    H, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK elements of db and da."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, head = i // H, i % H
    a = tl.load(a_ptr + row * a_row + head, mask=i < N, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + head, mask=i < N, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(decay_ptr + head).to(tl.float32))
    x = a + tl.load(step_ptr + head).to(tl.float32)
    dg = tl.load(dg_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    d_beta = tl.load(d_beta_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    # db = dβ · β (1 − β)
    beta = tl.sigmoid(b)
    tl.store(db_ptr + i, (d_beta * beta * (1 - beta)).to(db_ptr.dtype.element_ty), mask=i < N)
    # da = −dg · exp(A) · σ(a + dt)
    tl.store(da_ptr + i, (-dg * rate * tl.sigmoid(x)).to(da_ptr.dtype.element_ty), mask=i < N)


def forward_triton(b: Tensor, a: Tensor, decay: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `forward` does, by its Triton kernel."""
    tokens, heads = a.shape
    g = torch.empty(tokens, heads, dtype=torch.float32, device=a.device)
    beta = torch.empty(tokens, heads, dtype=b.dtype, device=b.device)
    launch(
        _forward, (cdiv(g.numel(), BLOCK),), b, a, decay, step, g, beta, b.stride(0), a.stride(0), g.numel(), heads,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return g, beta


def backward_triton(
    dg: Tensor, d_beta: Tensor, b: Tensor, a: Tensor, decay: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what `backward` does, by its Triton kernel."""
    tokens, heads = a.shape
    db, da = (torch.empty(tokens, heads, dtype=x.dtype, device=x.device) for x in (b, a))
    launch(
        _backward, (cdiv(da.numel(), BLOCK),),
        dg, d_beta, b, a, decay, step, db, da, b.stride(0), a.stride(0), da.numel(), heads,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return db, da


forward = by_device(forward_reference, forward_triton, at=1, float64=False)
backward = by_device(backward_reference, backward_triton, at=3, float64=False)
