"""The fast path of decoder layers against transformers and PEFT: every family, gradients of adapters and inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from test_parity import LENGTHS, ROW, gradients, one_document_at_a_time
from tiny import FAMILIES, packed_row, tiny_model
from tolerance import assert_three_way


def with_adapters(model: Any, **options: Any) -> Any:
    """LoRA on all linears, B away from zero."""
    adapted = add_lora(model, **{"r": 4, "lora_alpha": 8, **options})
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return adapted.train()


def compare(model: Any, batch: dict[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Fused, stock in the same dtype, and one document at a time in float64; `model` is float32 on the CPU."""
    reference = copy.deepcopy(model).double()
    _, exact_loss = one_document_at_a_time(reference, batch)
    exact_loss.backward()
    on_device = {name: value.to(device) for name, value in batch.items()}
    found = {}
    for layers in ("stock", "fused"):
        mine = copy.deepcopy(model).to(device)
        for name, parameter in mine.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.to(dtype)
        handle = attach(mine, layers=layers)
        loss = mine(**on_device).loss
        loss.backward()
        found[layers] = loss, gradients(mine)
        paths = {path.part: path.path for path in handle.report}
        assert paths["decoder layers"] == ("fused" if layers == "fused" else "transformers and PEFT")
    assert_three_way("loss", found["fused"][0], found["stock"][0], exact_loss)
    exact = gradients(reference)
    for name, grad in found["fused"][1].items():
        assert_three_way(f"gradient of {name}", grad, found["stock"][1][name], exact[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, nan_memory: None) -> None:
    compare(with_adapters(tiny_model(family)), packed_row(LENGTHS, ROW))
