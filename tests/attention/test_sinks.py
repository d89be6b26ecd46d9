"""Attention sinks: every way of packed attention against the softmax written out in float64, all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.attention import explicit, varlen
from pronghorn.attention.masked import masked_attention, per_document_attention
from pronghorn.attention.packed import _metadata_in_every_layer
from pronghorn.data.batch import TILE_ROWS, PackedBatch
from pronghorn.kernels import attention as tiles
from support.tolerance import ThreeWay

LENGTHS = [1, 70, 1, 13, 22, 1]
NAMES = ("out", "dq", "dk", "dv", "d_sinks")


def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Token by token: exp(s_j) over their sum and exp(sink)."""
    rows, start = [], 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for length in lengths:
        for t in range(start, start + length):
            first = start if window is None else max(start, t - window + 1)
            scores = torch.einsum("hd,jhd->hj", q[t], k[first : t + 1]) * q.shape[2] ** -0.5
            weights = torch.cat([scores, sinks[:, None]], 1).softmax(1)[:, :-1]
            rows.append(torch.einsum("hj,jhd->hd", weights, v[first : t + 1]))
        start += length
    return torch.stack(rows)


def inputs(heads: int, kv_heads: int, dim: int, tokens: int, seed: int) -> list[Tensor]:
    """q, k, v, sinks, d_out; a sink that takes nearly all, and one that takes nothing."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(tokens, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads)]
    sinks = torch.randn(heads, generator=generator) * 2
    sinks[0], sinks[-1] = 6.0, -30.0
    return [*made, sinks, torch.randn(tokens, heads, dim, generator=generator)]


def results(function: Any, given: list[Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    *leaves, d_out = (x.to(device, dtype) for x in given)
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, d_out)]


def compare(ours: Any, plain: Any, window: int | None, device: str, dtype: torch.dtype, dim: int, draws: int) -> None:
    errors = ThreeWay()
    for seed in range(draws):
        given = inputs(4, 2, dim, sum(LENGTHS), seed)
        given = [x.to(dtype).float() for x in given]
        exact = results(lambda *x: formula(*x, LENGTHS, window), given, "cpu", torch.float64)
        for each in zip(
            NAMES, results(ours, given, device, dtype), results(plain, given, device, dtype), exact, strict=True
        ):
            errors.add(*each)
    errors.check()


def batch(device: str = "cpu") -> PackedBatch:
    return PackedBatch.build(LENGTHS, tokens=sum(LENGTHS), device=device)


def plain_for(packed: PackedBatch, dim: int, window: int | None) -> Any:
    return lambda q, k, v, s: per_document_attention(q, k, v, packed, dim**-0.5, window, s)


WINDOWS = pytest.mark.parametrize("window", [None, 1, 7, 500])


@WINDOWS
@pytest.mark.parametrize("function", [per_document_attention, masked_attention])
def test_plain_ways(function: Any, window: int | None, nan_memory: None) -> None:
    def by_formula(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        return formula(q, k, v, s, LENGTHS, window)

    packed = batch()
    ours = lambda q, k, v, s: function(q, k, v, packed, 0.25, window, s)  # noqa: E731
    compare(ours, by_formula, window, "cpu", torch.float32, 16, 1)


def flash_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash varlen's operators as formulas: they know no sinks, and give the natural logarithm."""

    def forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, window: int | None) -> Any:
        out, lse = tiles.forward(q, k, v, batch().tiles, TILE_ROWS, scale, window)
        return out, lse / tiles.LOG2_E, torch.zeros(2), torch.zeros(1)

    def backward(
        d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: Any, packed: Any, scale: float, window: Any
    ) -> Any:
        lse = state[0] * tiles.LOG2_E
        grads = tiles.backward(d_out, q, k, v, out, lse, packed.tiles, TILE_ROWS, scale, window)
        return grads.split([q.shape[1], k.shape[1], k.shape[1]], 1)

    monkeypatch.setattr(varlen, "flash_varlen", forward)
    monkeypatch.setattr(varlen, "backward", backward)


@WINDOWS
@pytest.mark.parametrize("way", ["tiled", "flash", "per_document"])
def test_explicit_ways(way: str, window: int | None, nan_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels' formulas in their place, which tests the identities and the gradient of the sinks."""
    flash_on_the_cpu(monkeypatch)
    packed = batch()
    options = explicit.Options(packed, 0.25, window, way)
    ours = lambda q, k, v, s: explicit.attention(q, k, v, options, s)  # noqa: E731
    compare(ours, plain_for(packed, 16, window), window, "cpu", torch.float32, 16, 1)


def test_frozen_sinks_cost_nothing() -> None:
    q, k, v, sinks, d_out = inputs(4, 2, 16, sum(LENGTHS), 0)
    options = explicit.Options(batch(), 0.25, None, "per_document")
    out, state = explicit.forward(q, k, v, options, sinks)
    grads, d_sinks = explicit.backward(d_out, q, k, v, out, list(state), options, sinks)
    assert grads.shape == (sum(LENGTHS), 8, 16) and d_sinks is None


def test_comparison_can_fail() -> None:
    packed = batch()
    without = lambda q, k, v, s: per_document_attention(q, k, v, packed, 0.25, None) + 0 * s.sum()  # noqa: E731
    shifted = lambda q, k, v, s: per_document_attention(q, k, v, packed, 0.25, None, s + 1e-3)  # noqa: E731
    for defect in (without, shifted):
        with pytest.raises(AssertionError, match="error"):
            compare(defect, plain_for(packed, 16, None), None, "cpu", torch.float32, 16, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("way", ["tiled", "flash", "masked", "metadata in every layer"])
@pytest.mark.parametrize(
    "window", [None, 7, 500]
)  # of one token dq is all cancellation: flash's δ from rounded outputs
def test_on_the_gpu(way: Any, dim: int, dtype: torch.dtype, window: int | None, nan_memory: None) -> None:
    packed = batch("cuda")

    def ours(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        if way == "masked":
            return masked_attention(q, k, v, packed, dim**-0.5, window, s)
        if way == "metadata in every layer":
            positions = torch.cat([torch.arange(length, device="cuda") for length in LENGTHS])[None]
            return _metadata_in_every_layer(q, k, v, positions, dim**-0.5, window, s)
        return explicit.attention(q, k, v, explicit.Options(packed, dim**-0.5, window, way), s)

    compare(ours, plain_for(packed, dim, window), window, "cuda", dtype, dim, 8)
