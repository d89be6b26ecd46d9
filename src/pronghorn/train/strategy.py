"""What each of several processes holds of a model: all of it, or a part of every layer's frozen weights."""

from __future__ import annotations

import torch

from pronghorn.config import Recipe
from pronghorn.memory.estimate import NF4_BYTES
from pronghorn.memory.strategies import Strategy as Strategy
from pronghorn.models.auto_plan import skeleton
from pronghorn.models.load import FoundModel

ROOM = 0.75
"""The share of a device's memory up to which weights leave enough for training."""


def strategy(recipe: Recipe, found: FoundModel, processes: int, device: torch.device) -> Strategy:
    """Choose what each process holds: what is asked for or, for `auto`, copies unless the weights alone nearly fill a
    GPU. One process holds all of it, and so does each where weights are trained or copied in 8 bits."""
    asked = recipe.launch.strategy
    able = recipe.adapter.method == "lora" and recipe.precision.compute == "dtype"
    if processes == 1 or not able or asked == "copies":
        return Strategy.COPIES
    if asked == "sharded":
        return Strategy.SHARDED
    if device.type != "cuda":
        return Strategy.COPIES
    full = weight_bytes(recipe, found) > ROOM * torch.cuda.get_device_properties(device).total_memory
    return Strategy.SHARDED if full else Strategy.COPIES


def weight_bytes(recipe: Recipe, found: FoundModel) -> float:
    """Return about how many bytes a model's weights take as they are stored; 0 where that isn't known before it is
    read (GGUF)."""
    config = (found.base or found).config
    if config is None:
        return 0
    model = skeleton(config)
    four_bits = recipe.model.load_in_4bit
    stored = (getattr(p, "stored_bytes", None) for p in model.parameters())
    return sum(
        kept or p.numel() * (NF4_BYTES if four_bits and p.dim() > 1 else 2)
        for p, kept in zip(model.parameters(), stored, strict=True)
    )
