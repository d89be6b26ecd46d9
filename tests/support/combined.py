"""What combines: a step of each group of families, method, base, compute, policy and strategy, and what it comes to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pronghorn.config.recipe import Recipe
from pronghorn.errors import PronghornError
from pronghorn.families.registry import family_of
from pronghorn.layers.decoder import FusedLayers
from pronghorn.loading.share import share_layers
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import Handle, attach
from pronghorn.models.families import base_causal_lm, decoder_layers
from pronghorn.models.probe import require_isolation
from pronghorn.parity.quantised import quantised_products
from pronghorn.parity.quantised_experts import quantised_experts
from pronghorn.precision.compute import Compute
from support.documents import LENGTHS, ROW, gradients, one_document_at_a_time
from support.fused import with_adapters
from support.generic import generic_model
from support.processes import alone, gather_gradients
from support.tiny import in_4_bits, packed_row, tiny_model

BATCH = packed_row(LENGTHS, ROW)
SIZES: dict[str, Any] = {"intermediate_size": 128}  # 4-bit blocks end with the rows
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 8}  # all of them: rounding moves no token to another
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", SIZES),
    "experts": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 64}),
    "gated delta net": ("qwen3_5_text", SIZES | {"linear_num_key_heads": 16, "linear_num_value_heads": 16}),
    "shared keys, per-layer input": ("gemma4_text", SIZES | {"hidden_size_per_layer_input": 64}),
    "proven generic": ("starcoder2", SIZES),
}
"""A family of each group, and its sizes."""
METHODS = {
    "LoRA, float32": ("lora", "float32", "dtype"),
    "LoRA, float32, fp8": ("lora", "float32", "fp8"),
    "LoRA, bf16": ("lora", "bf16", "dtype"),
    "LoRA, bf16, fp8": ("lora", "bf16", "fp8"),
    "LoRA, bf16, fp8_both": ("lora", "bf16", "fp8_both"),
    "LoRA, bf16, int8": ("lora", "bf16", "int8"),
    "LoRA, NF4": ("lora", "NF4", "dtype"),
    "LoRA, NF4, fp8": ("lora", "NF4", "fp8"),
    "LoRA, NF4, fp8_both": ("lora", "NF4", "fp8_both"),
    "LoRA, NF4, int8": ("lora", "NF4", "int8"),
    "full, float32": ("full", "float32", "dtype"),
    "full, bf16": ("full", "bf16", "dtype"),
    "full, bf16, fp8": ("full", "bf16", "fp8"),
    "full, NF4": ("full", "NF4", "dtype"),
}
POLICIES = {"keep": Policy.KEEP, "recompute": Policy.RECOMPUTE_LAYER, "offload": Policy.OFFLOAD}
STRATEGIES = {
    "DDP": ("LoRA, float32", "full, float32"),
    "shared layers": (
        *("LoRA, float32", "LoRA, NF4", "LoRA, bf16, fp8", "LoRA, bf16, fp8_both", "LoRA, NF4, fp8_both"),
        "LoRA, bf16, int8",
        "full, float32",
    ),
    "FSDP2": ("LoRA, float32", "full, float32"),
}
"""With the methods that are tried."""


class Cell(NamedTuple):
    """A cell of the table."""

    method: str
    policy: str
    strategy: str
    group: str


def cells() -> Iterator[Cell]:
    """Yield all cells: every method under every policy on one GPU, and some methods under each strategy."""
    for group in GROUPS:
        for method in METHODS:
            for policy in POLICIES:
                yield Cell(method, policy, "one GPU", group)
        for strategy, methods in STRATEGIES.items():
            for method in methods:
                for policy in ("keep", "recompute"):
                    yield Cell(method, policy, strategy, group)


def outcome(cell: Cell) -> str:
    """Take the cell's step and compare it: "yes", or "refused: why"."""
    try:
        _step(cell)
    except PronghornError as error:
        return f"refused: {error.problem}"
    return "yes"


