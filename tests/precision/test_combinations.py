"""Bases, computes and policies together: what is kept or computed again changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, with_adapters
from support.tiny import in_4_bits, packed_row, tiny_model

SIZES = {"intermediate_size": 128}  # 4-bit blocks end with the rows


def based(family: str, base: str) -> Any:
    """Return a tiny model with adapters over a base in bf16 or NF4."""
    model = tiny_model(family, **SIZES).to(torch.bfloat16)
    return with_adapters(in_4_bits(model) if base == "nf4" else model)


@pytest.mark.parametrize("compute", ["dtype", "fp8", "fp8_exact"])
@pytest.mark.parametrize("base", ["bf16", "nf4"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_policies_change_no_bit(family: str, base: str, compute: str) -> None:
    model, batch, seen = based(family, base), packed_row(LENGTHS, ROW), {}
    for policy in (*list(Policy)[:4], Policy.OFFLOAD):
        handle = attach(model, Plan((policy,)), layers="fused", compute=compute)
        seen[policy] = loss_and_gradients(model, batch)
        in_fp8, products = handle.layers.in_fp8()
        assert products == 12 and in_fp8 == (0 if compute == "dtype" else 12)
    loss, gradients = seen[Policy.KEEP]
    for policy, (other_loss, other) in seen.items():
        assert other_loss == loss, policy
        for name, gradient in gradients.items():
            assert torch.equal(other[name], gradient), (policy, name)
