"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), chunked; the state starts at zero in each document.

S_t = exp(g_t) S_{t−1} + β_t k_t (v_t − exp(g_t) S_{t−1}ᵀ k_t)ᵀ        o_t = scale · S_tᵀ q_t
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class Saved(NamedTuple):
    """What the backward needs besides the arguments."""


def saved_bytes(tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Count the bytes of `Saved`."""
    return 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Sequence[tuple[int, int]], scale: float
) -> tuple[Tensor, Saved]:
    """Return (o [T, H_v, D_v], what `backward` needs besides).

    Args:
        q, k: [T, H_k, D_k]; v: [T, H_v, D_v]; g, beta: [T, H_v].
        chunks: each document's [start, end).
    """
    with torch.no_grad():
        return torch.cat([_document([x[a:b] for x in (q, k, v, g, beta)], scale) for a, b in chunks]), Saved()


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, saved: Any, chunks: Any, scale: float
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv, dg, dbeta)."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        o = torch.cat([_document([x[a:b] for x in leaves], scale) for a, b in chunks])
    return torch.autograd.grad(o, leaves, do)


def _document(arguments: list[Tensor], scale: float) -> Tensor:
    q, k, v, g, beta = arguments
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = v.shape[1] // k.shape[1]
    dtype = v.dtype
    q, k = (x.to(wide).repeat_interleave(groups, 1) for x in (q * scale, k))
    q, k, v, g, beta = (x.to(wide).transpose(0, 1) for x in (q, k, v, g, beta))  # [H, T, …]
    state, found = v.new_zeros(len(v), k.shape[2], v.shape[2]), []
    bounds = [*range(0, v.shape[1], CHUNK), v.shape[1]]
    for a, b in pairwise(bounds):
        q_, k_, v_, g_, beta_ = (x[:, a:b] for x in (q, k, v, g, beta))
        total = g_.cumsum(1)
        decay = (total[:, :, None] - total[:, None]).tril().exp().tril()
        system = (beta_[..., None] * (k_ @ k_.mT) * decay).tril(-1) + torch.eye(b - a, dtype=wide, device=v.device)
        known = v_ - total.exp()[..., None] * (k_ @ state)
        new = torch.linalg.solve_triangular(system, beta_[..., None] * known, upper=False)
        found.append(total.exp()[..., None] * (q_ @ state) + ((q_ @ k_.mT) * decay) @ new)
        last = total[:, -1:]
        state = last.exp()[..., None] * state + ((last - total).exp()[..., None] * k_).mT @ new
    return torch.cat(found, 1).transpose(0, 1).to(dtype)
