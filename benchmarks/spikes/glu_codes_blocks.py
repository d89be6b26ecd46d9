"""Spike: how many columns at a time, and warps, the gated activation's kernels with codes should take.

    python -m benchmarks.spikes.glu_codes_blocks --out result.json

Each choice makes the same codes; its milliseconds are beside those of today's kernel and a pass of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.precision import TOKENS, median_ms
from pronghorn.device import device_name, versions
from pronghorn.kernels import glu
from pronghorn.kernels.quantise import RowCodes, quantise_rows

WIDTHS = (8192, 14336, 17408)
CHOICES = ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16))


def measure(width: int) -> dict[str, dict[str, float | bool]]:
    """Time forward and backward of one width by every choice."""
    gate_up = torch.randn(TOKENS, 2 * width, device="cuda", dtype=torch.bfloat16)
    da = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16)
    columns = torch.rand(2 * width, device="cuda").bfloat16() + 0.5
    made, made_back = RowCodes.like(da), RowCodes.like(gate_up)

    def apart_forward() -> RowCodes:
        return quantise_rows(glu.forward(gate_up, "silu"))

    def apart_backward() -> RowCodes:
        return quantise_rows(glu.backward_(da, gate_up, "silu"), columns)

    # da is overwritten: what is timed reads other numbers each time, and moves the same bytes
    found: dict[str, dict[str, float | bool]] = {
        "apart": {"forward_ms": median_ms(apart_forward), "backward_ms": median_ms(apart_backward)}
    }
    for block, warps in CHOICES:
        glu.CODES_BLOCK, glu.CODES_WARPS = block, warps
        a = glu.forward(gate_up, "silu", made)
        right = equal(made, quantise_rows(a))
        d_gate_up = glu.backward_(da.clone(), gate_up, "silu", False, made_back, columns)
        right &= equal(made_back, quantise_rows(d_gate_up, columns))
        found[f"{block} columns, {warps} warps"] = {
            "forward_ms": median_ms(lambda: glu.forward(gate_up, "silu", made)),
            "backward_ms": median_ms(lambda: glu.backward_(da, gate_up, "silu", False, made_back, columns)),
            "right": right,
        }
    return found


def equal(a: RowCodes, b: RowCodes) -> bool:
    """Tell whether two matrices' codes are the same, bit for bit."""
    return torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scales, b.scales)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = {"tokens": TOKENS, "device": device_name(), "versions": versions()}
    result |= {str(width): measure(width) for width in WIDTHS}
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
