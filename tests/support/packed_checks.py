"""The kernels of weights that are stored in few bits, against their references to the bit, into poisoned memory.

tests/kernels/test_packed_kernels.py calls it with a CUDA device, and runs this file for the CPU under Triton's
interpreter:

    TRITON_INTERPRET=1 python tests/support/packed_checks.py
"""

from __future__ import annotations

import torch

from pronghorn.kernels import fp8_blocks, nvfp4
from support.interpreted import begin

E4M3 = torch.arange(256, dtype=torch.uint8)
"""All codes."""


def check_nvfp4(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for n, k in ((1, 16), (63, 48), (130, 1008)):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
        scales = E4M3.repeat(-(-n * k // 16 // 256))[: n * k // 16].view(n, k // 16).view(torch.float8_e4m3fn)
        for divides, scale in ((False, 3.1e-4), (True, 2713.0)):
            given = [each.to(device) for each in (codes, scales, torch.tensor([scale]))]
            out, right = torch.empty(2, n, k, dtype=dtype, device=device)
            nvfp4.write_out_triton(*given, out, divides)
            nvfp4.write_out_reference(*given, right, divides)
            assert right.isnan().float().mean() < 0.1
            assert torch.equal(out.nan_to_num(9.0), right.nan_to_num(9.0))


def check_fp8_blocks(device: str, dtype: torch.dtype) -> None:
    for n, k in ((1, 16), (63, 48), (300, 1008)):
        codes = E4M3.repeat(-(-n * k // 256))[: n * k].view(n, k).view(torch.float8_e4m3fn)
        for rows, columns in ((128, 128), (1, k), (n, k), (40, 16)):
            scales = torch.rand(-(-n // rows), -(-k // columns), generator=torch.Generator().manual_seed(n)) / 100
            given = [codes.to(device), scales.to(device)]
            out, right = torch.empty(2, n, k, dtype=dtype, device=device)
            fp8_blocks.write_out_triton(*given, out, rows, columns)
            fp8_blocks.write_out_reference(*given, right, rows, columns)
            assert torch.equal(out.nan_to_num(9.0), right.nan_to_num(9.0))
            assert right.isnan().float().mean() < 0.1


CHECKS = {"nvfp4": check_nvfp4, "fp8_blocks": check_fp8_blocks}

if __name__ == "__main__":
    begin()
    for name, check in CHECKS.items():
        check("cpu", torch.float32)
        print(name, "ok", flush=True)
