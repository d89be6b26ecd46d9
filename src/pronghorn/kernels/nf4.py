"""Write 4-bit weights out (NF4: Dettmers et al. 2023, arXiv:2305.14314), in bitsandbytes' storage and to its bits.

    w_i = table[code_i] · a_(i / 64)        a_b = levels[code_b] · a'_(b / 256) + offset, where statistics are nested

Two codes a byte, the first one in the high half. As 8 bits for a product in FP8 (`kernels.quantise`):

    s_n = max_b |a_nb| / 448        codes_nk = e4m3(table[code_nk] · (a_nb · (1 / s_n)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.quantise import DTYPE, weight_scales


@dataclass(frozen=True, eq=False)
class NF4Weight:
    """One 4-bit weight W [N, K] as bitsandbytes stores it."""

    packed: Tensor
    """uint8 [N·K/2], two codes a byte."""
    table: Tensor
    """float32 [16]."""
    absmax: Tensor
    """a, float32 [N·K/64]; or its codes, uint8, if statistics are nested."""
    shape: tuple[int, int]
    block: int
    levels: Tensor | None = None
    """float32 [256], of nested statistics."""
    outer: Tensor | None = None
    """a', float32 [blocks/256]."""
    outer_block: int = 256
    offset: Tensor | None = None
    """float32, one number."""

    @classmethod
    def of(cls, parameter: Any) -> NF4Weight:
        """Read a `Params4bit`."""
        state = parameter.quant_state
        packed = parameter.data.view(torch.uint8).reshape(-1)
        shape = (state.shape[0], state.shape[1])
        if not state.nested:
            return cls(packed, state.code, state.absmax, shape, state.blocksize)
        inner = state.state2
        outer = (inner.code, inner.absmax, inner.blocksize, state.offset)
        return cls(packed, state.code, state.absmax, shape, state.blocksize, *outer)

    def statistics(self) -> Tensor:
        """Return a, float32 [N·K/64]."""
        if self.levels is None or self.outer is None or self.offset is None:
            return self.absmax
        outer = self.outer.repeat_interleave(self.outer_block)[: len(self.absmax)]
        return self.levels[self.absmax.int()] * outer + self.offset

    @property
    def rows_are_blocks(self) -> bool:
        """Whether no block of values crosses a row."""
        return self.shape[1] % self.block == 0

    def row_scales(self) -> Tensor:
        """Return s, float32 [N]; of rows that no block crosses."""
        most = self.statistics().abs().view(self.shape[0], -1).amax(1)
        return weight_scales(most * self.table.abs().max())


def write_out(weight: NF4Weight, out: Tensor) -> None:
    """Write W into `out` [N, K], contiguous, in its dtype."""
    if out.is_cuda:
        from pronghorn.kernels.nf4_triton import write_out as launch

        launch(weight, out)
    else:
        write_out_reference(weight, out)


def write_out_reference(weight: NF4Weight, out: Tensor) -> None:
    """Do the same in plain torch."""
    out.copy_(_values(weight, weight.statistics()))


def write_codes(weight: NF4Weight, inverse: Tensor, out: Tensor, across: bool = False) -> None:
    """Write W's codes into `out` [N, K], or [K, N] if `across`; either may be columns of a wider tensor.

    Args:
        inverse: 1 / s, float32 [N].
    """
    if out.is_cuda:
        from pronghorn.kernels.nf4_triton import write_codes as launch

        launch(weight, inverse, out, across)
    else:
        write_codes_reference(weight, inverse, out, across)


def write_codes_reference(weight: NF4Weight, inverse: Tensor, out: Tensor, across: bool) -> None:
    """Do the same in plain torch."""
    factors = (weight.statistics().view(weight.shape[0], -1) * inverse[:, None]).flatten()
    codes = _values(weight, factors).to(DTYPE).view(torch.uint8)
    out.view(torch.uint8).copy_(codes.t() if across else codes)


def _values(weight: NF4Weight, factors: Tensor) -> Tensor:
    """Return table[code] · factor in float32 [N, K], a factor a block."""
    packed = weight.packed.int()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: weight.shape[0] * weight.shape[1]]
    each = factors.repeat_interleave(weight.block)[: len(codes)]
    return (weight.table[codes] * each).view(weight.shape)
