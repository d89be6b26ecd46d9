"""Rows in 8 bits: scales, rounding, zeros, subnormals, outliers and what isn't finite."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.quantise import DTYPE, LIMIT, quantise_rows, quantise_rows_reference, transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (17, 1000)])
def test_an_element_is_off_by_half_a_step(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    codes, scales = quantise_rows(x)
    assert codes.dtype is DTYPE and scales.shape == (shape[0], 1)
    assert torch.equal(codes.float().abs().amax(1), torch.full(shape[:1], LIMIT))
    error = (codes.double() * scales.double() - x.double()).abs()
    half = x.double().abs() * 2**-4  # three bits after the first
    assert (error <= torch.maximum(half, scales.double() * 2**-10) * (1 + 1e-6)).all()


def test_columns_are_multiplied_first() -> None:
    x, c = torch.randn(5, 32), torch.rand(32) + 0.5
    assert all(map(torch.equal, quantise_rows(x, c), quantise_rows(x * c)))


def test_zeros_subnormals_outliers_and_infinities() -> None:
    x = torch.zeros(6, 8)
    x[1] = 1e-42
    x[2, 0], x[2, 1:] = 1e30, 1.0
    x[3, 3] = float("inf")
    x[4, 5] = float("nan")
    x[5] = -2.0
    codes, scales = quantise_rows(x)
    back = codes.float() * scales
    assert (codes[:2].float() == 0).all() and scales[:2].isfinite().all()
    assert back[2, 0] == pytest.approx(1e30, rel=1e-6) and (back[2, 1:] == 0).all()
    assert back[3].isnan().any() and back[4].isnan().all()
    assert torch.equal(back[5], x[5])


def test_the_transpose_has_the_same_codes() -> None:
    codes, _ = quantise_rows(torch.randn(37, 130))
    across = transposed(codes)
    assert across.is_contiguous() and torch.equal(across.float(), codes.float().t())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (17, 1000), (64, 14336), (5, 40000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gives_the_references_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    if len(x) > 4:
        x[0], x[1, 0], x[2, 0], x[3, 0] = 0.0, float("inf"), float("nan"), 6e4
    wide = torch.full((shape[0], shape[1] + 8), float("nan"), device="cuda", dtype=dtype)
    wide[:, : shape[1]] = x
    columns = (torch.rand(shape[1], device="cuda") + 0.5).bfloat16()
    for given in (None, columns):
        codes, scales = quantise_rows(wide[:, : shape[1]], given)
        want, want_scales = quantise_rows_reference(x, given)
        assert torch.equal(scales.nan_to_num(-1), want_scales.nan_to_num(-1))
        assert torch.equal(codes.float().nan_to_num(-1), want.float().nan_to_num(-1))
    assert torch.equal(transposed(codes).view(torch.uint8), codes.view(torch.uint8).t())
