"""Cross-entropy of a head's output, and its gradient in the place of the logits.

    ℓ_t = log Σ_v exp z_tv − z_t,label        z = y, or c·tanh(y/c) with a cap
    ∂ℓ_t/∂y_tv = (softmax(z_t)_v − [v = label]) · dz/dy        dz/dy = 1, or 1 − tanh²(y/c) with a cap

By one Triton kernel, a program a row, which reads the logits twice and writes them once. The second reading begins at
the row's end, most of which is still in the cache. No program waits for another.

Source: online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, launch, tl, triton
from pronghorn.kernels.tanh import tanh

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""A maximum to start from: with -inf, columns of -inf would give exp(-inf + inf)."""
LOG2_E = tl.constexpr(1.4426950408889634)
LANE = tl.constexpr(8)
"""Logits of a thread that lie side by side: 16 bytes of 16 bits."""
LANES, WARPS = 1024, 8
MANY = 65536
"""Columns from which on twice the lanes and four times the warps are faster."""


def cross_entropy_reference_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """Return the losses of rows, and write ∂ℓ/∂y over the logits y.

    Args:
        logits: [M, V], rows of any stride; overwritten.
        targets: int64 [M]; a row of `ignore_index` has loss and gradient 0.
    Returns:
        float32 (float64) [M].
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    capped = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    losses = torch.nn.functional.cross_entropy(capped, targets, ignore_index=ignore_index, reduction="none")
    supervised = targets != ignore_index
    grad = torch.softmax(capped, -1)
    grad[supervised, targets[supervised]] -= 1
    grad[~supervised] = 0
    if softcap is not None:
        grad *= 1 - (capped / softcap).square()
    logits.copy_(grad)
    return losses


@triton.jit
def _exp(x):
    """Return exp x, 0 below float32's normal numbers, for which `tl.exp` takes three instructions more."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def _cap(y, cap, CAP: tl.constexpr):
    """Return (z, tanh(y/c)) of logits y in float32; (y, y) without a cap."""
    y = y.to(tl.float32)
    if CAP:
        t = tanh(y / cap)
        return cap * t, t
    else:
        return y, y


@triton.jit
def _add(m, s, z):
    """Add the logits z [lanes, LANE] to each lane's maximum m and sum s of exp(z − m)."""
    higher = tl.maximum(m, tl.max(z, 1))
    return higher, s * _exp(m - higher) + tl.sum(_exp(z - higher[:, None]), 1)


@triton.jit
def _gradient(y, m, scale, cap, CAP: tl.constexpr):
    """Return ∂ℓ/∂y but for the label's −1, in y's dtype."""
    z, t = _cap(y, cap, CAP)
    p = _exp(z - m) * scale
    return (p * (1.0 - t * t) if CAP else p).to(y.dtype)


@triton.jit
def _kernel(
    y_ptr,  # [M, V], rows stride · STEP apart: logits, and then gradients
    target_ptr,  # [M]
    loss_ptr,  # [M]
    V, stride, ignore, cap, CAP: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute the loss of a row, and write its gradient over the logits."""
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
        # the maximum and the sum; each lane has its own, so that threads need not wait for each other
        valid = (target >= 0) & (target < V)  # else the loss is nan, and nothing beside the row is written
        chosen, chosen_tanh = _cap(tl.load(y_ptr + target, mask=valid, other=float("nan")), cap, CAP)
        m = tl.full((LANES,), LOWEST, tl.float32)
        s = tl.zeros((LANES,), tl.float32)
        for start in range(0, tiled, TILE):
            m, s = _add(m, s, _cap(tl.load(y_ptr + start + cols, eviction_policy="evict_last"), cap, CAP)[0])
        last = tl.load(y_ptr + rest, mask=rest < V, other=0.0)
        m, s = _add(m, s, tl.where(rest < V, _cap(last, cap, CAP)[0], float("-inf")))
        highest = tl.max(m, 0)
        whole = tl.sum(s * _exp(m - highest), 0)
        tl.store(loss_ptr + row, highest - chosen + tl.log(whole))
        # softmax times dz/dy, from the row's end
        scale = 1.0 / whole
        tl.debug_barrier()  # the label's logit is read before it is overwritten
        tl.store(y_ptr + rest, _gradient(last, highest, scale, cap, CAP), mask=rest < V)
        for done in range(0, tiled, TILE):
            back = y_ptr + (tiled - TILE - done) + cols
            y = tl.load(back, eviction_policy="evict_first")
            tl.store(back, _gradient(y, highest, scale, cap, CAP), eviction_policy="evict_first")
        # the label's
        tl.debug_barrier()  # it is written over what every other column's is
        grad = _exp(chosen - highest) * scale - 1.0
        if CAP:
            grad *= 1.0 - chosen_tanh * chosen_tanh
        tl.store(y_ptr + target, grad.to(y_ptr.dtype.element_ty), mask=valid)


def cross_entropy_triton_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """Do what `cross_entropy_` does, by its Triton kernel."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    step = 8 if logits.stride(0) % 8 == 0 else 1  # known when compiling: loads of 16 bytes
    numbers = vocab, logits.stride(0) // step, ignore_index, softcap or 1.0
    many = vocab > MANY
    tile = {"LANES": LANES * 2 if many else LANES, "num_warps": WARPS * 4 if many else WARPS}
    options = {"CAP": softcap is not None, "STEP": step, **tile}
    launch(_kernel, (rows,), logits, targets, losses, *numbers, **options)
    return losses


cross_entropy_ = by_device(cross_entropy_reference_, cross_entropy_triton_)
