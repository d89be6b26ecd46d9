"""List what GPUs are able to do: datasheet figures, and the fractions of them that were measured on one H200.

Dense bf16 products summed in float32 (consumer cards do these at half their advertised rate), memory and link bandwidth
from NVIDIA's datasheets; memory as torch sees it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pronghorn.errors import ConfigError
from pronghorn.memory.estimate import GIB


@dataclass(frozen=True)
class DeviceSpec:
    """Hold a GPU's rates and memory."""

    name: str
    memory_bytes: int
    matmul: float
    """FLOP/s that large bf16 products reach."""
    bandwidth: float
    """Bytes a second that a copy on the device reads and writes."""
    pcie: float
    """Bytes a second to pinned host memory, each way; 0 where the host shares its memory: no offload."""
    source: str
    fp8: bool = True
    """Whether it has 8-bit products; true where the card isn't known."""


PRODUCTS, COPIES, PCIE = 0.79, 0.89, 0.87
"""Measured on a H200, of the datasheet: 779 of 989 TFLOP/s, 4.28 of 4.8 TB/s, 55.5 of 64 GB/s."""

_TABLE: dict[str, tuple[float, float, float, float]] = {
    "rtx3090": (23.6, 71, 936, 32),
    "rtx4090": (23.5, 165, 1008, 32),
    "rtx5090": (31.3, 210, 1792, 64),
    "l40s": (44.4, 362, 864, 32),
    "a100-40": (39.4, 312, 1555, 32),
    "a100-80": (79.2, 312, 2039, 32),
    "h100": (79.2, 989, 3350, 64),
    "h200": (139.8, 989, 4800, 64),
    "b200": (178.3, 2250, 8000, 64),
    "gb10": (119.6, 125, 273, 0),
}
"""Name: GiB, TFLOP/s, GB/s, GB/s of PCIe (0: unified memory)."""
_WITHOUT_FP8 = ("rtx3090", "a100-40", "a100-80")
"""Those before Ada."""


def device_spec(name: str, memory_bytes: int | None = None) -> DeviceSpec:
    """Look up a GPU by its name in the table, its memory ("24GiB"), or its driver's words ("NVIDIA H200", bytes).

    One that isn't in the table gets the rates of a common card of its size; `source` says so.

    Raises:
        ConfigError: neither a known name nor an amount of memory; the known names are listed.
    """
    plain = re.sub(r"nvidia|geforce|[\s_]", "", name.lower())
    known = plain if plain in _TABLE else None
    if memory_bytes is not None:
        known = _as_driver_tells(name, memory_bytes)
    elif known is None and re.match(r"\d", name):
        memory_bytes = parse_bytes(name, "--device")
    if known is None and memory_bytes is None:
        raise ConfigError(f"device {name!r} is unknown", f"use one of {', '.join(_TABLE)}, or its memory, like 24GiB")
    like = known or ("rtx4090" if (memory_bytes or 0) <= 48 * GIB else "h100")
    gib, tflops, bandwidth, pcie = _TABLE[like]
    source = "datasheet estimate" if known else f"datasheet estimate, with {like}'s rates"
    rates = tflops * 1e12 * PRODUCTS, bandwidth * 1e9 * COPIES, pcie * 1e9 * PCIE
    return DeviceSpec(name, memory_bytes or int(gib * GIB), *rates, source, known not in _WITHOUT_FP8)


def _as_driver_tells(name: str, memory_bytes: int) -> str | None:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for known in _TABLE:
        stem, _, gigabytes = known.partition("-")
        if stem in plain and (not gigabytes or abs(int(gigabytes) * 1e9 / memory_bytes - 1) < 0.2):
            return known
    return None


def parse_bytes(text: str, key: str) -> int:
    """Read the bytes of "16GiB", "16 GB" or "900MiB".

    Raises:
        ConfigError: something else, or less than 1 MiB; `key` is named.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", text.strip(), re.IGNORECASE)
    factors = {"gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    found = int(float(match[1]) * factors[match[2].lower()]) if match else 0
    if found < 2**20:
        raise ConfigError(f"{key} {text!r} is no amount of memory", "give it like 16GiB, 16GB or 900MiB")
    return found
