"""Linears' weights in 8 bits (e4m3) with a float32 scale a block: of 128 x 128 numbers, of a row, or of all.

    w_nk = code_nk · s_(n / rows)(k / columns)        the last blocks may be cut short

Source: DeepSeek-V3's `weight_dequant` (`weight_scale_inv` is s itself), compressed-tensors' `float-quantized`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, cdiv, launch, tl, triton
from pronghorn.kernels.packed import PackedTensor
from pronghorn.kernels.small_floats import decode_e4m3

ROWS, COLS = 8, 512
"""That a program writes out."""


class FP8Tensor(PackedTensor):
    """W [N, K]. Its parts: codes e4m3 [N, K], scales float32 [⌈N / rows⌉, ⌈K / columns⌉]; its facts: rows, columns of a
    block."""

    def write_out(self, out: Tensor) -> None:
        codes, scales = self.parts
        rows, columns = self.facts
        write_out(codes, scales, out, rows, columns)

    @property
    def scales_rows(self) -> bool:
        """Tell whether a row has one scale, maybe shared with others: the codes multiply as they are."""
        return bool(self.parts[1].shape[1] == 1)

    def row_scales(self) -> Tensor:
        """Return s, float32 [N], where rows have one scale each."""
        assert self.scales_rows
        return self.parts[1][:, 0].repeat_interleave(self.facts[0])[: self.shape[0]]


def has_own_codes(weight: Any) -> bool:
    """Tell whether a weight lies in 8-bit codes that multiply as they are."""
    return isinstance(weight, FP8Tensor) and weight.scales_rows


def write_out_reference(codes: Tensor, scales: Tensor, out: Tensor, rows: int, columns: int) -> None:
    """Write W into `out` [N, K], contiguous, in its dtype.

    Args:
        codes: e4m3 [N, K]; scales: float32, one a block of `rows` x `columns`.
    """
    wide = scales.repeat_interleave(rows, 0)[: codes.shape[0]].repeat_interleave(columns, 1)[:, : codes.shape[1]]
    out.copy_(codes.float() * wide)


@triton.jit
def _write_out(
    codes_ptr,  # [N, K], bytes
    scales_ptr,  # float32 [⌈N / rows⌉, across]
    out_ptr,  # [N, K]
    N, K,
    rows, columns,  # of a block
    across,  # ⌈K / columns⌉
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write out a tile of the weight."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (row < N)[:, None] & (col < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + col[None, :]
    scale = tl.load(scales_ptr + (row // rows)[:, None] * across + (col // columns)[None, :], mask=inside, other=0.0)
    numbers = decode_e4m3(tl.load(codes_ptr + at, mask=inside, other=0)) * scale
    tl.store(out_ptr + at, numbers.to(out_ptr.dtype.element_ty), mask=inside)


def write_out_triton(codes: Tensor, scales: Tensor, out: Tensor, rows: int, columns: int) -> None:
    """Do what `write_out` does, by its Triton kernel."""
    n, k = codes.shape
    launch(
        _write_out, (cdiv(n, ROWS), cdiv(k, COLS)), codes.view(torch.uint8), scales, out,
        n, k, rows, columns, scales.shape[1], ROWS=ROWS, COLS=COLS, num_warps=4,
    )  # fmt: skip


write_out = by_device(write_out_reference, write_out_triton, at=2)
