"""What bitsandbytes makes of its own 4 bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor


def dequantised(codes: Tensor, state: Any) -> Tensor:
    """Dequantise as one long row: bitsandbytes' kernel for AVX512 begins a block with each row, whatever its length."""
    flat = copy.copy(state)
    flat.shape = torch.Size([math.prod(state.shape)])
    return dequantize_4bit(codes, flat).view(state.shape)
