"""Cross-entropy in Triton: the logits are read once and written once.

A row is split over programs that keep their parts in registers, as they were read, until each has heard the others'
maximum and sum. These are one word of 64 bits that is never 0 (the sum of a part whose maximum is 0 is at least 1), so
that nothing beside the word need be waited for; it is read from the cache that all multiprocessors share.

That all of a row's programs come: a program takes its part by a ticket, so the parts of a row have started before
those of the next, and none waits before its word is out. Of the first row that isn't done every part taken is
therefore running or done, and the rest start while fewer programs run than the device has room for, which is at least
one a multiprocessor. Of launches side by side each that waits in vain holds less than a row's programs.

Rows of more parts than multiprocessors, and Triton's interpreter, which runs one program after the other, take two
launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronghorn.kernels.launch import cdiv, launch, next_power_of_2
from pronghorn.kernels.tanh_triton import tanh

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""A maximum to start from: with -inf, a lane of -inf logits would give exp(-inf + inf)."""
LOG2_E = tl.constexpr(1.4426950408889634)
LANE = tl.constexpr(8)
"""Logits of a thread that lie side by side: 16 bytes of 16 bits."""
WARPS = 8
KEPT = 192
"""Bytes of logits that a thread keeps; half with a cap, whose tanh wants registers."""
REGISTERS = 64
"""Of a thread: four programs of WARPS on a multiprocessor."""
FIRST_WORD = tl.constexpr(16)
"""128 bytes after the ticket."""
AT_ONCE, SUMS, GRADIENTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
def _anew(y, PACKED: tl.constexpr):
    """y itself, but the compiler can't know: else it keeps the float32 of 16 bits, twice the registers."""
    if PACKED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [y], dtype=y.dtype, is_pure=False, pack=2)
    else:
        return y


@triton.jit
def _within(kept, cols, low, high):
    """-inf for what was read before the row begins or after it ends, which only its first and its last part have."""
    TILE: tl.constexpr = cols.shape[0] * LANE
    TILES: tl.constexpr = len(kept)
    if (low > 0) | (high < TILES * TILE):
        inside = ()
        for i in tl.static_range(TILES):
            at = cols + i * TILE
            inside += (tl.where((at >= low) & (at < high), kept[i], float("-inf")),)  # type: ignore[assignment]
        kept = inside
    return kept


@triton.jit
def _sums(kept, cols, low, high, cap, CAP: tl.constexpr, PACKED: tl.constexpr):
    """A part's maximum, and its sum of exp(z − maximum), of columns from `low` to before `high`: others are -inf."""
    LANES: tl.constexpr = cols.shape[0]
    TILE: tl.constexpr = LANES * LANE
    TILES: tl.constexpr = len(kept)
    m = tl.full((LANES,), LOWEST, tl.float32)
    for i in tl.static_range(TILES):
        m = tl.maximum(m, tl.max(kept[i].to(tl.float32), 1))
    if CAP:
        m = cap * tanh(m / cap)
    s = tl.zeros((LANES,), tl.float32)
    for i in tl.static_range(TILES):
        z, _ = _cap(_anew(kept[i], PACKED), cap, CAP)
        if CAP:
            z = tl.where((cols + i * TILE >= low) & (cols + i * TILE < high), z, float("-inf"))
        s += tl.sum(_exp(z - m[:, None]), 1)
    highest = tl.max(m, 0)
    return highest, tl.sum(s * _exp(m - highest), 0)


@triton.jit
def _tell(word_ptr, highest, whole):
    high = highest.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = whole.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(word_ptr, high | low, sem="relaxed")


