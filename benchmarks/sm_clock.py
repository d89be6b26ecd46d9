"""Tell at what clock the GPU's multiprocessors ran between two points, counted by themselves.

A card bound by its power lowers their clock under load and raises it in a pause, so that of two ways to do the same
work the one that waits also computes faster. Cycles compare them as a fixed clock would.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 8
"""A multiprocessor, so that each gets some."""


@triton.jit
def _read(out_ptr, MOST: tl.constexpr):
    """Write cycles and nanoseconds, at the place of the multiprocessor that runs this."""
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    nanoseconds = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(out_ptr + sm, cycles, mask=sm < MOST)
    tl.store(out_ptr + MOST + sm, nanoseconds, mask=sm < MOST)


def mark(device: Any) -> Tensor:
    """Mark a point in the current stream's work: int64 [2, multiprocessors], to be read once it is reached."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.zeros(2, count, dtype=torch.int64, device=device)
    _read[(PROGRAMS * count,)](out, MOST=count, num_warps=1)
    return out


def megahertz(begin: Tensor, end: Tensor) -> float:
    """Return the mean clock between two marks, the median of all multiprocessors that both saw; wait for them."""
    seen = (begin > 0).all(0) & (end > 0).all(0)
    cycles, nanoseconds = (end - begin)[:, seen].double()
    return (1e3 * cycles / nanoseconds).median().item()
