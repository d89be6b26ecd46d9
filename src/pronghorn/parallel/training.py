"""Train weights that processes share (`parallel.sharded`): each has a part of every layer in float32, and the optimiser
steps on these parts alone.

    backward   compute   … │ layer k + 1 │ layer k                │     the gradients of layer k + 1 are summed over all
               reduce                      of k + 1, into parts         processes while layer k computes

A layer's gradients are whole until the layer before it has gone backward, by when they were copied into one buffer and
summed. Micro-batches add up in the parts. The head's gradients are there when the layers' backward begins, and are
averaged beside it. All in float32. NCCL sums, or each GPU adds up what it copies from the others
(`parallel.copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pronghorn.errors import UnsupportedError
from pronghorn.parallel.copies import ShownGradients
from pronghorn.parallel.peers import Mapped
from pronghorn.parallel.unit import MASTER_BYTES, Unit

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Piece(NamedTuple):
    """What the optimiser steps on: numbers of one unit that lie together in this process's part."""

    unit: int
    begin: int
    """The first of them, counted from the unit's begin."""
    parameter: nn.Parameter


class TrainedParts:
    """This process's parts of the layers' trained weights, and of their gradients.

    Args:
        units: of all layers, in the order of the forward.
        processes: of the default group, all of which share the layers.
        first: parameters outside the layers whose gradients are complete before the last layer's backward.
    Raises:
        UnsupportedError: weights that aren't float32, or only some are trained.
    """

    def __init__(self, units: Sequence[Unit], processes: int, first: Sequence[nn.Parameter] = ()) -> None:
        tensors = [place.tensor for unit in units for place in unit.places]
        if any(not t.requires_grad or t.dtype is not torch.float32 for t in tensors):
            raise UnsupportedError(
                "processes share trained layers whole and in float32, and here some weights are frozen or in 16 bits",
                "load the model in float32 with every weight trained, or use launch.strategy: copies",
            )
        self._layers = [unit.layer for unit in units]
        self._places = [[(place.tensor, place.offset // MASTER_BYTES) for place in unit.places] for unit in units]
        self._processes, self._rank, self.first = processes, dist.get_rank(), tuple(first)
        self.parts = [nn.Parameter(unit.part.view(torch.float32)) for unit in units]
        """Float32 [N_u] of each unit."""
        self.names = [f"layers.{u.layer} ({'products' if u.products else 'other weights'}, shared)" for u in units]
        self.gradients = [torch.zeros_like(part.data) for part in self.parts]
        self._of_products = [unit.products for unit in units]
        self._device = units[0].part.device
        sizes = {
            kind: max(len(g) for g, of in zip(self.gradients, self._of_products, strict=True) if of is kind)
            for kind in set(self._of_products)
        }
        self._whole = {kind: torch.zeros(size * processes, device=self._device) for kind, size in sizes.items()}
        self._written: dict[bool, list[tuple[int, int]]] = {}
        """Begin and size of what was last written to each buffer; zeros lie between."""
        self._summed = torch.empty(max(sizes.values()), device=self._device)
        self._shown: dict[bool, ShownGradients] = {}
        """Instead of NCCL's sums, by kind."""
        self._group = dist.new_group()  # its own, beside gathers
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reduced: Any = None
        self._copied: list[Tensor] = []
        """Gradients that the stream may still copy from."""
        self._left = -1
        """The last unit whose gradients of this backward were not collected."""
        for part, gradient in zip(self.parts, self.gradients, strict=True):
            part.grad = gradient

    @property
    def bytes(self) -> int:
        """Return the bytes of gradients and their buffers."""
        shown = sum(each.bytes for each in self._shown.values())
        return shown + sum(each.nbytes for each in (*self.gradients, *self._whole.values(), self._summed))

    @property
    def whole_bytes(self) -> list[int]:
        """Return the bytes of each buffer of whole gradients, by kind."""
        return [whole.nbytes for whole in self._whole.values()]

    def copy_through(self, mapped: Sequence[Mapped]) -> None:
        """Add up gradients that are copied out of other processes' memory, from now on.

        Args:
            mapped: for each of `whole_bytes`.
        """
        for kind, memory in zip(self._whole, mapped, strict=True):
            part = len(self._whole[kind]) // self._processes
            self._shown[kind] = ShownGradients(memory, part, self._rank, self._group)
            self._whole[kind] = self._shown[kind].own.zero_()

    def finish(self) -> None:
        """Collect what is left of a backward, and let compute wait for all sums."""
        self._collect_above(-1)
        if self._reduced is not None:
            torch.cuda.current_stream(self._device).wait_event(self._reduced)
            self._copied = []

    def backward_begins(self, layer: int) -> None:
        """Begin to sum the gradients of the layers above one whose backward begins."""
        if self._left < 0 or self._layers[self._left] < layer:  # another backward, of any forward
            self.finish()
            self._left = len(self.parts) - 1
            if self.first:
                self._beside_compute(self._average_first)
        self._collect_above(layer)

    def _collect_above(self, layer: int) -> None:
        while self._left >= 0 and (done := self._layers[self._left]) > layer:
            units = [unit for unit in range(self._left + 1) if self._layers[unit] == done]
            self._collect(units)
            self._left -= len(units)

    @torch.no_grad()
    def _collect(self, units: list[int]) -> None:
        """Begin to sum the gradients of one layer."""
        # an expert that saw no token has none
        given = {unit: [(t.grad, begin) for t, begin in self._places[unit] if t.grad is not None] for unit in units}
        for tensor, _ in (place for unit in units for place in self._places[unit]):
            tensor.grad = None
        if self._reduced is not None:  # from here on memory of the gradients before may be used again
            torch.cuda.current_stream(self._device).wait_event(self._reduced)
        self._copied = [gradient for gradients in given.values() for gradient, _ in gradients]
        self._beside_compute(lambda: self._sum(given))

    def _beside_compute(self, work: Callable[[], object]) -> None:
        """Do something on the stream of the sums, after all that compute was given so far."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            self._reduced = self._stream.record_event()

    def _average_first(self) -> None:
        """Average gradients over all processes; what earlier micro-batches left is averaged, and stays as it is."""
        for parameter in self.first:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._group)
            parameter.grad.div_(self._processes)

    def _sum(self, given: dict[int, list[tuple[Tensor, int]]]) -> None:
        """Sum gradients over all processes into their parts.

        Args:
            given: by unit, each with the number that it begins at.
        """
        for unit, gradients in given.items():
            part, kind = self.gradients[unit], self._of_products[unit]
            whole, summed = self._whole[kind][: len(part) * self._processes], self._summed[: len(part)]
            written = [(begin, grad.numel()) for grad, begin in gradients]
            shown = self._shown.get(kind)
            if shown is not None:
                shown.meet()
            if written != self._written.get(kind):
                self._whole[kind].zero_()
                self._written[kind] = written
            for grad, begin in gradients:
                whole[begin : begin + grad.numel()].copy_(grad.view(-1))
            if shown is None:
                _reduce_scatter(summed, whole, group=self._group)
            else:
                shown.sum(summed)
            part.add_(summed.div_(self._processes))

    def clear(self) -> None:
        """Set the gradients to zero, after an optimiser's step."""
        torch._foreach_zero_(self.gradients)

    def pieces(self, decayed: set[int]) -> list[tuple[bool, Piece]]:
        """Cut this process's parts where weights that decay meet others, and tell which do.

        Args:
            decayed: identities of the parameters that decay.
        """
        found = []
        for unit, (part, gradient) in enumerate(zip(self.parts, self.gradients, strict=True)):
            first = self._rank * len(part)
            runs = [
                (decays, min(begin for _, begin in run), max(begin + t.numel() for t, begin in run))
                for decays, together in groupby(self._places[unit], key=lambda place: id(place[0]) in decayed)
                for run in [list(together)]
            ]
            for decays, begin, end in runs:
                here = slice(max(begin - first, 0), min(end - first, len(part)))
                if here.start < here.stop:
                    parameter = nn.Parameter(part.data[here])
                    parameter.grad = gradient[here]
                    found.append((decays, Piece(unit, first + here.start, parameter)))
        return found

    def spans(self, index: int) -> list[tuple[Tensor, int]]:
        """Return a unit's parameters, and the number that each begins at."""
        return self._places[index]
