"""A backbone that was captured as two CUDA graphs, and the function that replays them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.data.batch import PackedBatch
from pronghorn.errors import TrainingError
from pronghorn.kernels.once import refuse_second_derivatives


@dataclass
class Captured:
    """A forward and a backward graph, and the tensors that they read and write."""

    embeds: Tensor
    position_ids: Tensor
    packed: PackedBatch
    out: Tensor
    d_out: Tensor
    gradients: Tensor
    """All parameters' gradients, one after the other."""
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    runs: list[Any]
    """Of the layers, whose copies of adapters are written to: by a replay, too, when layers that did something else in
    between have made others."""


class _Waiting:
    """Lives as long as a forward's backward may come."""


class Replay(torch.autograd.Function):
    """The backbone's forward and backward by graphs: one function to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        embeds: Tensor,
        position_ids: Tensor,
        packed: PackedBatch,
        graphs: Any,
        captured: Captured,
        *parameters: Tensor,
    ) -> Tensor:
        captured.embeds.copy_(embeds)
        captured.position_ids.copy_(position_ids)
        packed.without_labels().copy_into(captured.packed)
        captured.forward.replay()
        graphs.replays += 1
        ctx.graphs, ctx.captured, ctx.replay = graphs, captured, graphs.replays
        ctx.waiting = _Waiting()
        graphs.waits = weakref.ref(ctx.waiting)
        ctx.shapes = [parameter.shape for parameter in parameters]
        return captured.out.clone()

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, d_out: Tensor) -> Any:
        captured: Captured = ctx.captured
        graphs, ctx.graphs = ctx.graphs, None  # a loss that is kept keeps no model
        if graphs is None or graphs.replays != ctx.replay:
            raise TrainingError(
                "what this batch's backward needs was overwritten by another forward, or by a backward before",
                "attach with graph='off' for several backwards of a forward (retain_graph)",
            )
        graphs.replays += 1
        ctx.waiting = None
        ctx.captured = None  # a loss that is kept doesn't keep its memory
        captured.d_out.copy_(d_out)
        captured.backward.replay()
        gradients = captured.gradients.clone().split([shape.numel() for shape in ctx.shapes])
        if not graphs.holds(captured):  # else `clear` waits
            torch.cuda.current_stream(d_out.device).synchronize()
        return *(None,) * 5, *(flat.view(shape) for flat, shape in zip(gradients, ctx.shapes, strict=True))
