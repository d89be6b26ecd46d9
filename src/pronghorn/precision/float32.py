"""What float32 products are computed in: float32, unless tf32 is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pronghorn.errors import ConfigError


def check_tf32(device: torch.device) -> None:
    """Refuse tf32 (ConfigError) on a device that has none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(
            f"precision.tf32: true on {device.type}: tf32 needs an NVIDIA GPU, Ampere or newer",
            "leave precision.tf32 out",
        )


@contextmanager
def tf32_products() -> Iterator[None]:
    """Compute CUDA's float32 products in tf32, and leave the process as it was.

    Set by torch's older name: torch refuses to read that one after the newer alone was written.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


def narrowed(device: torch.device) -> str | None:
    """Return the name of what this process rounds float32 products to on a device ("tf32", "bf16"), or None."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision
    return None if precision in ("none", "ieee") else precision
