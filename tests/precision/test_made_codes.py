"""Codes of whoever makes the rows of a product in 8 bits: who makes them, no bit changed by it, and none kept."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.kernels.quantise import DTYPE, RowCodes, quantise_rows
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach
from pronghorn.precision.fp8 import FP8Source, WrittenCodesSource
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients, with_adapters
from support.tiny import SIZES_IN_8_BITS, in_4_bits, packed_row, tiny_model

PLANS = {
    "keep": Plan.keep(),
    "norms": Plan((Policy.RECOMPUTE_NORMS,)),
    "MLP": Plan((Policy.RECOMPUTE_MLP,)),
    "layer": Plan.recompute(),
    "offload": Plan.offload(),
    "tiles": replace(Plan.keep(), mlp_rows=37),
}
EVERYWHERE: dict[str, Any] = {}
OUT_ONLY = {"target_modules": ["o_proj"]}


def model_of(family: str, adapters: dict[str, Any], base: str = "bf16") -> Any:
    dtype = torch.float16 if base == "fp16" else torch.bfloat16
    model = tiny_model(family, intermediate_size=128, **SIZES_IN_8_BITS.get(family, {})).to(dtype)
    return with_adapters(in_4_bits(model) if base == "nf4" else model, **adapters)


def passes(monkeypatch: pytest.MonkeyPatch, model: Any, plan: Plan) -> tuple[Counter[str], Counter[str]]:
    """The passes over rows [T, K] that a forward and its backward make to quantise them, by K and by what rows are."""
    seen: list[str] = []

    def counted(x: Tensor, columns: Tensor | None = None) -> RowCodes:
        seen.append(f"{'x' if columns is None else 'dy'} {x.shape[1]}")
        return quantise_rows(x, columns)

    attach(model, plan, layers="fused", compute="fp8_both")
    batch = packed_row(LENGTHS, ROW)
    model(**batch)  # weights are quantised
    monkeypatch.setattr("pronghorn.precision.fp8.quantise_rows", counted)
    loss = model(**batch).loss
    forward = Counter(seen)
    seen.clear()
    loss.backward()
    return forward, Counter(seen)


def test_passes_of_their_own_are_left_where_nobody_sees_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 columns: attention's output, and o's and down's gradient, which other blocks make; of 128: the activation,
    as an adapter is added on the way, and q·k·v's gradient, which the first of three layers doesn't need. The gradient
    of gate·up would have 256."""
    forward, backward = passes(monkeypatch, model_of("llama", EVERYWHERE), Plan.keep())
    assert forward == {"x 64": 3, "x 128": 3} and backward == {"dy 64": 6, "dy 128": 2}


def test_an_activation_without_an_adapter_has_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = passes(monkeypatch, model_of("llama", OUT_ONLY), Plan.keep())
    assert forward == {"x 64": 3} and backward == {"dy 64": 6, "dy 128": 2}


def test_norms_after_give_the_codes_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = passes(monkeypatch, model_of("gemma3_text", OUT_ONLY), Plan.keep())
    assert forward == {"x 64": 3} and backward == {"dy 128": 2}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("base", ["bf16", "fp16", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "olmo2", "gemma4_text", "qwen3_5_text"])
def test_no_bit_is_changed_whoever_makes_codes_and_whatever_is_recomputed(
    family: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms before, after and both, gate and up in one linear, layers' own inputs, gated delta nets."""
    batch = packed_row(LENGTHS, ROW)
    for adapters in (EVERYWHERE, OUT_ONLY) if family != "qwen3_5_text" else (EVERYWHERE,):
        model, found = model_of(family, adapters, base), {}
        tiles = family in ("llama", "gemma3_text", "phi3", "olmo2")
        for name in PLANS if tiles else [name for name in PLANS if name != "tiles"]:
            attach(model, PLANS[name], layers="fused", compute="fp8_both")
            for made in (True, False):
                for source in (FP8Source, WrittenCodesSource):
                    monkeypatch.setattr(source, "wants_codes", made)
                found[name, made] = loss_and_gradients(model, batch)
        for name, made in found:
            (loss, grads), (again, same) = found[name, made], found["tiles" if name == "tiles" else "keep", False]
            assert loss == again and all(torch.equal(grads[each], same[each]) for each in grads), (name, made)


@pytest.mark.parametrize("plan", PLANS)
def test_codes_are_gone_when_their_product_is_made(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in 8 bits waits for the backward, and no codes are there while others are made."""
    model, alive, most = model_of("gemma3_text", OUT_ONLY), list[Any](), list[int]()
    make = RowCodes.like.__func__  # type: ignore[attr-defined]

    def like(kind: Any, x: Tensor) -> RowCodes:
        made = make(kind, x)
        alive.append(weakref.ref(made.codes))
        most.append(sum(each() is not None for each in alive))
        return made

    def packed(x: Tensor) -> Tensor:
        assert x.dtype is not DTYPE
        return x

    attach(model, PLANS[plan], layers="fused", compute="fp8_both")
    batch = packed_row(LENGTHS, ROW)
    model(**batch)
    monkeypatch.setattr(RowCodes, "like", classmethod(like))
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x):
        loss = model(**batch).loss
    assert alive and not any(each() is not None for each in alive)
    loss.backward()
    assert not any(each() is not None for each in alive) and max(most) == 1


EQUAL_BITS = """
import sys, torch
sys.path[:0] = sys.argv[1:]
torch.use_deterministic_algorithms(True, warn_only=True)
from pronghorn.models.attach import attach
from pronghorn.precision.fp8 import FP8Source, WrittenCodesSource
from precision.test_made_codes import EVERYWHERE, OUT_ONLY, PLANS, model_of
from support.documents import LENGTHS, ROW
from support.fused import loss_and_gradients
from support.tiny import packed_row
batch = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
for family, base in (("llama", "bf16"), ("gemma3_text", "bf16"), ("phi3", "bf16"), ("llama", "nf4")):
    for adapters in (EVERYWHERE, OUT_ONLY):
        model, found = model_of(family, adapters, base).to("cuda"), {}
        for name in ("keep", "norms", "MLP", "layer", "offload"):
            attach(model, PLANS[name], layers="fused", graph="off", compute="fp8_both")
            for made in (True, False):
                FP8Source.wants_codes = WrittenCodesSource.wants_codes = made
                found[name, made] = loss_and_gradients(model, batch)
        (loss, grads), *others = found.values()
        for key, (again, same) in zip(list(found)[1:], others):
            assert again == loss and all(torch.equal(grads[name], same[name]) for name in grads), (family, base, key)
"""


@pytest.mark.gpu
def test_no_bit_is_changed_on_a_gpu() -> None:
    """In a process of its own: deterministic algorithms stay on."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    subprocess.run([sys.executable, "-c", EQUAL_BITS, *sys.path], check=True, env=environment, timeout=300)
