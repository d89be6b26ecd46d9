"""GPUs that people have, by their datasheets, and the names that people write for them."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple


class Card(NamedTuple):
    """A GPU's figures. None of them was measured here but the H200's."""

    gb: int
    """As it is sold."""
    gib: float
    """As torch sees it."""
    tflops: float
    """Dense products of 16 bits summed in float32: of bfloat16, or of float16 on a card before Ampere. Consumer cards
    do these at half their advertised rate. Of laptops at the usual power limit."""
    bandwidth: float
    """GB/s of its memory."""
    pcie: float
    """GB/s to the host, each way; 0: it shares the host's memory."""
    capability: float
    """CUDA compute capability."""
    nvlink: float = 0
    """GB/s each way to the other GPUs of a host by NVLink, of boards that always have it (SXM). Others are counted by
    PCIe: a bridge between two cards (A30, A40, A6000, RTX 3090) has to be said by `--link`."""

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16."""
        return self.capability >= 8

    @property
    def fp8(self) -> bool:
        """Whether it has products of 8-bit floats."""
        return self.capability >= 8.9


CARDS = {
    # data centres
    "t4": Card(16, 14.6, 65, 320, 16, 7.5),
    "t4g": Card(16, 14.6, 65, 320, 16, 7.5),
    "v100-16": Card(16, 15.8, 125, 900, 16, 7.0, nvlink=150),
    "v100-32": Card(32, 31.7, 125, 900, 16, 7.0, nvlink=150),
    "l4": Card(24, 22.0, 121, 300, 32, 8.9),
    "l40": Card(48, 44.4, 181, 864, 32, 8.9),
    "l40s": Card(48, 44.4, 362, 864, 32, 8.9),
    "l20": Card(48, 44.5, 119, 864, 32, 8.9),
    "a2": Card(16, 14.7, 18, 200, 16, 8.6),
    "a10": Card(24, 22.0, 125, 600, 32, 8.6),
    "a10g": Card(24, 22.0, 70, 600, 32, 8.6),
    "a30": Card(24, 23.5, 165, 933, 32, 8.0),
    "a40": Card(48, 44.3, 150, 696, 32, 8.6),
    "a100-40": Card(40, 39.4, 312, 1555, 32, 8.0, nvlink=300),
    "a100-80": Card(80, 79.2, 312, 2039, 32, 8.0, nvlink=300),
    "a800-40": Card(40, 39.4, 312, 1555, 32, 8.0, nvlink=200),
    "a800-80": Card(80, 79.2, 312, 2039, 32, 8.0, nvlink=200),
    "h20-96": Card(96, 95.1, 148, 4000, 64, 9.0, nvlink=450),
    "h20-141": Card(141, 139.8, 148, 4800, 64, 9.0, nvlink=450),
    "h800": Card(80, 79.2, 989, 3350, 64, 9.0, nvlink=200),
    "h100": Card(80, 79.2, 989, 3350, 64, 9.0, nvlink=450),
    "gh200": Card(96, 94.5, 989, 4000, 64, 9.0, nvlink=450),
    "h200": Card(141, 139.8, 989, 4800, 64, 9.0, nvlink=450),
    "b200": Card(192, 178.3, 2250, 8000, 64, 10.0, nvlink=900),
    "b300": Card(288, 268.0, 2250, 8000, 64, 10.3, nvlink=900),
    "gb10": Card(128, 119.6, 125, 273, 0, 12.1),
    # workstations
    "a2000-6": Card(6, 5.8, 32, 288, 32, 8.6),
    "a2000-12": Card(12, 11.6, 32, 288, 32, 8.6),
    "a4000": Card(16, 15.6, 77, 448, 32, 8.6),
    "a4500": Card(20, 19.6, 95, 640, 32, 8.6),
    "a5000": Card(24, 23.5, 111, 768, 32, 8.6),
    "a6000": Card(48, 47.4, 155, 768, 32, 8.6),
    "rtx2000ada": Card(16, 15.6, 48, 224, 16, 8.9),
    "rtx4000ada": Card(20, 19.6, 77, 360, 32, 8.9),
    "rtx4500ada": Card(24, 23.5, 158, 432, 32, 8.9),
    "rtx5000ada": Card(32, 31.5, 261, 576, 32, 8.9),
    "rtx6000ada": Card(48, 47.4, 364, 960, 32, 8.9),
    "rtxpro5000": Card(48, 47.3, 258, 1344, 64, 12.0),
    "rtxpro6000": Card(96, 94.9, 503, 1792, 64, 12.0),
    # desktops
    "titanrtx": Card(24, 23.6, 130, 672, 16, 7.5),
    "rtx2060": Card(6, 5.8, 26, 336, 16, 7.5),
    "rtx2070": Card(8, 7.8, 30, 448, 16, 7.5),
    "rtx2070super": Card(8, 7.8, 36, 448, 16, 7.5),
    "rtx2080": Card(8, 7.8, 40, 448, 16, 7.5),
    "rtx2080super": Card(8, 7.8, 45, 496, 16, 7.5),
    "rtx2080ti": Card(11, 10.7, 54, 616, 16, 7.5),
    "rtx3050": Card(8, 7.8, 18, 224, 16, 8.6),
    "rtx3060": Card(12, 11.6, 26, 360, 32, 8.6),
    "rtx3060ti": Card(8, 7.7, 32, 448, 32, 8.6),
    "rtx3070": Card(8, 7.7, 41, 448, 32, 8.6),
    "rtx3070ti": Card(8, 7.7, 43, 608, 32, 8.6),
    "rtx3080-10": Card(10, 9.7, 60, 760, 32, 8.6),
    "rtx3080-12": Card(12, 11.6, 61, 912, 32, 8.6),
    "rtx3080ti": Card(12, 11.6, 68, 912, 32, 8.6),
    "rtx3090": Card(24, 23.6, 71, 936, 32, 8.6),
    "rtx3090ti": Card(24, 23.6, 80, 1008, 32, 8.6),
    "rtx4060": Card(8, 7.6, 30, 272, 16, 8.9),
    "rtx4060ti-8": Card(8, 7.6, 44, 288, 16, 8.9),
    "rtx4060ti-16": Card(16, 15.6, 44, 288, 16, 8.9),
    "rtx4070": Card(12, 11.6, 58, 504, 32, 8.9),
    "rtx4070super": Card(12, 11.6, 71, 504, 32, 8.9),
    "rtx4070ti": Card(12, 11.6, 80, 504, 32, 8.9),
    "rtx4070tisuper": Card(16, 15.6, 88, 672, 32, 8.9),
    "rtx4080": Card(16, 15.6, 97, 717, 32, 8.9),
    "rtx4080super": Card(16, 15.6, 104, 736, 32, 8.9),
    "rtx4090": Card(24, 23.5, 165, 1008, 32, 8.9),
    "rtx5060": Card(8, 7.6, 38, 448, 32, 12.0),
    "rtx5060ti-8": Card(8, 7.6, 47, 448, 32, 12.0),
    "rtx5060ti-16": Card(16, 15.5, 47, 448, 32, 12.0),
    "rtx5070": Card(12, 11.5, 62, 672, 64, 12.0),
    "rtx5070ti": Card(16, 15.5, 88, 896, 64, 12.0),
    "rtx5080": Card(16, 15.5, 113, 960, 64, 12.0),
    "rtx5090": Card(32, 31.3, 210, 1792, 64, 12.0),
    # laptops
    "rtx2060laptop": Card(6, 5.8, 18, 264, 16, 7.5),
    "rtx2070laptop": Card(8, 7.8, 27, 448, 16, 7.5),
    "rtx2080laptop": Card(8, 7.8, 37, 448, 16, 7.5),
    "rtx3050laptop": Card(4, 3.8, 14, 192, 16, 8.6),
    "rtx3060laptop": Card(6, 5.8, 22, 336, 32, 8.6),
    "rtx3070laptop": Card(8, 7.7, 32, 448, 32, 8.6),
    "rtx3080laptop-8": Card(8, 7.7, 38, 448, 32, 8.6),
    "rtx3080laptop-16": Card(16, 15.6, 38, 448, 32, 8.6),
    "rtx3080tilaptop": Card(16, 15.6, 47, 512, 32, 8.6),
    "rtx4050laptop": Card(6, 5.7, 18, 192, 16, 8.9),
    "rtx4060laptop": Card(8, 7.6, 23, 256, 16, 8.9),
    "rtx4070laptop": Card(8, 7.6, 31, 256, 16, 8.9),
    "rtx4080laptop": Card(12, 11.6, 49, 432, 32, 8.9),
    "rtx4090laptop": Card(16, 15.6, 66, 576, 32, 8.9),
    "rtx5060laptop": Card(8, 7.6, 27, 384, 16, 12.0),
    "rtx5070laptop": Card(8, 7.6, 35, 384, 16, 12.0),
    "rtx5070tilaptop": Card(12, 11.5, 46, 672, 32, 12.0),
    "rtx5080laptop": Card(16, 15.5, 56, 896, 32, 12.0),
    "rtx5090laptop": Card(24, 23.5, 63, 896, 32, 12.0),
}
"""Of a card that is sold with different memories each is an entry, the amount behind a dash."""
MEASURED = ("h100", "h200")
OLDEST = 7.0
"""The least compute capability that Triton compiles kernels for."""
_TOO_OLD = re.compile(
    r"(?:nvidia|tesla|quadro|geforce|[\s-])*"
    r"((?:p100|p40|p4|p6|m40|m60|m4|k80|k40|gtx[\s-]*(?:7|9|10)\d\d(?:[\s-]*ti)?|titan[\s-]*xp?|p[1-6]000)\b)"
)
"""Names of cards before Volta."""
_NOISE = (
    r"nvidia|geforce|quadro|tesla|blackwell|graphics|generation|gpu|card|edition|server|workstation|with|design"
    r"|sxm\d?|pcie|hbm\d?e?|nvl"
)
_LAPTOP = r"laptop|mobile|notebook|max-?q"


def find_card(text: str, memory_bytes: int | None = None) -> str | None:
    """Return the name in CARDS of what people or the driver call a GPU, None for one that isn't there.

    An amount in the text ("a100 80gb"), or the memory there is, chooses among cards of one name; otherwise the smallest
    is meant.
    """
    lower = text.lower()
    amount = re.search(r"(?<![\da-z])(\d+)\s*gi?b?\b", lower)
    laptop = re.search(_LAPTOP, lower) is not None
    if amount:
        lower = lower.replace(amount[0], " ")
    stem = re.sub(r"[^a-z0-9]", "", re.sub(f"{_LAPTOP}|{_NOISE}", "", lower)) + ("laptop" if laptop else "")
    dashed = re.sub(r"[\s_]", "", text.lower())
    if dashed in CARDS:
        return dashed
    stem = stem.removeprefix("rtx") if re.match(r"rtxa\d", stem) else stem
    stem = f"rtx{stem}" if re.match(r"\d{4}", stem) else stem
    named = [name for name in CARDS if name.partition("-")[0] in (stem, stem.replace("tis", "tisuper"))]
    named = named or [name for name in CARDS if name.replace("-", "") == stem]
    named = named or [name for name in CARDS if f"{name}laptop" == stem and name.startswith("rtxpro")]  # Max-Q boards
    if not named:
        return None
    wanted = memory_bytes / 2**30 if memory_bytes else float(amount[1]) if amount else 0.0
    return min(named, key=lambda name: abs(CARDS[name].gb - wanted) if wanted else CARDS[name].gb)


def too_old(text: str) -> str | None:
    """Return the name of a card before Volta, which no kernel is compiled for, None of another."""
    found = _TOO_OLD.match(text.lower())
    return found[1] if found else None


def amount_in(text: str) -> int | None:
    """Return the gigabytes that a card's name says, None where it says none."""
    amount = re.search(r"(?<![\da-z])(\d+)\s*gi?b\b", text.lower())
    return int(amount[1]) if amount else None


def has_display(name: str) -> bool:
    """Tell whether a card is one that a screen hangs on."""
    return name.startswith("rtx") or name in ("a4000", "a4500", "a5000", "a6000", "titanrtx", "a2000-6", "a2000-12")


def like(text: str) -> list[str]:
    """Return names that a misspelt one may mean."""
    return difflib.get_close_matches(re.sub(r"[^a-z0-9-]", "", text.lower()), CARDS, n=3, cutoff=0.6)
