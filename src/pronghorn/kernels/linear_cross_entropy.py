"""Cross-entropy of h Wᵀ without its logits: rows in chunks, each one's gradient made while its logits are there.

    L = 1/N Σ_t ℓ(W h_t, label_t)        ∂L/∂h = 1/N (∂ℓ/∂y) W        ∂L/∂W = 1/N (∂ℓ/∂y)ᵀ h

The backward then only scales: no product is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.cross_entropy import cross_entropy_
from pronghorn.kernels.once import refuse_second_derivatives

CHUNK_BYTES = 256 * 2**20
"""The most that a chunk's logits take."""
MOST_ROWS = 2048
"""In a chunk: with more of them small vocabularies' logits are the peak of a step."""
EVEN = 8
"""Elements: 16 bytes of 16 bits."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    divisor: Tensor | int,
    ignore_index: int,
    softcap: float | None = None,
) -> Tensor:
    """Return the sum of the rows' cross-entropies, divided by `divisor`.

    Args:
        hidden: [M, H]; weight: [V, H], of the same dtype or wider (it is rounded to hidden's, its gradient isn't).
        targets: int64 [M], `ignore_index` where nothing is predicted.
        divisor: the supervised tokens of the whole accumulated batch; an int, or a scalar on the device.
        softcap: c of c·tanh(y/c), or None.
    Returns:
        float32 (float64) scalar.
    """
    wanted = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(hidden, weight, targets, divisor, ignore_index, softcap, wanted)


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients of the undivided sum in the forward, while logits are there; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        divisor: Tensor | int,
        ignore_index: int,
        softcap: float | None,
        wanted: bool,
    ) -> Tensor:
        input_grad, weight_grad = (wanted and need for need in ctx.needs_input_grad[:2])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        dh = torch.empty_like(hidden) if input_grad else None
        dw = (torch.empty_like if len(hidden) else torch.zeros_like)(weight, dtype=wide) if weight_grad else None
        ctx.weight_dtype, weight = weight.dtype, weight.to(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), rows_of_a_chunk(weight)):
            rows = slice(start, start + rows_of_a_chunk(weight))
            logits = _logits(hidden[rows], weight)
            total += cross_entropy_(logits, targets[rows], ignore_index, softcap).sum()
            # logits holds ∂ℓ/∂y now: (∂ℓ/∂y) W, and this chunk's part of (∂ℓ/∂y)ᵀ h
            whole, *rest = _even(weight)
            if dh is not None:
                torch.mm(logits[:, whole], weight[whole], out=dh[rows])
                for part in rest:
                    dh[rows].addmm_(logits[:, part], weight[part])
            if dw is not None:
                for part in (whole, *rest):
                    _add_product(dw[part], logits[:, part].t(), hidden[rows], beta=min(start, 1))  # the first writes
            del logits  # before the next chunk is made
        ctx.save_for_backward(dh, dw)
        ctx.divisor = divisor
        return total / divisor

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> Any:
        dh, dw = ctx.saved_tensors
        factor = grad / ctx.divisor
        return (
            None if dh is None else (dh * factor).to(dh.dtype),
            None if dw is None else (dw * factor).to(ctx.weight_dtype),
            *(None,) * 5,
        )


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return h Wᵀ, its rows 16 bytes or a multiple apart."""
    padded = hidden.new_empty(len(hidden), -(-len(weight) // EVEN) * EVEN)
    # CPUs with AMX multiply by zero what lies beyond an odd slice
    if len(weight) < padded.shape[1]:
        padded[:, len(weight) :].zero_()
    for part in _even(weight):
        torch.mm(hidden, weight[part].t(), out=padded[:, part])
    return padded[:, : len(weight)]


def _even(weight: Tensor) -> list[slice]:
    """Split the vocabulary's entries: up to a multiple of `EVEN`, then the rest if there is one.

    With an odd number cuBLAS's products are three times slower.
    """
    entries, most = len(weight), len(weight) // EVEN * EVEN
    return [slice(*ends) for ends in ((0, most), (most, entries)) if ends[0] < ends[1]]


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """Make total = beta · total + a b, rounded once (on the CPU twice, where total is float32 and a, b have 16 bits).

    With beta = 0 total may hold anything.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif beta:
        total += a @ b
    else:
        total.copy_(a @ b)


def rows_of_a_chunk(weight: Tensor) -> int:
    """Return how many rows' logits fit into CHUNK_BYTES: a multiple of 256, MOST_ROWS at most."""
    fit = CHUNK_BYTES // (weight.element_size() * weight.shape[0])
    return min(MOST_ROWS, max(256, fit // 256 * 256))
