"""Experts' weights in NF4, in bitsandbytes' storage: blocks of 64 over a whole tensor, statistics nested or not.

What bitsandbytes makes of the tensor [E, R, C] as one row of numbers is stored, so that blocks and statistics are the
same to the bit. A few experts at a time are written out by `kernels.nf4` and multiplied, as those in MXFP4 are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import UnsupportedError
from pronghorn.kernels.nf4 import NF4Weight, write_out
from pronghorn.kernels.packed import PackedExperts

BLOCK, OUTER = 64, 256
"""Numbers that share a statistic, and statistics that share an outer one."""


class NF4Tensor(PackedExperts):
    """W [E, K, N]. Its parts: codes uint8 [E·K·N/2], table [16], absmax; if nested also levels, outer and offset.

    Facts: whether it is stored as [E, N, K].
    """

    @property
    def together(self) -> int:
        blocks = self.shape[1] * self.shape[2] // BLOCK
        return 1 if len(self.parts) == 3 else OUTER // math.gcd(blocks, OUTER)

    def turned(self) -> NF4Tensor:
        """Return Wᵀ of each expert, of the same parts."""
        experts, k, n = self.shape
        return NF4Tensor(self.parts, (experts, n, k), self.dtype, not self.facts[0])

    def experts(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        _, k, n = self.shape
        codes, table, absmax, *nested = self.parts
        blocks = k * n // BLOCK
        shape, stored = ((last - first) * k * n // BLOCK, BLOCK), (n, k) if self.facts[0] else (k, n)
        more: tuple[Any, ...] = ()
        if nested:
            levels, outer, offset = nested
            more = levels, outer[first * blocks // OUTER :], OUTER, offset
        packed = codes[first * k * n // 2 : last * k * n // 2]
        weight = NF4Weight(packed, table, absmax[first * blocks : last * blocks], shape, BLOCK, *more)
        # rounded once to the dtype that bitsandbytes writes out in, as a linear's weight is
        dense = torch.empty(shape, dtype=self.dtype, device=codes.device)
        write_out(weight, dense)
        dense = dense.view(-1, *stored).to(dtype)
        return dense.mT if self.facts[0] else dense


def check_experts(name: str, shape: torch.Size) -> None:
    """Refuse experts whose numbers aren't whole blocks.

    Raises:
        UnsupportedError: naming the weight.
    """
    if math.prod(shape[1:]) % BLOCK:
        raise UnsupportedError(
            f"{name} has {math.prod(shape[1:])} numbers an expert, and NF4 stores blocks of {BLOCK}",
            "leave load_in_4bit out",
        )


def quantise_experts(dense: Tensor, nested: bool) -> NF4Tensor:
    """Quantise experts' weights [E, R, C] with bitsandbytes."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(dense.contiguous(), blocksize=BLOCK, compress_statistics=nested, quant_type="nf4")
    parts = [codes.view(torch.uint8).flatten(), state.code, state.absmax]
    if nested:
        parts += [state.state2.code, state.state2.absmax, state.offset.reshape(1)]
    return NF4Tensor(parts, dense.shape, dense.dtype, False)
