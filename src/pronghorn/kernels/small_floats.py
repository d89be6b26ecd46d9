"""Numbers of 4 and 8 bits as float32, decoded by hand: not every GPU converts them.

e2m1    ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}
e4m3    ±m · 2⁻⁹ below 2⁻⁶, else ±(1 + m / 8) · 2^(e − 7); no infinity, and NaN where all bits but the sign are set
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.launch import tl, triton

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the numbers of uint8 [..., B] as float32 [..., 2 B], the lower 4 bits first."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return values[nibbles.int()]


@triton.jit
def decode_e2m1(nibbles):
    """Return the numbers of 4 bits each in float32."""
    magnitude = (nibbles & 7).to(tl.int32)
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)  # exponent and mantissa where float32's are
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(nibbles >= 8, -value, value)


@triton.jit
def decode_e4m3(codes):
    """Return the numbers of bytes in float32."""
    magnitude = (codes & 127).to(tl.int32)
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)  # as in `decode_e2m1`
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 127, float("nan"), value)
    return tl.where(codes >= 128, -value, value)
