"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) over packed documents, in chunks of 64 tokens.

    S_t = exp(g_t) S_{t−1} + β_t k_t (v_t − exp(g_t) S_{t−1}ᵀ k_t)ᵀ        o_t = scale · S_tᵀ q_t

S is zero at each document's start; q and k are divided by their lengths, (Σ x² + 1e-6)^(1/2), first. Inside a chunk,
with b the running sum of g, D_ij = exp(b_i − b_j) for i ≥ j, and S the state at its start:

    A = tril(β k kᵀ ∘ D, −1)    N = (I + A)⁻¹ β (v − exp(b) k S)    o = scale (exp(b) q S + (q kᵀ ∘ D) N)
    S' = exp(b_L) S + (exp(b_L − b) k)ᵀ N

Source: the WY form of Yang et al. 2024 (arXiv:2406.06484). Head j of q and k serves the value heads j·(H_v / H_k) and
those that follow. The kernels are in `gated_delta_forward` and `gated_delta_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pronghorn.chunks import CHUNK, Chunks
from pronghorn.kernels.gated_delta_backward import backward_triton
from pronghorn.kernels.gated_delta_forward import L2_EPS, forward_triton
from pronghorn.kernels.gated_delta_forward import Saved as TritonSaved
from pronghorn.ranges import SCORES, in_part

Saved = Sequence[Tensor]
"""What the backward needs besides the arguments: `gated_delta_forward.Saved`, or nothing after `forward_reference`."""


def recurrent_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, scale: float
) -> Tensor:
    """Compute o token by token, as the formula says; slow, for float64 and autograd."""
    return _by_document(_recurrent, q, k, v, g, beta, chunks, scale)


def chunked_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, scale: float) -> Tensor:
    """Compute o chunk by chunk in float32 (float64), with autograd."""
    return _by_document(_chunked, q, k, v, g, beta, chunks, scale)


def forward_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, scale: float
) -> tuple[Tensor, Saved]:
    """Do what `forward` does, in plain torch."""
    with torch.no_grad():
        return chunked_reference(q, k, v, g, beta, chunks, scale), ()


def backward_reference(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, saved: Saved, chunks: Chunks, scale: float
) -> tuple[Tensor, ...]:
    """Do what `backward` does, in plain torch."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        q, k, v, g, beta = leaves
        o = chunked_reference(q, k, v, g, beta, chunks, scale)
    return torch.autograd.grad(o, leaves, do)


def _by_document(
    rule: Callable[..., Tensor],
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, scale: float,
) -> Tensor:  # fmt: skip
    wide, found, spans = torch.promote_types(q.dtype, torch.float32), [], chunks.chunks.tolist()
    for first, count in chunks.documents.tolist():
        if count:
            start, end = spans[first][0], sum(spans[first + count - 1][:2])
            qd, kd, vd, gd, bd = (x[start:end].to(wide).transpose(0, 1) for x in (q, k, v, g, beta))
            qd, kd = ((x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()) for x in (qd, kd))
            qd, kd = (x.repeat_interleave(v.shape[1] // k.shape[1], 0) for x in (qd * scale, kd))
            found.append(rule(qd, kd, vd, gd, bd).transpose(0, 1))
    return torch.cat(found).to(v.dtype)


def _recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state, found = v.new_zeros(len(v), k.shape[2], v.shape[2]), []
    for t in range(v.shape[1]):
        state = g[:, t].exp()[:, None, None] * state
        new = beta[:, t, None] * (v[:, t] - (k[:, t, :, None] * state).sum(1))
        state = state + k[:, t, :, None] * new[:, None]
        found.append((q[:, t, :, None] * state).sum(1))
    return torch.stack(found, 1)


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state, found = v.new_zeros(len(v), k.shape[2], v.shape[2]), []
    for at in range(0, v.shape[1], CHUNK):
        qc, kc, vc, gc, bc = (x[:, at : at + CHUNK] for x in (q, k, v, g, beta))
        total = gc.cumsum(1)
        hidden = torch.ones(vc.shape[1], vc.shape[1], dtype=torch.bool, device=v.device).triu(1)
        decay = (total[:, :, None] - total[:, None]).masked_fill(hidden, float("-inf")).exp()
        system = (bc[..., None] * (kc @ kc.mT) * decay).tril(-1) + torch.eye(
            vc.shape[1], dtype=v.dtype, device=v.device
        )
        right = bc[..., None] * (vc - total.exp()[..., None] * (kc @ state))
        new = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        found.append(total.exp()[..., None] * (qc @ state) + (qc @ kc.mT * decay) @ new)
        last = total[:, -1:]
        state = last.exp()[..., None] * state + ((last - total).exp()[..., None] * kc).mT @ new
    return torch.cat(found, 1)


@in_part(SCORES)
def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, scale: float
) -> tuple[Tensor, Saved]:
    """Return (o [T, H_v, D_v] in v's dtype, what `backward` needs).

    Args:
        q, k: [T, H_k, D_k]; v: [T, H_v, D_v], of any strides but for the last; sizes of heads are powers of two, ≥ 16.
        g: float32 [T, H_v], logarithms of decays, ≤ 0.
        beta: [T, H_v].
    """
    if q.is_cuda:
        return forward_triton(q, k, v, g, beta, chunks, scale)
    return forward_reference(q, k, v, g, beta, chunks, scale)


@in_part(SCORES)
def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, saved: Saved, chunks: Chunks, scale: float
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv, dg, dbeta), contiguous, in the dtypes of q, k, v, g, beta."""
    if q.is_cuda:
        return backward_triton(do, q, k, v, g, beta, TritonSaved(*saved), chunks, scale)
    return backward_reference(do, q, k, v, g, beta, saved, chunks, scale)
