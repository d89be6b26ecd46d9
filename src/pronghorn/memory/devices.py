"""Tell what a GPU is able to do: its datasheet's figures times the fractions of them that were measured on one H200."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pronghorn.errors import ConfigError
from pronghorn.memory.cards import CARDS, MEASURED, OLDEST, amount_in, find_card, has_display, like, too_old
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
    """Whether it has products of 8-bit floats; true where the card isn't known."""
    bf16: bool = True
    """Whether it computes in bfloat16 and, as these cards do, in 8-bit integers; true where the card isn't known."""
    display_bytes: int = 0
    """What plans leave to a screen."""
    link: float = 0.0
    """Bytes a second, each way, that a collective between GPUs of one host reaches; 0 where it isn't known."""
    link_source: str = "unknown"


LINK = 0.75
"""Of a link's datasheet, what collectives are counted with: assumed, not measured."""
PRODUCTS, COPIES, PCIE = 0.79, 0.89, 0.87
"""Measured on a H200, of the datasheet: 779 of 989 TFLOP/s, 4.28 of 4.8 TB/s, 55.5 of 64 GB/s."""

DISPLAY_BYTES = GIB // 2
"""What a desktop takes of a card that a screen hangs on, left out of plans for cards that are named."""


def device_spec(name: str, memory_bytes: int | None = None) -> DeviceSpec:
    """Look up a GPU by its name as people write it, its memory ("24GiB"), or its driver's words ("NVIDIA H200", bytes).

    One that isn't in the table gets the rates of a common card of its size; `source` says so.

    Raises:
        ConfigError: neither a known name nor an amount of memory; names like it are listed.
    """
    asked, by_driver = name, memory_bytes is not None
    known = find_card(name, memory_bytes)
    several = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(.+)|(.+?)\s*[x×*]\s*(\d+)\s*", name)
    if known is None and several and (one := find_card(several[2] or several[3])) is not None:
        count = several[1] or several[4]
        raise ConfigError(
            f"device {name!r} is several", f"name one: --device {one}; pronghorn plan takes --gpus {count}, too"
        )
    if known is None and (old := too_old(name)) is not None:
        raise ConfigError(
            f"device {name!r}: {old} is older than Volta, and kernels need a compute capability of {OLDEST} or more",
            "take a newer one; Kaggle has two T4 beside its P100: --device t4 --gpus 2",
        )
    if known is None and not by_driver and re.match(r"\d(?!\d{3})", name):
        memory_bytes = parse_bytes(name, "--device")
    if known is None and memory_bytes is None:
        if re.fullmatch(r"(cuda|gpu|auto|cpu|nvidia)[:\d]*", name.lower()):
            raise ConfigError(f"device {name!r} names no card", "leave --device out for this machine's own")
        near = like(name) or ["rtx4090", "rtx4060 laptop", "t4", "a100-80", "h100"]
        raise ConfigError(
            f"device {name!r} is unknown", f"use a name like {', '.join(near)}, or its memory, like 24GiB"
        )
    common = "rtx4090" if (memory_bytes or 0) <= 48 * GIB else "h100"
    card = CARDS[known or common]
    if known is not None and not by_driver:
        amount = amount_in(name)
        other = amount is not None and abs(amount / card.gb - 1) > 0.1
        memory_bytes = int((amount if other and amount else card.gib) * GIB)
        name = known
    source = "datasheet estimate" + ("" if known in MEASURED else "; this card was not measured")
    if known is None:
        source = f"datasheet estimate, with {common}'s rates"
    rates = card.tflops * 1e12 * PRODUCTS, card.bandwidth * 1e9 * COPIES, card.pcie * 1e9 * PCIE
    display = DISPLAY_BYTES if known is not None and has_display(known) and not by_driver else 0
    on_a_card = re.search(r"pcie|\bnvl\b", asked, re.IGNORECASE)  # boards of these chips without NVLink to all others
    nvlink = 0 if on_a_card or known is None else card.nvlink
    return DeviceSpec(
        name,
        memory_bytes or 0,
        *rates,
        source,
        fp8=known is None or card.fp8,
        bf16=known is None or card.bf16,
        display_bytes=display,
        link=(nvlink or card.pcie) * 1e9 * LINK,
        link_source=f"{LINK:.0%} of the datasheet's {'NVLink' if nvlink else 'PCIe'}",
    )


def parse_bytes(text: str, key: str) -> int:
    """Read the bytes of "16GiB", "16 GB" or "900MiB".

    Raises:
        ConfigError: something else, or less than 1 MiB; `key` is named.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", text.strip(), re.IGNORECASE)
    factors = {"gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    found = int(float(match[1]) * factors[match[2].lower()]) if match else 0
    if found < 2**20:
        raise ConfigError(f"{key} {text!r} is not an amount of memory", "give it like 16GiB, 16GB or 900MiB")
    return found
