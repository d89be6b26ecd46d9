"""What each of several processes holds of a model: all of it, or a part of every layer's weights."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from pronghorn.config.recipe import Recipe
from pronghorn.errors import UnsupportedError
from pronghorn.loading.load import FoundModel
from pronghorn.memory.devices import DeviceSpec, parse_bytes
from pronghorn.memory.estimate import NF4_BYTES
from pronghorn.memory.planner import PlanDoesNotFit
from pronghorn.memory.strategies import Candidate, Strategy, choose
from pronghorn.models.auto_plan import dims_of, smallest_device
from pronghorn.train.weightless import skeleton, unshared_reason, weightless, work_of

ROOM = 0.75
"""The share of a device's memory up to which weights leave enough for training."""

ANY_LINK = 1e10
"""Bytes a second where no rate between GPUs is known: what fits doesn't depend on it."""
FULL_SHARE = 8
"""Masters, gradients and AdamW's states of full fine-tuning against weights in 16 bits."""


class Held(NamedTuple):
    """What each process holds."""

    strategy: Strategy
    copy_trained: bool = False
    """Whether trained layers that are shared are copied out of the other GPUs' memory, where that can be."""


def strategy(recipe: Recipe, found: FoundModel, processes: int, device: torch.device) -> Held:
    """Choose what each process holds: what is asked for or, for `auto`, what `pronghorn plan --gpus` chooses.

    One process holds all of it, and so does each where an optimiser needs whole weights. The plan is for the smallest
    of the processes' GPUs; all processes call it.
    """
    asked = recipe.launch.strategy
    if processes == 1 or asked == "copies":
        return Held(Strategy.COPIES)
    full = recipe.adapter.method == "full"
    if device.type != "cuda" or unshared_reason(recipe) or (asked == "sharded" and not full):
        return Held(Strategy.SHARDED if asked == "sharded" else Strategy.COPIES)
    smallest = smallest_device(device)
    try:
        chosen = planned(recipe, found, processes, smallest)
        return Held(chosen.strategy, chosen.work.copy_trained)
    except PlanDoesNotFit:
        return Held(Strategy.SHARDED)  # the plan of the loaded model says what would fit
    except UnsupportedError:  # no plan is made of it
        pass
    size = (FULL_SHARE if full else 1) * weight_bytes(recipe, found)
    shared = asked == "sharded" or size > ROOM * smallest.memory_bytes
    return Held(Strategy.SHARDED if shared else Strategy.COPIES)


def planned(recipe: Recipe, found: FoundModel, processes: int, device: DeviceSpec) -> Candidate:
    """Return what fits a device, by the plan of the model without weights: the strategy that is asked for, if one is.

    Raises:
        PlanDoesNotFit: none does; UnsupportedError: no plan is made of such a model.
    """
    from pronghorn.train.build import autocast_dtype, of_one_process

    wanted = None if recipe.launch.strategy == "auto" else Strategy(recipe.launch.strategy)
    recipe = of_one_process(recipe, processes)
    handle = weightless(recipe, found)
    budget = None if recipe.memory.budget is None else parse_bytes(recipe.memory.budget, "memory.budget")
    setup = work_of(recipe, handle, autocast_dtype(recipe))
    dims, asked = dims_of(handle.model), handle.plan
    device = replace(device, link=device.link or ANY_LINK)
    return choose(dims, setup, device, processes, budget_bytes=budget, asked=asked, strategy=wanted).chosen


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
