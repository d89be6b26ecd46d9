"""The gated delta rule: its kernels by the interpreter and on a GPU, and its chunked form."""

from __future__ import annotations

import pytest
import torch

from support.delta_checks import CHECKS, LENGTHS, check
from support.interpreted import check_interpreted
from support.marks import needs_triton


@needs_triton
def test_interpreted_kernels_agree_with_the_recurrence() -> None:
    check_interpreted("delta_checks.py", tuple(CHECKS))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(*LENGTHS, 2048 - sum(LENGTHS)), (2048,)], ids=["documents", "one"])
def test_kernels_agree_with_the_recurrence_on_a_gpu(
    lengths: tuple[int, ...], dtype: torch.dtype, nan_memory: None
) -> None:
    check("cuda", dtype, lengths, (4, 8, 128, 128), decays=(1.0,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHECKS)
def test_small_heads_agree_with_the_recurrence_on_a_gpu(name: str, dtype: torch.dtype, nan_memory: None) -> None:
    check("cuda", dtype, *CHECKS[name])
