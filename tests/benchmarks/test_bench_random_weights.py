"""Random weights as a source of tensors."""

from __future__ import annotations

import pytest
import torch

from benchmarks import plan
from benchmarks.random_weights import generated
from pronghorn.kernels.packed import PackedTensor
from pronghorn.precision.loader import load


def test_a_generated_tensor_depends_on_its_name_alone() -> None:
    shapes = {"a": (5000, 1500), "b": (5000, 1500), "norm": (7,)}
    expected = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    expected |= {f"{name}_scales": torch.empty(3, 5, dtype=torch.uint8, device="meta") for name in "ab"}
    weights = dict(load(generated(expected), expected=expected))
    alone = {stored.name: stored for stored in generated({"b": expected["b"]})}
    assert weights["a_scales"].dtype is torch.uint8 and not torch.equal(weights["a_scales"], weights["b_scales"])
    assert torch.equal(alone["b"].rows(2700, 4999), weights["b"][2700:4999])
    assert not torch.equal(weights["a"], weights["b"])
    assert not torch.equal(weights["a"][:2000], weights["a"][2796:4796])  # blocks differ
    assert weights["a"].float().std().item() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("method", ["fp8", "nvfp4"])
def test_published_weights_are_as_large_as_others(method: str) -> None:
    model = plan.load("tiny", method, None)
    packed = [weight for weight in model.parameters() if isinstance(weight, PackedTensor)]
    assert packed
    for weight in packed:
        numbers = weight.dequantise().float()
        assert numbers.std().item() == pytest.approx(0.02, rel=0.05) and abs(numbers.mean().item()) < 0.002
