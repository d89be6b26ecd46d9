"""Cross-entropy in Triton: a program a row, two reads and one write of the logits.

The second read begins at the end, of which the most is still in the cache. Each lane of eight logits has its own
running maximum, so that the threads of the first pass need not wait for each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.tanh_triton import tanh

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""A maximum to start from: with -inf, a lane of -inf logits would give exp(-inf + inf)."""
LOG2_E = tl.constexpr(1.4426950408889634)
LANE = tl.constexpr(8)
"""Logits of a thread that lie side by side: 16 bytes of 16 bits."""
LANES = 1024
WARPS = 16


@triton.jit
def _exp(x):
    """exp, 0 below float32's normal numbers, for which `tl.exp` takes three instructions more."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def _cap(y, cap, CAP: tl.constexpr):
    """(c·tanh(y/c), tanh(y/c)) of a logit y, or (y, y) without a cap."""
    y = y.to(tl.float32)
    if CAP:
        t = tanh(y / cap)
        return cap * t, t
    else:
        return y, y


@triton.jit
def _add(m, s, z):
    """Each lane's maximum and sum of exp(z − m) with the logits z, [lanes, LANE], too."""
    higher = tl.maximum(m, tl.max(z, 1))
    return higher, s * _exp(m - higher) + tl.sum(_exp(z - higher[:, None]), 1)


@triton.jit
def _gradient(y, m, scale, cap, CAP: tl.constexpr):
    """∂ℓ/∂y but for the label's −1, in y's dtype."""
    z, t = _cap(y, cap, CAP)
    p = _exp(z - m) * scale
    return (p * (1.0 - t * t) if CAP else p).to(y.dtype)


@triton.jit
def _kernel(
    y_ptr, target_ptr, loss_ptr, V, stride, ignore, cap, CAP: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rows are stride · STEP apart."""
    TILE: tl.constexpr = LANES * LANE
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * stride * STEP
    cols = tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    target = tl.load(target_ptr + row)
    tiled = V // TILE * TILE  # what follows is less than a tile
    rest = tiled + cols
    if target == ignore:
        tl.store(loss_ptr + row, 0.0)
        zeros = tl.zeros((LANES, LANE), y_ptr.dtype.element_ty)
        for start in range(0, tiled, TILE):
            tl.store(y_ptr + start + cols, zeros)
        tl.store(y_ptr + rest, zeros, mask=rest < V)
    else:
        known = (target >= 0) & (target < V)  # else the loss is nan, and nothing beside the row is written
        chosen, chosen_tanh = _cap(tl.load(y_ptr + target, mask=known, other=float("nan")), cap, CAP)
        m = tl.full((LANES,), LOWEST, tl.float32)
        s = tl.zeros((LANES,), tl.float32)
        for start in range(0, tiled, TILE):
            m, s = _add(m, s, _cap(tl.load(y_ptr + start + cols, eviction_policy="evict_last"), cap, CAP)[0])
        last = tl.load(y_ptr + rest, mask=rest < V, other=0.0)
        m, s = _add(m, s, tl.where(rest < V, _cap(last, cap, CAP)[0], float("-inf")))
        highest = tl.max(m, 0)
        whole = tl.sum(s * _exp(m - highest), 0)
        tl.store(loss_ptr + row, highest - chosen + tl.log(whole))
        scale = 1.0 / whole
        tl.debug_barrier()  # the label's logit is read before it is overwritten
        tl.store(y_ptr + rest, _gradient(last, highest, scale, cap, CAP), mask=rest < V)
        for done in range(0, tiled, TILE):
            back = y_ptr + (tiled - TILE - done) + cols
            y = tl.load(back, eviction_policy="evict_first")
            tl.store(back, _gradient(y, highest, scale, cap, CAP), eviction_policy="evict_first")
        tl.debug_barrier()  # the label's gradient is written over what every other's is
        grad = _exp(chosen - highest) * scale - 1.0
        if CAP:
            grad *= 1.0 - chosen_tanh * chosen_tanh
        tl.store(y_ptr + target, grad.to(y_ptr.dtype.element_ty), mask=known)


def cross_entropy_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """As `cross_entropy.cross_entropy_`."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    step = 8 if logits.stride(0) % 8 == 0 else 1  # known when compiling: loads of 16 bytes
    _kernel[(rows,)](
        logits, targets, losses, vocab, logits.stride(0) // step, ignore_index, softcap or 1.0,
        CAP=softcap is not None, STEP=step, LANES=LANES, num_warps=WARPS,
    )  # fmt: skip
    return losses
