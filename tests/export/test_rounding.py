"""Merged weights are rounded so that an adapter whose numbers are less than the distance of two weights survives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from pronghorn.export import rounding
from pronghorn.export.merge import merged_tensors, save_merged
from pronghorn.export.onto_original import merged_in_place
from pronghorn.export.rounding import (
    MOST_LOST,
    bfloat16_by_bits,
    chances,
    holds,
    lost,
    neighbours,
    round_merged,
    round_unbiased,
)
from support.tiny import tiny_model

KINDS = [torch.bfloat16, torch.float16]
AWKWARD = [0.0, -0.0, 1e-40, -1e-7, 6e-8, 1.0, -1.0, 65504.0, 65510.0, 3.3895e38, math.inf, -math.inf, math.nan]


def by_numpy(exact: float, dtype: torch.dtype) -> set[float]:
    """Return the numbers of 16 bits next to a number, the number alone if it is one."""
    if dtype is torch.float16:
        with np.errstate(over="ignore"):
            near = np.float16(exact)
            other = np.nextafter(near, np.float16(math.inf if float(near) < exact else -math.inf))
        if float(near) == exact:
            return {exact}
        return {float(near), float(other)}
    bits = np.float32(exact).view(np.uint32)
    low, high = (np.uint32(part).view(np.float32) for part in (bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000))
    return {float(low)} if float(low) == exact else {float(low), float(high)}


@pytest.mark.parametrize("dtype", KINDS)
def test_a_number_becomes_one_of_its_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.cat([torch.randn(300) * 10.0 ** torch.randint(-8, 4, (300,)), torch.tensor(AWKWARD)])
    nearest = exact.to(dtype).float()
    for chance in (0.0, 0.3, 0.7, 1 - 2**-24):
        found = neighbours(exact, dtype, torch.full_like(exact, chance)).float()
        for number, near, got in zip(exact.tolist(), nearest.tolist(), found.tolist(), strict=True):
            if math.isnan(number) or math.isinf(near):
                assert str(got) == str(near)
            else:
                assert got in by_numpy(number, dtype) or number == got, (number, got)
    away, toward = (neighbours(exact[:300], dtype, torch.full((300,), at)).float().abs() for at in (0.0, 1 - 2**-24))
    assert (away >= exact[:300].abs()).all() and (toward <= exact[:300].abs()).all()
    assert (away > toward).sum() > 250


@pytest.mark.parametrize("size", [1, 63, 10_000])
def test_adding_to_the_bits_is_the_reference(size: int) -> None:
    torch.manual_seed(0)
    exact = torch.randn(size) * 10.0 ** torch.randint(-44, 38, (size,))
    exact = torch.cat([exact, -exact, torch.tensor([0.0, -0.0, 1e-40, 1.0, -1.0, 3.3e38])])
    draws = torch.randint(2**16, exact.shape, dtype=torch.int32)
    draws[-6:] = torch.tensor([2**16 - 1, 2**16 - 1, 0, 2**16 - 1, 2**16 - 1, 0], dtype=torch.int32)
    expected = neighbours(exact, torch.bfloat16, chances(draws))
    assert torch.equal(bfloat16_by_bits(exact, draws), expected)
    assert (expected != exact.bfloat16()).float().mean() > 0.2 or size == 1


@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_not_finite_stays(dtype: torch.dtype) -> None:
    whole = torch.full((100,), float("nan")).view(torch.int32).add_(2**22 - 1).view(torch.float32)  # all its bits
    for exact in (whole, torch.full((100,), math.inf), torch.full((100,), -math.inf)):
        assert str(set(round_unbiased(exact, dtype, "x").tolist())) == str(set(exact.tolist())) or exact.isnan().all()
        assert not round_unbiased(exact, dtype, "x").isfinite().any()


@pytest.mark.parametrize("dtype", KINDS)
def test_the_mean_is_the_number(dtype: torch.dtype) -> None:
    """And by rounding to the nearest it is not."""
    count, ulp = 40_000, torch.finfo(dtype).eps
    for share in (0.02, 0.3, 0.5, 0.9):
        for sign in (1.0, -1.0):
            exact = torch.full((count,), sign * (1 + share * ulp))
            mean = ((round_unbiased(exact, dtype, "name").double().mean() * sign - 1) / ulp).item()
            assert abs(mean - share) < 5 * math.sqrt(share * (1 - share) / count)
            nearest = ((exact.to(dtype).double().mean() * sign - 1) / ulp).item()
            assert abs(nearest - share) >= 0.02 - 1e-3


@pytest.mark.parametrize("size", [0, 1, 63, 1000])
def test_the_same_name_gives_the_same_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_AT_ONCE", 100)
    exact = torch.rand(size, 3) + 1
    first, again, other = (round_unbiased(exact, torch.bfloat16, name) for name in ("one", "one", "other"))
    assert first.shape == exact.shape and torch.equal(first, again)
    assert size < 63 or not torch.equal(first, other)
    assert torch.equal(round_unbiased(first.float(), torch.bfloat16, "x"), first), "16 bits stay"


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("steps", "expected"), [(0.1, 1.0), (0.49, 1.0), (0.75, -1 / 3), (1.0, 0.0), (1.25, 0.2)])
def test_what_is_lost_is_told(
    dtype: torch.dtype, steps: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a change by so many steps from one number of 16 bits to the next."""
    monkeypatch.setattr(rounding, "_AT_ONCE", 7)
    plain = torch.ones(5, 9)
    merged = plain + steps * torch.finfo(dtype).eps
    assert lost(plain, merged, dtype) == pytest.approx(expected, abs=1e-4)
    by_chance = round_unbiased(merged, dtype, "x")
    assert torch.equal(round_merged(plain, merged, dtype, "x"), by_chance if expected else merged.to(dtype))
    assert torch.equal(by_chance.float(), merged) == (expected == 0)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_large_change_is_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """By chance it would be off by more, and keep no more."""
    torch.manual_seed(0)
    plain = (0.02 * torch.randn(200, 300)).to(dtype).float()
    for size, nearest in ((1e-6, False), (1e-2, True)):
        merged = plain + size * torch.randn(200, 1) * torch.randn(1, 300)
        rounded = round_merged(plain, merged, dtype, "x")
        assert torch.equal(rounded, merged.to(dtype)) is nearest is (abs(lost(plain, merged, dtype)) <= MOST_LOST)
    by_chance = round_unbiased(merged, dtype, "x")
    assert (by_chance.float() - merged).norm() > 1.3 * (rounded.float() - merged).norm()


