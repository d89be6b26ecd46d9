"""Cross-entropy in Triton: a program a row, two reads and one write of the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.tanh_triton import tanh


@triton.jit
def _cap(y, cap, CAP: tl.constexpr):
    """(c·tanh(y/c), tanh(y/c)), or (y, 0) without a cap."""
    if CAP:
        t = tanh(y / cap)
        return cap * t, t
    else:
        return y, tl.zeros_like(y)


@triton.jit
def _kernel(y_ptr, target_ptr, loss_ptr, V, stride, ignore, cap, CAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    y_ptr += row * stride
    m = float("-inf")
    whole = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z, _ = _cap(tl.load(y_ptr + cols, mask=cols < V, other=0.0).to(tl.float32), cap, CAP)
        z = tl.where(cols < V, z, float("-inf"))
        higher = tl.maximum(m, tl.max(z, 0))
        whole = whole * tl.exp(m - higher) + tl.sum(tl.exp(z - higher), 0)
        m = higher
    keep = target != ignore
    chosen, _ = _cap(tl.load(y_ptr + tl.where(keep, target, 0)).to(tl.float32), cap, CAP)
    tl.store(loss_ptr + row, tl.where(keep, m - chosen + tl.log(whole), 0.0))
    tl.debug_barrier()  # the label's logit is read before it is overwritten
    blocks = tl.cdiv(V, BLOCK)
    for block in range(0, blocks):  # from the end, of which the most is still in the cache
        cols = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        z, t = _cap(tl.load(y_ptr + cols, mask=cols < V, other=0.0).to(tl.float32), cap, CAP)
        grad = tl.exp(z - m) / whole - tl.where(cols == target, 1.0, 0.0)
        if CAP:
            grad = grad * (1.0 - t * t)
        grad = tl.where(keep, grad, 0.0)
        tl.store(y_ptr + cols, grad.to(y_ptr.dtype.element_ty), mask=cols < V)


def cross_entropy_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """As `cross_entropy.cross_entropy_`."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cap = softcap or 1.0
    _kernel[(rows,)](
        logits,
        targets,
        losses,
        vocab,
        logits.stride(0),
        ignore_index,
        cap,
        CAP=softcap is not None,
        BLOCK=8192,
        num_warps=16,
    )
    return losses
