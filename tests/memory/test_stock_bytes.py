"""What transformers' and PEFT's layers save, trained whole or with adapters that aren't fused, against the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.memory.estimate import stored_bytes, working_bytes
from pronghorn.memory.plan import Policy
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.lora import add_lora
from support.allocations import Allocations
from support.saved import TOKENS, saved_bytes
from support.tiny import tiny_model

RANK = 4
UNUSUAL = {
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "hidden_size": 48,
    "intermediate_size": 24,
    "head_dim": 16,
}


def more_of_a_layer(
    family: str,
    padded: bool,
    dtype: torch.dtype,
    lora: dict[str, Any] | None,
    masters: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Return the bytes that a third layer saves, the layer and the work; without `lora` all weights are trained."""
    found, autocast = [], None
    for count in (2, 3):
        model = tiny_model(family, num_hidden_layers=count, **changes)
        if lora is None:
            model, autocast = model.to(masters), dtype if dtype is not masters else None
        else:
            model = add_lora(model.to(dtype), r=RANK, **lora)
        found.append(saved_bytes(model, None, autocast, padded))
    work = setup_of(model, TOKENS, autocast, padded=int(padded))
    return found[1] - found[0], dims_of(model).layers[0], work


@pytest.mark.matrix(4)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("masters", "dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=["fp32", "autocast", "bf16"],
)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", UNUSUAL), ("qwen3", {}), ("qwen3", UNUSUAL), ("olmo2", {}), ("granite", {})],
    ids=["llama", "llama of one key head", "qwen3", "qwen3 of one key head", "olmo2", "granite"],
)
def test_a_layer_that_is_trained_whole_saves_products_inputs(
    family: str, changes: dict[str, Any], masters: torch.dtype, dtype: torch.dtype, padded: bool
) -> None:
    saved, layer, work = more_of_a_layer(family, padded, dtype, None, masters, **changes)
    assert work.method == "full" and not work.fused
    assert saved == stored_bytes(layer, work)[Policy.KEEP]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, UNUSUAL], ids=["usual", "one key head"])
@pytest.mark.parametrize("targets", [None, ["q_proj", "o_proj", "down_proj"]], ids=["all", "some"])
@pytest.mark.parametrize(("dora", "dropout"), [(False, 0.1), (True, 0.0), (True, 0.1)])
def test_dropout_and_dora_save_what_the_formula_says(
    dora: bool, dropout: float, targets: Any, changes: dict[str, Any], dtype: torch.dtype, padded: bool
) -> None:
    lora = {"use_dora": dora, "lora_dropout": dropout, "target_modules": targets}
    saved, layer, work = more_of_a_layer("llama", padded, dtype, lora, **changes)
    assert (work.dora, work.dropout) == (dora, dropout > 0)
    expected = stored_bytes(layer, work)[Policy.KEEP]
    if dropout:  # on the CPU what it left is a float32 number an element, on CUDA a byte
        expected += 3 * TOKENS * sum(linear.inputs for linear in layer.linears if work.rank(linear.path))
    assert saved == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dora_multiplies_a_unit_matrix(dtype: torch.dtype) -> None:
    """In short rows its forward's temporary tensors are the most that a layer has."""
    wide = {"hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 1}
    model = add_lora(tiny_model("llama", **wide).to(dtype), r=RANK, use_dora=True)
    layer, work = dims_of(model).layers[0], setup_of(model, 1)
    down = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    with Allocations() as seen:
        down(torch.randn(1, 1, 1024, dtype=dtype))
    assert 0.75 * working_bytes(layer, work) < seen.peak <= 1.01 * working_bytes(layer, work)


def test_magnitudes_are_trained_too() -> None:
    model = add_lora(tiny_model("llama"), r=RANK, use_dora=True)
    dims, work = dims_of(model), setup_of(model, TOKENS)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(work.adapters(layer) for layer in dims.layers) == trained
