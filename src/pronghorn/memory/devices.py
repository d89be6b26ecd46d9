"""What GPUs are able to do: a table of datasheet figures, and rates measured on a device.

Dense bf16 products summed in float32 (consumer cards do these at half their advertised rate), memory and link bandwidth
from NVIDIA's datasheets; memory as torch sees it. Sustained rates are fractions of these, from one H200.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pronghorn.errors import ConfigError
from pronghorn.memory.estimate import GIB


@dataclass(frozen=True)
class Card:
    """A GPU's rates and memory."""

    name: str
    memory_bytes: int
    matmul: float
    """FLOP/s that large bf16 products reach."""
    bandwidth: float
    """Bytes a second that a copy on the device reads and writes."""
    link: float
    """Bytes a second to pinned host memory, each way; 0 where the host shares its memory: no offload."""
    source: str = "datasheet estimate"


PRODUCTS, COPIES, LINK = 0.79, 0.89, 0.87
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


def card(name: str) -> Card:
    """A GPU by its name in the table, or one of so much memory ("24GiB") with the rates of a common card of that size.

    Raises:
        ConfigError: neither; the known names are listed.
    """
    if re.match(r"\d", name):
        memory = parse_bytes(name, "--device")
        like = "rtx4090" if memory <= 32 * GIB else "h100"
        known = card(like)
        return Card(name, memory, known.matmul, known.bandwidth, known.link, f"datasheet estimate, with {like}'s rates")
    row = _TABLE.get(name.lower())
    if row is None:
        raise ConfigError(f"device {name!r} is unknown", f"use one of {', '.join(_TABLE)}, or its memory, like 24GiB")
    gib, tflops, bandwidth, link = row
    rates = tflops * 1e12 * PRODUCTS, bandwidth * 1e9 * COPIES, link * 1e9 * LINK
    return Card(name.lower(), int(gib * GIB), *rates)


def card_of(device_name: str, memory_bytes: int) -> Card:
    """The card of a GPU as its driver names it ("NVIDIA H200"), with the memory that it has.

    One that isn't in the table gets the rates of a common card, for a calibration to scale; `source` says so.
    """
    plain = re.sub(r"[^a-z0-9]", "", device_name.lower())
    for name in _TABLE:
        stem, _, size = name.partition("-")
        if stem in plain and (not size or abs(int(size) * 1e9 / memory_bytes - 1) < 0.2):
            found = card(name)
            return Card(device_name, memory_bytes, found.matmul, found.bandwidth, found.link, found.source)
    like = "rtx4090" if memory_bytes <= 48 * GIB else "h100"
    found = card(like)
    source = f"not in the table: datasheet estimate, with {like}'s rates"
    return Card(device_name, memory_bytes, found.matmul, found.bandwidth, found.link, source)


def parse_bytes(text: str, key: str) -> int:
    """Bytes of "16GiB", "16 GB" or "900MiB".

    Raises:
        ConfigError: something else, or less than 1 MiB; `key` is named.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", text.strip(), re.IGNORECASE)
    factors = {"gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    found = int(float(match[1]) * factors[match[2].lower()]) if match else 0
    if found < 2**20:
        raise ConfigError(f"{key} {text!r} is no amount of memory", "give it like 16GiB, 16GB or 900MiB")
    return found
