"""Turn rows by additions in registers instead of a product, for `pronghorn.kernels.int8`: nearer to a copy's rate?

    python benchmarks/spikes/turned_rows.py

Hadamard's 64 is 8 by 8: three additions of pairs among a thread's 8 neighbours, then, after an exchange with 8 threads,
three more. A group's elements come out transposed, which both operands of a product may be. All is in float32, factors
in bfloat16; the codes are rounded by an addition. Compiled for sm_90 by Triton 3.7 it is some 900 instructions for 32
elements of a thread, a fourth of them those additions. Not run on a GPU yet: the kernel by a product takes .0738, .123,
.2388 and .5505 ms there (one H100, 8,192 rows of 4,096 to 28,672), a copy of as many bytes .0436, .0575, .1233, .2403.
"""

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pair(x, ROWS: tl.constexpr):
    a, b = tl.split(x)
    return tl.join(a + b, a - b)


@triton.jit
def _fwht8(x, ROWS: tl.constexpr):
    # x [ROWS, 8] -> Hadamard along the last axis
    x = tl.reshape(x, (ROWS, 2, 2, 2))
    x = _pair(x, ROWS)
    x = _pair(tl.permute(x, (0, 3, 1, 2)), ROWS)
    x = _pair(tl.permute(x, (0, 3, 1, 2)), ROWS)
    x = tl.permute(x, (0, 3, 1, 2))
    return tl.reshape(x, (ROWS, 8))


@triton.jit
def turned(x_ptr, factors_ptr, codes_ptr, scales_ptr, x_stride, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    x *= tl.load(factors_ptr + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    G: tl.constexpr = BLOCK // 64
    x = _fwht8(tl.reshape(x, (G * 8, 8)), G * 8)
    x = tl.permute(tl.reshape(x, (G, 8, 8)), (0, 2, 1))
    x = _fwht8(tl.reshape(x, (G * 8, 8)), G * 8)
    x = tl.reshape(x, (BLOCK,))
    most = tl.reduce(tl.abs(x), 0, _larger)
    scale = tl.maximum(most * (0.125 / 127.0), 1e-30, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scales_ptr + row, scale)
    codes = (x * tl.div_rn(0.125, scale) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(codes_ptr + row * K + cols, codes, mask=inside)


def check(device: str) -> None:
    """Compare with float32's product with H, in the order that the kernel gives."""
    from pronghorn.kernels.int8 import hadamard

    for rows, width in ((1, 64), (3, 4096), (2, 6144)):
        x = torch.randn(rows, width, device=device).to(torch.float16 if device == "cpu" else torch.bfloat16)
        factors = (torch.rand(width, device=device) + 0.1).to(x.dtype)
        turned_rows = ((x.float() * factors.float()).reshape(rows, -1, 64) @ hadamard(x.device)).reshape(rows, -1, 8, 8)
        want = turned_rows.mT.reshape(rows, width)
        scales = want.abs().amax(1, keepdim=True) / 127
        codes, found = run(x, factors, 4)
        torch.testing.assert_close(found, scales, rtol=1e-5, atol=0)
        off = (codes.float() - want / scales).abs().max()
        assert off < 0.51, off


def run(x: torch.Tensor, factors: torch.Tensor, warps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales."""
    codes, scales = torch.empty_like(x, dtype=torch.int8), torch.empty(len(x), 1, device=x.device)
    block = max(triton.next_power_of_2(x.shape[1]), 64)
    turned[(len(x),)](x, factors, codes, scales, x.stride(0), x.shape[1], BLOCK=block, num_warps=warps)
    return codes, scales


def main() -> None:
    """Check, and time each width by warps."""
    check("cuda")
    for width in (4096, 6144, 14336, 28672):
        x, factors = torch.randn(8192, width, device="cuda").bfloat16(), torch.ones(width, device="cuda").bfloat16()
        for warps in (4, 8, 16, 32):
            times = []
            for _ in range(15):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run(x, factors, warps)
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end))
            print(width, warps, f"{statistics.median(times):.4f} ms", flush=True)


if __name__ == "__main__":
    main()
