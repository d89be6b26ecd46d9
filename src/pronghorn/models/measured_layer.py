"""Time one layer of a model at hand on its CUDA device, and scale a step's estimate by it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pronghorn.data.batch import PackedBatch
from pronghorn.memory.devices import DeviceSpec
from pronghorn.memory.estimate import ModelDims, TrainSetup
from pronghorn.memory.pinned import PinnedPool
from pronghorn.memory.plan import Plan
from pronghorn.memory.step_time import StepTimes, step_times
from pronghorn.models.attach import attach, attached
from pronghorn.models.families import base_causal_lm, check_config

SECONDS = 0.3
"""How long at least a part is repeated to be timed: a GPU that was idle runs faster at first."""


def measured_times(
    model: Any, dims: ModelDims, setup: TrainSetup, spec: DeviceSpec, autocast: torch.dtype | None = None
) -> StepTimes:
    """Measure one layer's times, keeping everything, and the copy of its input; scale the device's estimate by them.

    The backbone runs with one layer and with two; the difference is the second layer's. Takes one or two seconds;
    gradients, random state and the model are left as they were.
    """
    base, before = base_causal_lm(model), attached(model)
    handle = before or attach(model)
    try:
        with (
            handle.trying(Plan.keep()),
            torch.cuda.device(base.device),
            torch.autocast("cuda", autocast, enabled=autocast is not None),
        ):
            handle.merge_weights()  # of all layers, as training does: a forward would merge those that are timed only
            return _measure(base, dims, setup, spec)
    finally:
        if before is None:
            handle.detach()
        torch.cuda.empty_cache()  # what the allocator keeps would be in training's way


def stream_dtype(base: Any) -> torch.dtype:
    """Return the dtype of what a causal LM's layers hand on: that of its embeddings, under autocast, too. It has
    `TrainSetup.stream_bytes` where layers are fused."""
    dtype: torch.dtype = base.get_input_embeddings().weight.dtype
    return dtype


def _measure(base: Any, dims: ModelDims, setup: TrainSetup, spec: DeviceSpec) -> StepTimes:
    device, backbone = base.device, base.base_model
    lengths = [setup.documents] * (setup.tokens // setup.documents) + [setup.tokens % setup.documents]
    packed = PackedBatch.build([n for n in lengths if n], tokens=setup.tokens, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    dtype, layers = stream_dtype(base), backbone.layers
    with torch.random.fork_rng(devices=[device]):
        states = torch.randn(1, setup.tokens, dims.hidden, device=device, dtype=dtype, requires_grad=True)
        seed = torch.randn_like(states)
        beside, given = check_config(base.config).beside_embeds, dict[str, Any]()
        if beside is not None:
            with torch.no_grad():
                given = beside(backbone, torch.zeros_like(positions))

        def step() -> Iterator[None]:
            yield
            inputs = {"inputs_embeds": states, "position_ids": positions, **given}
            y = backbone(**inputs, packed=packed, use_cache=False).last_hidden_state
            yield
            trained = [p for p in backbone.layers.parameters() if p.requires_grad]
            torch.autograd.grad(y, [states, *trained], seed, allow_unused=True)
            yield

        try:
            times = []
            for count in (1, 2):
                backbone.layers = nn.ModuleList(list(layers)[:count])
                times.append(_medians(step))
        finally:
            backbone.layers = layers
    forward, backward = (max(two - one, 1e-3) for one, two in zip(*times, strict=True))

    pool, copied = PinnedPool(pinned=True), 0.0
    if spec.pcie:
        host = pool.take(states.nbytes).like(states)

        def copy() -> Iterator[None]:
            yield
            host.copy_(states.detach(), non_blocking=True)
            yield

        [copied] = _medians(copy)
        pool.release()
    return step_times(dims, setup, spec).scaled(forward, backward, copied)


def _medians(work: Callable[[], Iterator[None]]) -> list[float]:
    """Time what `work` does between its yields, in milliseconds: medians of repeats that follow each other as in
    training, where the host launches ahead. The first ones, which may compile, tell how many there are to be."""

    def repeat(count: int) -> list[list[float]]:
        every: list[list[torch.cuda.Event]] = []
        for _ in range(count):
            every.append([])
            for _ in work():
                every[-1].append(torch.cuda.Event(enable_timing=True))
                every[-1][-1].record()
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) for start, end in pairwise(marks)] for marks in every]

    once = sum(repeat(2)[-1]) / 1e3
    found = repeat(min(max(int(SECONDS / once), 5), 100))
    return [statistics.median(times) for times in zip(*found[len(found) // 3 :], strict=True)]