@triton.jit
def _hear(words_ptr, PARTS: tl.constexpr, PLACES: tl.constexpr):
    """The row's maximum and sum, when all of its parts have told theirs."""
    places = tl.arange(0, PLACES)
    words = tl.load(words_ptr + places, mask=places < PARTS, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), 0) == 0:
        words = tl.load(words_ptr + places, mask=places < PARTS, other=1, volatile=True)
    m = tl.where(places < PARTS, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), LOWEST)
    s = tl.where(places < PARTS, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    highest = tl.max(m, 0)
    return highest, tl.sum(s * _exp(m - highest), 0)


@triton.jit
def _kernel(
    y_ptr, target_ptr, loss_ptr, scratch_ptr, V, stride, ignore, cap, CAP: tl.constexpr, RAGGED: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr,
    PACKED: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """A program has TILES · LANES · LANE columns of a row, from where the row's first LANE of memory begins. RAGGED:
    rows begin or end within a LANE. GROUP: logits that are loaded together, the part of them beyond the row, too."""
    TILE: tl.constexpr = LANES * LANE
    SPAN: tl.constexpr = TILES * TILE
    ticket = tl.program_id(0)
    if PARTS > 1 and PHASE == AT_ONCE:
        ticket = tl.atomic_add(scratch_ptr, 1, sem="relaxed").to(tl.int32)
    row = (ticket // PARTS).to(tl.int64)
    part = ticket % PARTS
    begin = row * stride // LANE * LANE
    low = -part * SPAN  # where the row begins, counted from the part's first column
    if RAGGED:
        low += (row * stride - begin).to(tl.int32)
    high = low + V
    y_ptr += begin + part * SPAN
    words_ptr = scratch_ptr + FIRST_WORD + row * PARTS
    cols = tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    target = tl.load(target_ptr + row)
    wanted = tl.where(target == ignore, 0, high)
    kept = ()
    for i in tl.static_range(TILES):
        at = cols + i * TILE
        y = tl.load(y_ptr + at, mask=at // GROUP * GROUP < wanted, other=float("-inf"), eviction_policy="evict_first")
        kept += (y,)  # type: ignore[assignment]
    known = (target >= 0) & (target < V)  # else the loss is nan, and nothing beside the row is written
    label = target + low
    mine = known & (label >= 0) & (label < SPAN)
    highest = 0.0
    shift = float("-inf")  # log2 of 1 / sum: an ignored row's gradients are exp(-inf - inf)
    grad = 0.0
    if target == ignore:
        if PHASE != SUMS:
            tl.store(loss_ptr + row, 0.0, mask=part == 0)
    else:
        chosen, chosen_tanh = _cap(tl.load(y_ptr + label, mask=mine, other=float("nan")), cap, CAP)
        whole = 0.0
        if PHASE != GRADIENTS:
            if RAGGED:
                kept = _within(kept, cols, low, high)  # from here on: both would take twice the registers
            highest, whole = _sums(kept, cols, low, high, cap, CAP, PACKED)
            if PARTS > 1:
                _tell(words_ptr + part, highest, whole)
        if PHASE != SUMS:
            if PARTS > 1:
                highest, whole = _hear(words_ptr, PARTS, PLACES)
            tl.store(loss_ptr + row, highest - chosen + tl.log(whole), mask=mine | ((part == 0) & (known == 0)))
            shift = -tl.log2(whole)
            grad = _exp(chosen - highest) / whole - 1.0
            if CAP:
                grad *= 1.0 - chosen_tanh * chosen_tanh
            tl.debug_barrier()  # the label's logit is read before it is overwritten
    if PHASE != SUMS:
        for i in tl.static_range(TILES):
            at = cols + i * TILE
            z, t = _cap(_anew(kept[i], PACKED), cap, CAP)
            p = tl.exp2((z - highest) * LOG2_E + shift)
            p = (p * (1.0 - t * t) if CAP else p).to(y_ptr.dtype.element_ty)
            if not RAGGED:
                tl.store(y_ptr + at, p, mask=at // GROUP * GROUP < high)
            elif (low <= i * TILE) & (i * TILE + TILE <= high):
                tl.store(y_ptr + at, p)
            else:  # other comparisons than the sums', whose outcomes the compiler would keep
                tl.store(y_ptr + at, p, mask=(at - low).to(tl.uint32) < V)
        if mine & (target != ignore):
            tl.debug_barrier()  # the label's gradient is written over what every other's is
            tl.store(y_ptr + label, grad)


COMPILED = isinstance(_kernel, triton.JITFunction)
"""Not interpreted, which CUDA tensors can be, too: programs would wait for those after them, for ever."""


def cross_entropy_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """As `cross_entropy.cross_entropy_`."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    aligned = logits.data_ptr() % 16 == 0
    constants = form(vocab, logits.stride(0), logits.element_size(), aligned, softcap is not None)
    parts = constants["PARTS"]
    phases = [AT_ONCE] if parts == 1 or parts <= _multiprocessors(logits.device) else [SUMS, GRADIENTS]
    scratch = targets  # untouched
    if parts > 1:
        scratch = torch.zeros(FIRST_WORD.value + rows * parts, dtype=torch.int64, device=logits.device)
    for phase in phases:
        launch(
        _kernel, (rows * parts,),
            logits, targets, losses, scratch, vocab, logits.stride(0), ignore_index, softcap or 1.0, **constants,
            PACKED=COMPILED and logits.element_size() == 2, PHASE=phase.value, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
    return losses


def form(vocab: int, stride: int, bytes_: int, aligned: bool, capped: bool) -> dict[str, Any]:
    """The kernel's compile-time values for rows of `vocab` logits of `bytes_` each, `stride` apart, of which the first
    is `aligned` to 16 bytes."""
    lanes, lane = WARPS * 32, LANE.value
    ahead = lane - 1 if stride % lane else 0  # of a row, in the memory that its first LANE begins with
    tiles = cdiv(vocab + ahead, lanes * lane)
    parts = cdiv(tiles, KEPT // (lane * bytes_) // (1 + capped))
    each = cdiv(tiles, parts)
    parts = cdiv(tiles, each)
    return {
        "CAP": capped,
        "RAGGED": vocab % lane != 0 or stride % lane != 0 or not aligned,
        "GROUP": 16 // bytes_ if aligned else 1,
        "LANES": lanes,
        "TILES": each,
        "PARTS": parts,
        "PLACES": max(lanes, next_power_of_2(parts)),
    }


def _multiprocessors(device: torch.device) -> int:
    """0 where none runs beside another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if COMPILED else 0
