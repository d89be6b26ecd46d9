"""Tiny models with adapters over frozen bases of several kinds."""

from __future__ import annotations

from typing import Any

import torch

from support.fused import with_adapters
from support.tiny import in_4_bits, tiny_model

SIZES = {"intermediate_size": 128}
"""4-bit blocks end with the rows."""


def based(family: str, base: str) -> Any:
    """Return a tiny model with adapters over a base in bf16 or NF4."""
    model = tiny_model(family, **SIZES).to(torch.bfloat16)
    return with_adapters(in_4_bits(model) if base == "nf4" else model)
