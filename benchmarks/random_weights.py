"""Make random weights of given shapes, as a source that `pronghorn.precision.loader.load` reads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pronghorn.precision.loader import StoredTensor

BLOCK = 2**22
"""About how many elements of a tensor share a seed."""
CODE_8 = 64.0
"""Standard deviation of codes in e4m3, which end at 448."""
CODE_4 = 2.93
"""Root mean square of the 16 numbers of e2m1."""


def spread(name: str, dtype: torch.dtype, std: float) -> tuple[float, float]:
    """Return the mean and the standard deviation of a tensor's numbers."""
    if name.endswith(".weight_scale_inv"):
        return std / CODE_8, 0.0
    if name.endswith(".weight_global_scale"):
        return CODE_4 / std, 0.0  # it divides
    if dtype is torch.float8_e4m3fn:
        return (1.0, 0.0) if name.endswith(".weight_scale") else (0.0, CODE_8)
    return (1.0 if name.endswith("norm.weight") else 0.0), std


def generated(
    expected: Mapping[str, Tensor], std: float = 0.02, device: torch.device | str = "cpu"
) -> Iterator[StoredTensor]:
    """Yield random weights of the given shapes and dtypes, made on a device.

    They are normal numbers about 0, for norms about 1, with a standard deviation of `std`. FP8 and NVFP4 weights have
    it once they are written out: codes of 4 bits are any bytes, codes of 8 bits normal, scales all alike. MXFP4's
    scales are about 2^-7, so that its numbers are about as large as `std` is by default.

    Each block of rows is seeded by its tensor's name and its number, so that any tensor, or shard of one, can be made
    alone.
    """
    for name, like in expected.items():
        shape = tuple(like.shape)

        def rows(start: int, stop: int, name: str = name, like: Tensor = like) -> Tensor:
            row, count = like.shape[1:], like.shape[0] if like.dim() else 1
            size = max(1, BLOCK // max(1, math.prod(row)))
            out = torch.empty(stop - start, *row, dtype=like.dtype, device=device)
            least, most = (119, 122) if name.endswith("_scales") else (0, 256)
            mean, deviation = spread(name, like.dtype, std)
            for first in range(start // size * size, stop, size):
                digest = hashlib.sha256(f"{name} {first // size}".encode()).digest()
                generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
                made: Any = {"generator": generator, "device": device}
                shape = (min(size, count - first), *row)
                if like.dtype is torch.uint8:
                    block = torch.randint(least, most, shape, dtype=like.dtype, **made)
                else:
                    block = torch.randn(shape, **made) * deviation + mean
                low, high = max(start, first), min(stop, first + len(block))
                out[low - start : high - start] = block[low - first : high - first]
            return out if like.dim() else out[0]

        yield StoredTensor(name, shape, like.dtype, "generated weights", rows)
