"""Kernels of products in 8-bit integers against plain torch, in poisoned memory.

tests/kernels/test_int8_kernels.py calls it with a CUDA device, and runs this file for the CPU under Triton's
interpreter.

    TRITON_INTERPRET=1 python tests/support/int8_checks.py float16
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from pronghorn.kernels import nf4_int8
from pronghorn.kernels.int8 import (
    int8_product_reference,
    int8_product_triton,
    quantise_rotated_reference,
    quantise_rotated_triton,
)
from pronghorn.kernels.launch import uses_tma
from pronghorn.kernels.nf4 import NF4Weight, write_out_reference
from support.interpreted import begin


def check_codes(device: str, dtype: torch.dtype) -> None:
    """Codes are the reference's but where float32's sums are halfway between two, and there off by one."""
    for rows, width in ((1, 64), (7, 192), (5, 1024), (3, 4096), (2, 4160), (300, 9280)):
        wide = torch.randn(rows, width + 64, device=device).to(dtype)
        x, factors = wide[:, 64:], torch.rand(width, device=device) + 0.01
        x[0, 3] = 200.0  # an outlier
        if rows > 1:
            x[1] = 0.0
        made, want = quantise_rotated_triton(x, factors), quantise_rotated_reference(x, factors)
        assert made.codes.dtype is torch.int8 and made.codes.abs().max() <= 127
        torch.testing.assert_close(made.scales, want.scales, rtol=1e-6, atol=1e-32)
        off = (made.codes.int() - want.codes.int()).abs()
        assert off.max() <= 1 and off.float().mean() < 1e-3, f"codes {rows} x {width}: {off.float().mean()}"
        for bad in (float("nan"), float("inf")):
            x[-1, width // 2] = bad
            assert not quantise_rotated_triton(x, factors).scales[-1].isfinite(), f"scales of {bad}"


def check_product(device: str, dtype: torch.dtype) -> None:
    """Sums are exact: the result is the reference's, rounded once more at most."""
    for m, n, k in ((1, 64, 64), (130, 64, 192), (65, 320, 128)):
        a = torch.randint(-127, 128, (m, k), device=device, dtype=torch.int8)
        b = torch.randint(-127, 128, (n, k), device=device, dtype=torch.int8)
        sa, sb = torch.rand(m, 1, device=device) / 2000, torch.rand(n, device=device) / 2000
        want = int8_product_reference(a, sa, b, sb, dtype)
        for tma in (False, True) if device == "cpu" or uses_tma(a.device) else (False,):
            found = int8_product_triton(a, sa, b, sb, dtype, tma)
            torch.testing.assert_close(found, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def check_written(device: str, dtype: torch.dtype) -> None:
    """Codes written out of 4 bits are those of the weight as it is written out, in both layouts, beside others."""
    for n, k, block, nested in ((64, 64, 64, False), (128, 192, 64, True), (192, 320, 128, True)):
        weight = NF4Weight(*nf4_of(n, k, block, nested, device))
        assert nf4_int8.fits(weight)
        dense = torch.empty(n, k, device=device)
        write_out_reference(weight, dense)
        for across in (False, True):
            rows = dense.t().contiguous() if across else dense
            inverse = 1 / (torch.rand(rows.shape[1], device=device) + 0.1)
            want = quantise_rotated_reference((rows * inverse).to(dtype), torch.ones_like(inverse))
            wide = torch.full((len(rows), rows.shape[1] + 64), 99, dtype=torch.int8, device=device)
            given = weight, inverse, 1 / want.scales.flatten(), wide[:, 64:], dtype, across
            for write in (nf4_int8.write_rotated_triton, nf4_int8.write_rotated_reference):
                write(*given)
                off = (wide[:, 64:].int() - want.codes.int()).abs()
                assert off.max() <= 1 and off.float().mean() < 1e-3, f"{n} x {k}, across {across}: {off.float().mean()}"
                assert (wide[:, :64] == 99).all()
                wide[:, 64:] = 77


def nf4_of(n: int, k: int, block: int, nested: bool, device: str) -> tuple[Any, ...]:
    """Make the parts of a random 4-bit weight."""
    packed = torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8, device=device)
    table, count = torch.linspace(-1, 1, 16, device=device), n * k // block
    if not nested:
        return packed, table, torch.rand(count, device=device) + 0.5, (n, k), block
    absmax = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    levels, outer = torch.linspace(-1, 1, 256, device=device), torch.rand(count // 256 + 1, device=device)
    return packed, table, absmax, (n, k), block, levels, outer, 256, torch.tensor(0.9, device=device)


CHECKS = {"codes": check_codes, "product": check_product, "written": check_written}

if __name__ == "__main__":
    begin()
    torch.manual_seed(0)
    for name, check in CHECKS.items():
        check("cpu", getattr(torch, sys.argv[1]))
        print(name, "ok", flush=True)
