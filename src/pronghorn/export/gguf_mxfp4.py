"""Numbers in MXFP4 as GGUF files hold them: of 32 numbers one scale 2^(e − 127), and 4 bits (e2m1) each.

    e = floor(log2 max |x|) − 2 + 127,    codes: the nearest of ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} · 2^(e − 127)

What was stored in MXFP4 comes out as it was, whatever its scales were. The `gguf` package computes the same by numpy,
on one core, and gpt-oss has billions of such numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the magnitudes of e2m1."""


def pack_mxfp4(weight: Tensor) -> Tensor:
    """Return float32 [..., K] as bytes [..., K / 32 · 17]: each block's e, then its codes, the first half's in the low
    bits."""
    blocks = weight.reshape(-1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 3 + 127).clamp(0, 254).where(largest > 0, 0)
    scaled = blocks * torch.ldexp(torch.ones_like(largest), 127 - exponent)
    size = scaled.abs()
    codes = torch.zeros(blocks.shape, dtype=torch.uint8)
    for bound in _BOUNDS:
        codes += size > bound
    codes += 8 * ((scaled < 0) & (codes > 0)).to(torch.uint8)
    packed = torch.cat([exponent.to(torch.uint8), codes[:, :16] | codes[:, 16:] << 4], dim=-1)
    return packed.view(*weight.shape[:-1], -1)