@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_not_finite_is_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    plain = torch.ones(3)
    merged = torch.tensor([1.0, math.inf, 1.0001])
    assert math.isnan(lost(plain, merged, dtype)) and lost(plain, plain, dtype) == 0
    assert round_merged(plain, merged, dtype, "x").tolist() == merged.to(dtype).tolist()


def adapted(family: str, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """A model whose adapter changes weights by much less than two of them are apart, and what it adapts."""
    base = tiny_model(family, hidden_size=128)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(parameter.to(dtype))
    experts = {"target_parameters": ["experts.down_proj"]} if family == "qwen3_moe" else {}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["o_proj"], **experts))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-4 if dtype is torch.bfloat16 else 1e-5)
    names = ["self_attn.o_proj.weight", *(["mlp.experts.down_proj"] if experts else [])]
    return model, [f"model.layers.0.{name}" for name in names]


def kept(model: Any, names: list[str], dtype: torch.dtype, **how: bool) -> list[float]:
    """Return how much of what the adapter adds is in rounded weights, along it: 1 is all."""

    def read(of: torch.dtype, **how: bool) -> dict[str, torch.Tensor]:
        tensors = merged_tensors(model.get_base_model(), of, **how)
        return {tensor.name: tensor.read().double() for tensor in tensors if tensor.name in names}

    exact, rounded = read(torch.float32), read(dtype, **how)
    with model.disable_adapter():
        plain = read(torch.float32)
    deltas = {name: exact[name] - plain[name] for name in names}
    return [(((rounded[n] - plain[n]) * deltas[n]).sum() / deltas[n].square().sum()).item() for n in names]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", KINDS)
def test_a_small_adapter_is_kept(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model, names = adapted(family, dtype)
    assert kept(model, names, dtype, unbiased=True) == pytest.approx([1.0] * len(names), abs=0.15)
    assert max(kept(model, names, dtype)) < 0.7, "rounding to the nearest loses it: the check above can fail"
    save_merged(model, None, tmp_path / "merged", dtype=dtype)
    written = load_file(tmp_path / "merged" / "model.safetensors")[names[0]]
    [expected] = [t.read() for t in merged_tensors(model.get_base_model(), dtype, unbiased=True) if t.name == names[0]]
    assert torch.equal(written, expected)


def test_weights_between_the_numbers_of_16_bits_are_rounded_to_the_nearest() -> None:
    """There nothing is lost everywhere in the same direction."""
    model, _ = adapted("llama", torch.float32)
    assert not holds(model.get_base_model().model.layers[0].self_attn.o_proj.weight, torch.bfloat16)
    by_chance, nearest = (
        {t.name: t.read() for t in merged_tensors(model.get_base_model(), torch.bfloat16, unbiased=unbiased)}
        for unbiased in (True, False)
    )
    assert all(torch.equal(by_chance[name], nearest[name]) for name in nearest)


def test_weights_without_an_adapter_stay() -> None:
    model, _ = adapted("llama", torch.bfloat16)
    base = model.get_base_model()
    written = {t.name: t.read() for t in merged_tensors(base, torch.bfloat16, unbiased=True)}
    for name, parameter in base.named_parameters():
        if "lora_" not in name and "base_layer" not in name:
            assert torch.equal(written[name].float(), parameter), name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_merge_that_is_measured_is_the_one_that_is_written(family: str) -> None:
    model, _ = adapted(family, torch.bfloat16)
    written = {t.name: t.read() for t in merged_tensors(model.get_base_model(), torch.bfloat16, unbiased=True)}
    plain = merged_in_place(model, torch.bfloat16).state_dict()
    assert plain.keys() == written.keys() and all(torch.equal(plain[name], written[name].float()) for name in plain)
