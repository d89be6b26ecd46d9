"""Cross-entropy of a head's output, and its gradient in the place of the logits.

    ℓ_t = log Σ_v exp z_tv − z_t,label        z = y, or c·tanh(y/c) with a cap
    ∂ℓ_t/∂y_tv = (softmax(z_t)_v − [v = label]) · dz/dy        dz/dy = 1, or 1 − tanh²(y/c) with a cap

By two Triton kernels, neither of which waits for another program: the first reads the logits and leaves the maximum and
the sum of each part of a row; the second adds up a row's parts, always in one order, and writes the gradient over the
logits. A part is short enough that a few hundred rows give every multiprocessor several programs.

Source: online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, next_power_of_2, tl, triton
from pronghorn.kernels.tanh import tanh

BLOCK, WARPS = 4096, 8
"""Columns that a program holds at a time: 16 a thread, two loads of 16 bytes in 16 bits."""
BLOCKS = 4
"""Blocks of a part of a row."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""A maximum to start from: with -inf, columns of -inf would give exp(-inf + inf)."""


def cross_entropy_reference_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """Do what `cross_entropy_` does, in plain torch."""
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
def _cap(y, cap, CAP: tl.constexpr):
    """Return (z, tanh(y/c)) of logits y in float32; (y, y) without a cap."""
    y = y.to(tl.float32)
    if CAP:
        t = tanh(y / cap)
        return cap * t, t
    else:
        return y, y


@triton.jit
def _parts(
    y_ptr,  # [M, V], rows `stride` apart
    target_ptr,  # [M]
    parts_ptr,  # [M, PARTS, 2]: maximum and sum
    chosen_ptr,  # [M]: the label's logit, before the second kernel overwrites it
    V, stride, ignore, cap,
    CAP: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Leave the maximum and Σ exp(z − maximum) of a part of a row."""
    row, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS
    target = tl.load(target_ptr + row)
    if target != ignore:
        y_ptr += row * stride
        if part == 0:  # a label beyond the vocabulary makes the loss nan
            valid = (target >= 0) & (target < V)
            tl.store(chosen_ptr + row, tl.load(y_ptr + target, mask=valid, other=float("nan")).to(tl.float32))
        # every lane sums for itself: one reduction at the end
        highest = tl.full((BLOCK,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for block in range(BLOCKS):
            cols = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
            z, _ = _cap(tl.load(y_ptr + cols, mask=cols < V, other=float("-inf")), cap, CAP)
            z = tl.where(cols < V, z, float("-inf"))  # a cap makes -c of it
            new = tl.maximum(highest, z)
            total = total * tl.exp(highest - new) + tl.exp(z - new)
            highest = new
        top = tl.max(highest, 0)
        at = parts_ptr + (row * PARTS + part) * 2
        tl.store(at, top)
        tl.store(at + 1, tl.sum(total * tl.exp(highest - top), 0))


@triton.jit
def _gradients(
    y_ptr,  # [M, V], rows `stride` apart: logits, and then gradients
    target_ptr,  # [M]
    parts_ptr,  # [M, PARTS, 2]
    chosen_ptr,  # [M]
    loss_ptr,  # [M]
    V, stride, ignore, cap,
    CAP: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient over a part of a row, and the row's loss."""
    # the last rows first: the first kernel left them in the cache
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, part = program.to(tl.int64) // PARTS, program % PARTS
    target = tl.load(target_ptr + row)
    y_ptr += row * stride
    if target == ignore:
        tl.store(loss_ptr + row, 0.0, mask=part == 0)
        for block in range(BLOCKS):
            cols = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y_ptr + cols, tl.zeros((BLOCK,), y_ptr.dtype.element_ty), mask=cols < V)
    else:
        # the row's maximum and sum
        places = tl.arange(0, PLACES)
        at = parts_ptr + (row * PARTS + places) * 2
        highest = tl.load(at, mask=places < PARTS, other=LOWEST)
        sums = tl.load(at + 1, mask=places < PARTS, other=0.0)
        top = tl.max(highest, 0)
        log_sum = tl.log(tl.sum(sums * tl.exp(highest - top), 0))
        # its loss
        chosen, _ = _cap(tl.load(chosen_ptr + row), cap, CAP)
        tl.store(loss_ptr + row, top - chosen + log_sum, mask=part == 0)
        # softmax − one at the label, times dz/dy
        for block in range(BLOCKS):
            cols = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
            z, t = _cap(tl.load(y_ptr + cols, mask=cols < V, other=0.0), cap, CAP)
            grad = tl.exp(z - top - log_sum) - tl.where(cols == target, 1.0, 0.0)
            if CAP:
                grad *= 1.0 - t * t
            tl.store(y_ptr + cols, grad.to(y_ptr.dtype.element_ty), mask=cols < V)


def cross_entropy_triton_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """Do what `cross_entropy_` does, by its Triton kernels."""
    rows, vocab = logits.shape
    count = cdiv(vocab, BLOCKS * BLOCK)
    losses, chosen = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    parts = torch.empty(rows, count, 2, dtype=torch.float32, device=logits.device)
    numbers = vocab, logits.stride(0), ignore_index, softcap or 1.0
    options = {"CAP": softcap is not None, "PARTS": count, "BLOCKS": BLOCKS, "BLOCK": BLOCK, "num_warps": WARPS}
    launch(_parts, (rows * count,), logits, targets, parts, chosen, *numbers, **options)
    places = {"PLACES": next_power_of_2(count)}
    launch(_gradients, (rows * count,), logits, targets, parts, chosen, losses, *numbers, **options, **places)
    return losses


def cross_entropy_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """Return the losses of rows, and write ∂ℓ/∂y over the logits y.

    Args:
        logits: [M, V], rows of any stride; overwritten.
        targets: int64 [M]; a row of `ignore_index` has loss and gradient 0.
    Returns:
        float32 (float64) [M].
    """
    if logits.is_cuda:
        return cross_entropy_triton_(logits, targets, ignore_index, softcap)
    return cross_entropy_reference_(logits, targets, ignore_index, softcap)
