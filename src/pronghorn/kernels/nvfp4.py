"""Linears' weights in NVFP4: 4 bits a number (e2m1), one scale of 8 bits (e4m3) for 16, and one of 32 for all.

    w = code · (s · g)        as ModelOpt publishes        two numbers a byte, the lower 4 bits first
    w = code · (s / g)        as compressed-tensors does

The factor in brackets is rounded to float32 first, then the product, then to the dtype that is asked for. Products of
Blackwell's tensor cores in 4 bits are not built: weights are written out, on any GPU.

Source: NVIDIA Model Optimizer's `NVFP4QTensor`, compressed-tensors' `NVFP4PackedCompressor`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, cdiv, launch, tl, triton
from pronghorn.kernels.packed import PackedTensor
from pronghorn.kernels.small_floats import decode_e2m1, decode_e4m3, unpack_e2m1

GROUP = 16
"""Numbers that share a scale."""
BYTES = 4096
"""That a program writes out."""


class NVFP4Tensor(PackedTensor):
    """W [N, K]. Its parts: codes uint8 [N, K/2], scales e4m3 [N, K/16], g float32 [1]; its fact: g divides."""

    def write_out(self, out: Tensor) -> None:
        codes, scales, scale = self.parts
        write_out(codes, scales, scale, out, divides=self.facts[0])


def write_out_reference(codes: Tensor, scales: Tensor, scale: Tensor, out: Tensor, divides: bool) -> None:
    """Write W into `out` [N, K], contiguous, in its dtype.

    Args:
        codes: uint8 [N, K/2]; scales: e4m3 [N, K/16]; scale: g, float32 [1], or its inverse if `divides`.
    """
    factors = scales.float() / scale if divides else scales.float() * scale
    numbers = unpack_e2m1(codes).view(*scales.shape, GROUP)
    out.copy_((numbers * factors[..., None]).view(out.shape))


@triton.jit
def _write_out(
    codes_ptr,  # uint8 [N, K / 2]
    scales_ptr,  # [N, K / 16], bytes
    scale_ptr,  # float32 [1]
    out_ptr,  # [N, K]
    count,  # N · K / 2
    DIVIDES: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the numbers of BYTES bytes."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    packed = tl.load(codes_ptr + at, mask=at < count, other=0)
    factor = decode_e4m3(tl.load(scales_ptr + at * 2 // GROUP, mask=at < count, other=0))
    factor = tl.div_rn(factor, tl.load(scale_ptr)) if DIVIDES else factor * tl.load(scale_ptr)
    numbers = tl.interleave(decode_e2m1(packed & 15) * factor, decode_e2m1(packed >> 4) * factor)
    to = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + to, numbers.to(out_ptr.dtype.element_ty), mask=to // 2 < count)


def write_out_triton(codes: Tensor, scales: Tensor, scale: Tensor, out: Tensor, divides: bool) -> None:
    """Do what `write_out` does, by its Triton kernel."""
    launch(
        _write_out, (cdiv(codes.numel(), BYTES),), codes, scales.view(torch.uint8), scale, out, codes.numel(),
        DIVIDES=divides, BYTES=BYTES, GROUP=GROUP, num_warps=8,
    )  # fmt: skip


write_out = by_device(write_out_reference, write_out_triton, at=3)
