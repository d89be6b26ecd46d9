"""Train weights that processes share (`memory.sharded`): each has a part of every layer in float32, and the optimiser
steps on these parts alone.

    backward   compute   … │ layer k + 1 │ layer k                │     the gradients of layer k + 1 are summed over all
               reduce                      of k + 1, into parts         processes while layer k computes

A layer's gradients are whole only until the next backward begins: copied into one buffer, then freed. Micro-batches add
up in the parts. All in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pronghorn.errors import UnsupportedError

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_SIZE = 4
"""Bytes of a number."""


class Piece(NamedTuple):
    """What the optimiser steps on: numbers of one layer that lie together in this process's part."""

    layer: int
    begin: int
    """The first of them, counted from the layer's begin."""
    parameter: nn.Parameter


class TrainedParts:
    """This process's parts of the layers' trained weights, and of their gradients.

    Args:
        shards: bytes of this process's part of each layer.
        tensors: for each layer the parameters and the bytes that they begin at.
        processes: of the default group, all of which share the layers.
    Raises:
        UnsupportedError: weights that aren't float32, or only some are trained.
    """

    def __init__(
        self, shards: Sequence[Tensor], tensors: Sequence[Sequence[tuple[Tensor, int]]], processes: int
    ) -> None:
        if any(not t.requires_grad or t.dtype is not torch.float32 for layer in tensors for t, _ in layer):
            raise UnsupportedError(
                "layers to share whose weights are trained, but not all of them, or not in float32",
                "load the model in float32 with every weight trained, or use launch.strategy: copies",
            )
        self._places = [[(t, offset // _SIZE) for t, offset in layer] for layer in tensors]
        self._processes, self._rank = processes, dist.get_rank()
        self.parts = [nn.Parameter(shard.view(torch.float32)) for shard in shards]
        """Float32 [N_l] of each layer."""
        self.gradients = [torch.zeros_like(part.data) for part in self.parts]
        longest = max(self.gradients, key=len)
        self._whole = longest.new_zeros(len(longest) * processes)
        self._summed = torch.empty_like(longest)
        self._group = dist.new_group()  # its own, beside gathers
        self._stream = torch.cuda.Stream(longest.device) if longest.device.type == "cuda" else None
        self._reduced: Any = None
        self._left = -1
        """The last layer whose gradients of this backward were not collected."""
        for part, gradient in zip(self.parts, self.gradients, strict=True):
            part.grad = gradient

    @property
    def bytes(self) -> int:
        """Return the bytes of gradients and their buffers."""
        return sum(each.nbytes for each in (*self.gradients, self._whole, self._summed))

    def begin(self) -> None:
        """Note that a forward begins, and finish the backward before."""
        self.finish()
        if torch.is_grad_enabled():
            self._left = len(self.parts) - 1

    def finish(self) -> None:
        """Collect what is left of a backward, and let compute wait for all sums."""
        self.collect_above(-1)
        if self._reduced is not None:
            torch.cuda.current_stream(self._whole.device).wait_event(self._reduced)

    def collect_above(self, index: int) -> None:
        """Begin to sum the gradients of the layers above one, whose backward is over."""
        for layer in range(self._left, index, -1):
            self._collect(layer)
            self._left = layer - 1

    @torch.no_grad()
    def _collect(self, index: int) -> None:
        if self._reduced is not None:  # which reads the buffer
            torch.cuda.current_stream(self._whole.device).wait_event(self._reduced)
        part = self.gradients[index]
        whole, summed = self._whole[: len(part) * self._processes].zero_(), self._summed[: len(part)]
        for tensor, begin in self._places[index]:
            if tensor.grad is not None:  # an expert that saw no token has none
                whole[begin : begin + tensor.numel()].copy_(tensor.grad.view(-1))
                tensor.grad = None
        if self._stream is None:
            _reduce_scatter(summed, whole, group=self._group)
            part.add_(summed.div_(self._processes))
            return
        self._stream.wait_stream(torch.cuda.current_stream(whole.device))
        with torch.cuda.stream(self._stream):
            _reduce_scatter(summed, whole, group=self._group)
            part.add_(summed.div_(self._processes))
            self._reduced = self._stream.record_event()

    def clear(self) -> None:
        """Set the gradients to zero, after an optimiser's step."""
        torch._foreach_zero_(self.gradients)

    def pieces(self, decayed: set[int]) -> list[tuple[bool, Piece]]:
        """Cut this process's parts where weights that decay meet others, and tell which do.

        Args:
            decayed: identities of the parameters that decay.
        """
        found = []
        for layer, (part, gradient) in enumerate(zip(self.parts, self.gradients, strict=True)):
            first = self._rank * len(part)
            runs = [
                (decays, min(begin for _, begin in run), max(begin + t.numel() for t, begin in run))
                for decays, together in groupby(self._places[layer], key=lambda place: id(place[0]) in decayed)
                for run in [list(together)]
            ]
            for decays, begin, end in runs:
                here = slice(max(begin - first, 0), min(end - first, len(part)))
                if here.start < here.stop:
                    parameter = nn.Parameter(part.data[here])
                    parameter.grad = gradient[here]
                    found.append((decays, Piece(layer, first + here.start, parameter)))
        return found

    def spans(self, index: int) -> list[tuple[Tensor, int]]:
        """Return a layer's parameters, and the number that each begins at."""
        return self._places[index]
