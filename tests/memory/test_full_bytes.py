"""What layers with experts, and those with an input of their own, save where all weights are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pronghorn.data.batch import PackedBatch
from pronghorn.memory.estimate import resting_bytes, rule_bytes, stored_bytes
from pronghorn.memory.plan import Policy
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.families import base_causal_lm
from pronghorn.models.lora import add_lora
from pronghorn.models.measured_layer import stream_dtype
from support.causal_lms import with_adapters
from support.saved import TOKENS, saved_bytes
from support.tiny import tiny_model

S, F = "sliding_attention", "full_attention"
TYPES = {
    "gemma4_text": ([S, F, S, F], [S, F, F, S, F]),
    "gemma4_text with experts": ([S, F], [S, F, F]),
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_5_moe_text", *TYPES])
def test_layers_that_are_trained_whole_save_what_the_formula_says(family: str, autocast: torch.dtype | None) -> None:
    """Models that differ by one layer (with a gated delta net by one of each kind), to 16 bytes a token and layer."""
    found, expected = [], []
    for number in (0, 1):
        types = TYPES.get(family, (None, None))[number]
        counts = (2, 4) if "qwen3_5" in family else (2, 3)
        changes = {"num_hidden_layers": counts[number]}
        if types is not None:
            shared = 0 if "experts" in family else 2
            changes = {"num_hidden_layers": len(types), "layer_types": types, "num_kv_shared_layers": shared}
        model = tiny_model(family, **changes)
        attach(model, layers="fused")
        found.append(saved_bytes(model, PackedBatch.build([TOKENS], tokens=TOKENS), autocast))
        dims, work = dims_of(model), replace(setup_of(model, TOKENS, autocast), fused=True)
        assert work.method == "full"
        expected.append(resting_bytes(dims, work)["batch"])
        for layer in dims.layers:
            heads = 0 if layer.attention is None else 4 * TOKENS * layer.attention.heads  # not on the CPU
            rule = 0 if layer.delta is None else rule_bytes(layer.delta, work)  # nor those of its kernels
            begins = 0 if layer.experts is None else 4 * layer.experts.count
            expected[-1] += stored_bytes(layer, work)[Policy.KEEP] - heads - rule + begins
    more = found[1] - found[0], expected[1] - expected[0]
    copy = 2 * 64 * 32 if family == "gemma4_text" and autocast else 0  # of the weight that makes one more layer's input
    assert more[0] - copy == pytest.approx(more[1], abs=16 * TOKENS)


@pytest.mark.parametrize("adapted", [True, False], ids=["lora", "full"])
def test_a_router_in_float32_saves_copies(adapted: bool) -> None:
    """GLM-4.5's, of its weight, and of its input where the weight is trained; exactly."""
    found = []
    for count in (2, 4):
        model = tiny_model("glm4_moe", num_hidden_layers=count, first_k_dense_replace=0).to(torch.bfloat16)
        model = add_lora(model, r=4, target_modules=["q_proj", "v_proj"]) if adapted else model
        attach(model, layers="fused")
        found.append(saved_bytes(model, PackedBatch.build([TOKENS], tokens=TOKENS), None))
    dims, work = dims_of(model), replace(setup_of(model, TOKENS), fused=True)
    [layer] = dims.kinds
    assert layer.attention is not None and layer.experts is not None
    expected = stored_bytes(layer, work)[Policy.KEEP] - 4 * TOKENS * layer.attention.heads + 4 * layer.experts.count
    assert found[1] - found[0] == 2 * expected


@pytest.mark.parametrize("layers", ["fused", "stock"])
@pytest.mark.parametrize(
    ("adapted", "weights", "autocast"),
    [
        (False, torch.float32, torch.bfloat16),
        (False, torch.bfloat16, None),
        (False, torch.bfloat16, torch.bfloat16),
        (True, torch.bfloat16, None),
        (True, torch.bfloat16, torch.bfloat16),
        (True, torch.float32, None),
    ],
)
def test_layers_are_timed_with_the_stream_that_plans_count(
    layers: Any, adapted: bool, weights: torch.dtype, autocast: torch.dtype | None
) -> None:
    """It was in float32 for every model that is trained whole: one in 16 bits was timed, or failed, in that."""
    model = tiny_model("llama").to(weights)
    model = with_adapters(model) if adapted else model
    attach(model, layers=layers)
    base, seen = base_causal_lm(model), list[torch.dtype]()
    for layer in base.base_model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    packed, positions = PackedBatch.build([TOKENS], tokens=TOKENS), torch.arange(TOKENS)[None]
    states = torch.randn(1, TOKENS, base.config.hidden_size, dtype=stream_dtype(base))
    for given in ({"input_ids": positions}, {"inputs_embeds": states}):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            base.base_model(**given, position_ids=positions, packed=packed, use_cache=False)
    assert set(seen) == {stream_dtype(base)}
    assert stream_dtype(base).itemsize == setup_of(model, TOKENS, autocast).stream_bytes
