"""Fused layers with adapters: their losses and gradients against stock ones."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pronghorn.layers.decoder import FusedLayers
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from support.documents import gradients, one_document_at_a_time
from support.tolerance import ThreeWay

WIDE = {"intermediate_size": 136}


BIASED = {**WIDE, "attention_bias": True, "mlp_bias": True}


def with_adapters(model: Any, **options: Any) -> Any:
    """LoRA on all linears, B away from zero."""
    adapted = add_lora(model, **{"r": 8, "lora_alpha": 8, **options})
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.copy_(noise * 0.1)
    return adapted.train()


def count_attachments(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count from now on how often a model gets its attached class, and how often weights are moved to be merged."""
    counts = {"attached": 0, "merged": 0}
    attach_module = importlib.import_module("pronghorn.models.attach")
    packed_class, merge, build = attach_module.packed_class, FusedLayers.merge_weights, FusedLayers._build

    def counted_class(original: Any) -> Any:
        counts["attached"] += 1
        return packed_class(original)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def moves(layers: FusedLayers, *args: Any, **kwargs: Any) -> Any:
            before = [parameter.data_ptr() for parameter in layers.backbone.parameters()]
            result = function(layers, *args, **kwargs)
            counts["merged"] += before != [parameter.data_ptr() for parameter in layers.backbone.parameters()]
            return result

        return moves

    monkeypatch.setattr(attach_module, "packed_class", counted_class)
    monkeypatch.setattr(FusedLayers, "merge_weights", watched(merge))
    monkeypatch.setattr(FusedLayers, "_build", watched(build))
    return counts


def compare(
    model: Any,
    *batches: dict[str, Any],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    masters: bool = False,
    plan: Plan | None = None,
) -> None:
    """Fused, stock in the same dtype, and one document at a time in float64; `model` is float32 on the CPU.

    In 16 bits the stock path runs under autocast, as trainers run it: else PEFT multiplies float32 adapters in float32.
    With `masters` the weights stay float32 and both paths run under autocast. The fused layers follow `plan`.
    """
    errors = ThreeWay()
    for batch in batches:
        measure(errors, model, batch, device, dtype, masters, plan)
    errors.check()


def measure(
    errors: ThreeWay,
    model: Any,
    batch: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    masters: bool,
    plan: Plan | None = None,
) -> None:
    reference = copy.deepcopy(model).double()
    _, exact_loss = one_document_at_a_time(reference, batch)
    exact_loss.backward()
    on_device = {name: value.to(device) for name, value in batch.items()}
    found = {}
    for layers in ("stock", "fused"):
        mine = copy.deepcopy(model).to(device)
        for name, parameter in mine.named_parameters():
            if "lora_" not in name and not masters:
                parameter.data = parameter.data.to(dtype)
        handle = attach(mine, plan if layers == "fused" else None, layers=layers)
        autocast = (layers == "stock" or masters) and dtype is not torch.float32
        with torch.autocast(device, dtype) if autocast else nullcontext():
            loss = mine(**on_device).loss
        loss.backward()
        found[layers] = loss, gradients(mine)
        paths = {path.part: path.path for path in handle.paths(dtype if masters else None)}
        fused = "fused", "attention and norms fused, experts apart"
        assert paths["decoder layers"] in (fused if layers == "fused" else ("transformers and PEFT",))
    errors.add("loss", found["fused"][0], found["stock"][0], exact_loss)
    exact = gradients(reference)
    for name, grad in found["fused"][1].items():
        errors.add(f"gradient of {name}", grad, found["stock"][1][name], exact[name])


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: grad.clone() for name, grad in gradients(model).items()}


def path_of_layers(handle: Any) -> tuple[str, str]:
    [path] = [path for path in handle.report if path.part == "decoder layers"]
    return path.path, path.why