def _check_recipe(base: str, method: str, compute: str) -> None:
    """Raise what a recipe of these raises, before anything is loaded."""
    table = {
        "model": {"name": "x", "max_seq_length": 64, "load_in_4bit": base == "NF4"},
        "adapter": {"method": method},
        "data": {"train": __file__},
        "train": {"output": "x"},
        "precision": {"dtype": "float32" if base == "float32" else "bfloat16", "compute": compute},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(json.dumps(table))  # which is YAML
        Recipe.load(path)


def _model(cell: Cell) -> Any:
    method, base, compute = METHODS[cell.method]
    _check_recipe(base, method, compute)
    family, sizes = GROUPS[cell.group]
    model = generic_model(family, **sizes) if cell.group == "proven generic" else tiny_model(family, **sizes)
    if method == "full":
        return model  # float32 masters, under autocast for 16 bits
    model = model.to(torch.float32 if base == "float32" else torch.bfloat16)
    return with_adapters(in_4_bits(model) if base == "NF4" else model)


def _loss_and_gradients(model: Any, autocast: bool) -> tuple[float, dict[str, torch.Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**BATCH).loss
    loss.backward()
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        gather_gradients(model)
    found = {name: _whole(gradient).clone() for name, gradient in gradients(model).items()}
    model.zero_grad(set_to_none=True)
    return loss.item(), found


def _whole(gradient: Any) -> torch.Tensor:
    whole: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


@contextmanager
def _in_8_bits(model: Any, compute: str, experts: bool) -> Iterator[None]:
    """Round the operands of the products that are in 8 bits to these in the reference, too, while the block runs."""
    base = base_causal_lm(model)
    layers = FusedLayers(base.base_model, family_of(base.config), "auto", Compute.of(compute))
    with (
        quantised_products(layers.coded_products(torch.bfloat16)),
        quantised_experts(layers.coded_experts(torch.bfloat16) if experts else [], Compute.of(compute).rule),
    ):
        yield


def _step(cell: Cell) -> None:
    """Compare loss and every gradient with each document's by itself, without a policy or a strategy."""
    method, base, compute = METHODS[cell.method]
    model, autocast = _model(cell), method == "full" and base == "bf16"
    rounded = (
        nullcontext()
        if cell.group == "proven generic"
        else _in_8_bits(model, compute, cell.strategy != "shared layers")
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), rounded:
        _, right = one_document_at_a_time(model, BATCH)
        right.backward()
    exact = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad(set_to_none=True)
    with nullcontext() if cell.strategy == "one GPU" else alone():
        if cell.strategy == "shared layers":
            share_layers(model, torch.device("cpu"), compute=Compute.of(compute))
        layers = "auto" if cell.group == "proven generic" else "fused"
        handle: Handle = attach(model, Plan((POLICIES[cell.policy],)), layers=layers, compute=compute)
        if cell.strategy == "FSDP2" and cell.group == "proven generic":
            require_isolation(model)  # of whole weights
        loss, found = _loss_and_gradients(_wrapped(cell.strategy, model), autocast)
    found = {name.removeprefix("module."): gradient for name, gradient in found.items()}
    assert handle.layers is None or (handle.layers.in_8_bits()[0] > 0) is (compute != "dtype")
    coarse = base != "float32"
    assert abs(loss - right.item()) < (0.02 if coarse else 1e-4) * right.item()
    least = 0.95 if compute == "fp8_both" else 0.99 if coarse else 0.99999
    scale = max(g.abs().max() for g in exact.values())
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        if gradient.abs().max() > (0.02 if coarse else 1e-4) * scale:  # others are rounding in 16 bits
            pair = (value.double().flatten() for value in (found[name], gradient))
            assert torch.nn.functional.cosine_similarity(*pair, 0) > least, name


def _wrapped(strategy: str, model: Any) -> Any:
    """Wrap an attached model."""
    if strategy == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    if strategy == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        for layer in decoder_layers(base_causal_lm(model)):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model
