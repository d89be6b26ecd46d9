"""Weights that processes share: each holds a part of every layer, and gathers whole layers one ahead.

    forward    compute   … │ layer k      │ layer k + 1 │     layer k + 1's weights arrive while layer k computes, in
               gather        of k + 1       of k + 2          the buffer that layer k - 1 is done with

    backward   compute   … │ layer k      │ layer k - 1 │     the same, downwards
               gather        of k - 1       of k - 2

There are two buffers, and every weight has a fixed place in one of them: layer k's in buffer k mod 2. So fused layers
read weights where they always lie, and what autograd saved of them in the forward is right again in the backward. Bytes
are gathered as they are stored: a 4-bit base travels in 4 bits.

Either a layer's frozen weights are shared (LoRA), or all of it, which is trained: `parallel.training`. Float32
weights of products that fused layers compute in bfloat16 travel in bfloat16, into buffers that these read (`narrow`);
the parameters themselves then have no values but NaN. Adapters and what lies outside the layers (embeddings, head, last
norm) are whole in each process. FSDP2 would make DTensors of weights, which layers find in other places in each
forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pronghorn.errors import TrainingError
from pronghorn.kernels.packed import PackedTensor
from pronghorn.kernels.quantise import ROW_SCALES
from pronghorn.parallel import peers
from pronghorn.parallel.copies import ShownWeights
from pronghorn.parallel.training import TrainedParts
from pronghorn.parallel.unit import MASTER_BYTES, NARROW, Reference, Unit, WeightGroups, references

BUFFERS = 2
IN_BUFFER = "_pronghorn_in_buffer"
"""The attribute of a parameter that lies in a buffer (an `InBuffer`): its place must not change."""
FIRST = "_pronghorn_first_values"
"""The attribute of a shared parameter that holds what `first_values` returns of it."""
_SHARDED = "_pronghorn_sharded"
_NONE: frozenset[int] = frozenset()


class InBuffer(NamedTuple):
    """Where a parameter lies."""

    layers: ShardedLayers
    unit: Unit
    offset: int
    """In bytes."""


class ShardedLayers:
    """The weights of one model's decoder layers, all frozen or all trained, shared by the processes of a group.

    Args:
        device: where the buffers are; weights may still be on the CPU.
        group: of processes, all of which call the layers in the same order; None for all there are.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self._group, self.device = group, device
        self.processes, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._units: dict[int, list[Unit]] = {}
        self._wide: dict[tuple[bool, int], Tensor] = {}
        """Bytes as they are stored, by kind of unit and number of the buffer; of trained products only if they are
        wanted."""
        self._narrow: dict[int, Tensor] = {}
        """Trained products in 16 bits, by number of the buffer."""
        self._stand_in = torch.full((), math.nan, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._holds: list[tuple[int, frozenset[int]] | None] = [None] * BUFFERS
        """The layer whose weights are in each buffer, or on their way, and those that are there in 16 bits."""
        self._arrived: list[Any] = [None] * BUFFERS
        self._put_for: dict[Unit, frozenset[int]] = {}
        """What of a unit's parameters had no values of their own when they were put into place."""
        self._references: list[Reference] = []
        self._in_backward: tuple[int, frozenset[int]] | None = None
        self.narrow = _NONE
        """Identities of the parameters that the forward which is running reads in 16 bits; fused layers say so."""
        self.trained: TrainedParts | None = None
        """Where layers are trained."""
        self._shown: ShownWeights | None = None
        """Where these are copied."""
        self.gathered_by = f"gathered by {dist.get_backend(group)}"
        """How whole layers come together."""
        self.mapped_bytes = 0
        """Of what lies outside torch's allocator, in memory that other processes read."""

    def add(self, index: int, layer: nn.Module, groups: WeightGroups) -> None:
        """Keep a part of a layer's weights, and let go of the rest. All processes add the same layers.

        Args:
            index: the layer's place among those that are shared, in the order of the forward.
        """
        for parameter in layer.parameters():
            if not parameter.requires_grad:
                setattr(parameter, FIRST, first_values(parameter).to(self.device))
        self._references += references(layer, FIRST, ROW_SCALES)
        told = self.device, self.processes, self._rank
        units = [Unit(index, groups.products, *told, products=True), Unit(index, groups.others, *told)]
        self._units[index] = units = [unit for unit in units if unit.places]
        for unit in units:
            for place in unit.places:
                setattr(place.tensor, IN_BUFFER, InBuffer(self, unit, place.offset))
            self._make_room(unit)
            self._put(unit, frozenset(id(place.tensor) for place in unit.places) if unit.products else _NONE)
        layer.register_forward_pre_hook(lambda layer, args: self.forward_begins(index))
        layer.register_forward_hook(lambda layer, args, output: self._forward_ends(index, output))

    def _make_room(self, unit: Unit) -> None:
        """Make buffers anew that are too small for a unit. What they hold is gathered again when it is needed."""
        for kind, slot in [key for key, buffer in self._wide.items() if len(buffer) < unit.size]:
            if kind is unit.products:
                del self._wide[kind, slot]
                for index in range(slot, len(self), BUFFERS):
                    for other in self._units.get(index, ()):
                        if other.products is kind and other in self._put_for:
                            self._put(other, self._put_for.pop(other))

    def _buffer(self, unit: Unit) -> Tensor:
        """Return the buffer of a unit's bytes, with room for the largest of its kind."""
        key = unit.products, unit.layer % BUFFERS
        if key not in self._wide:
            self._wide[key] = torch.zeros(self._room(unit.products), dtype=torch.uint8, device=self.device)
        return self._wide[key]

    def _narrow_buffer(self, layer: int) -> Tensor:
        slot = layer % BUFFERS
        if slot not in self._narrow:
            self._narrow[slot] = torch.zeros(
                self._room(products=True) // MASTER_BYTES, dtype=NARROW, device=self.device
            )
        return self._narrow[slot]

    def _room(self, products: bool) -> int:
        return max(unit.size for units in self._units.values() for unit in units if unit.products is products)

    def train(self, first: Sequence[nn.Parameter] = ()) -> None:
        """Train all that was added: each process its parts. No more layers may be added.

        Args:
            first: parameters outside the layers whose gradients are complete before the last layer's backward.
        """
        units = [unit for index in range(len(self)) for unit in self._units[index]]
        self.trained = TrainedParts(units, self.processes, first)

    def open(self) -> None:
        """Copy weights out of other processes' memory from now on, where that can be; all processes call it."""
        units = [unit for index in range(len(self)) for unit in self._units[index]]
        if self.trained is None:
            reason = peers.open_parts(units, self._group)
            mapped = sum(len(unit.part) for unit in units)
        else:
            products = [unit for unit in units if unit.products]
            sizes = [ShownWeights.size(products), *self.trained.whole_bytes]
            mapped, found = sum(sizes), peers.open_memory(sizes, self.device, self._group)
            reason = found if isinstance(found, str) else ""
            if not isinstance(found, str):
                self._shown = ShownWeights(products, found[0], self._group)
                self.trained.copy_through(found[1:])
        if reason:
            self.gathered_by = f"gathered by {dist.get_backend(self._group)}: {reason}"
        else:
            self.gathered_by, self.mapped_bytes = "copied out of the other GPUs' memory", mapped

    @property
    def bytes(self) -> int:
        """Return the bytes that this process holds: its parts and the buffers."""
        trained = 0 if self.trained is None else self.trained.bytes
        parts = [unit.part for units in self._units.values() for unit in units]
        return trained + sum(each.nbytes for each in (*parts, *self._wide.values(), *self._narrow.values()))

    def narrowed(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Return where float32 weights [N_i, K] lie in 16 bits, one below the other [N, K], whenever their layer
        computes and `narrow` names them; None for weights that aren't a trained product's, or don't lie together."""
        places: list[InBuffer | None] = [getattr(weight, IN_BUFFER, None) for weight in weights]
        first, end = places[0], 0
        for place, weight in zip(places, weights, strict=True):
            if place is None or not place.unit.products or (end and place.offset != end):
                return None
            end = place.offset + weight.numel() * MASTER_BYTES
        assert first is not None
        whole = self._narrow_buffer(first.unit.layer)
        return whole[first.offset // MASTER_BYTES : end // MASTER_BYTES].view(-1, weights[0].shape[1])

    def use(self, index: int, narrow: frozenset[int], ahead: int) -> None:
        """Let compute wait for a layer's weights, and begin to gather those of the layer that comes next.

        Args:
            narrow: parameters that are read in 16 bits.
            ahead: 1 in a forward, -1 in a backward, 0 to gather nothing else.
        """
        self._gather(index, narrow)
        arrived = self._arrived[index % BUFFERS]
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
        following = index + ahead
        if ahead and following in self._units:
            self._gather(following, narrow)

    def _put(self, unit: Unit, narrow: frozenset[int]) -> None:
        """Let a unit's weights lie in its buffer, or have no values where they are read in 16 bits."""
        if self._put_for.get(unit) == narrow:
            return
        self._put_for[unit] = narrow
        for place in unit.places:
            if unit.products and id(place.tensor) in narrow:
                place.tensor.data = self._stand_in.expand(place.shape)
            else:
                place.tensor.data = place.of(self._buffer(unit))

    def lie_wide(self, unit: Unit) -> None:
        """Let a unit's weights lie in its buffer, without their values until they are gathered."""
        if self._put_for[unit]:
            self._put(unit, _NONE)
            self._holds[unit.layer % BUFFERS] = None

    def begin(self) -> None:
        """Make ready for a forward: trained parts may have changed, and weights been copied elsewhere."""
        self.narrow = _NONE
        if self.trained is not None:
            self.trained.finish()
            self._holds = [None] * BUFFERS
            if self._shown is not None:
                self._run(self._shown.show)
        self.put_back()

    def whole(self, index: int) -> list[Tensor]:
        """Return a layer's tensors as they are now, gathered into memory of their own. Every process calls it."""
        found = []
        for unit in self._units[index]:
            flat = torch.empty(unit.size, dtype=torch.uint8, device=self.device)
            event = self._run(partial(unit.gather, flat, self._group))
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)
            found += [place.of(flat) for place in unit.places]
        return found

    def load(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Take over this process's part of a layer's tensors, in the order in which `whole` gives them."""
        places = [(unit, place) for unit in self._units[index] for place in unit.places]
        for (unit, place), tensor in zip(places, tensors, strict=True):
            unit.load(place, tensor)

    def __len__(self) -> int:
        return len(self._units)

    def tensors(self, index: int) -> list[Tensor]:
        """Return the tensors of a layer whose values lie in its buffer, which may hold another layer's."""
        return [place.tensor for unit in self._units[index] for place in unit.places]

    def put_back(self) -> None:
        """Let weights that were copied elsewhere lie in their buffers again."""
        for reference in self._references:
            reference.put_back()
        for units in self._units.values():
            for unit in units:
                if self._is_moved(unit):
                    self._put(unit, self._put_for.pop(unit))

    def _is_moved(self, unit: Unit) -> bool:
        """Tell whether `.to` copied a unit's weights elsewhere: to the same device by another name, as trainers do.

        Raises:
            TrainingError: it made other weights of them.
        """
        place = unit.watched
        first, narrow = place.tensor, unit.products and id(place.tensor) in self._put_for[unit]
        if first.data_ptr() == (self._stand_in.data_ptr() if narrow else place.of(self._buffer(unit)).data_ptr()):
            return False
        if first.device.type != self.device.type or first.dtype is not place.dtype:
            raise TrainingError(
                f"weights that {self.processes} processes share were moved to {first.device} as {first.dtype}",
                "leave the model where it was loaded, in its dtype; launch.strategy: copies lets it be moved",
            )
        return True

    def _gather(self, index: int, narrow: frozenset[int]) -> None:
        """Start to gather a layer's weights, after all that compute was given so far: it may read the buffer."""
        slot = index % BUFFERS
        if self._holds[slot] == (index, narrow):
            return
        self._holds[slot] = index, narrow
        for unit in self._units[index]:
            self._put(unit, narrow)
        self._arrived[slot] = self._run(partial(self._bring, index, narrow))

    def _bring(self, index: int, narrow: frozenset[int]) -> None:
        """Gather a layer: a unit that is read in 16 bits in these, if that is all of it."""
        for unit in self._units[index]:
            inside = [id(place.tensor) in narrow for place in unit.places] if unit.products else [False]
            small = self._narrow_buffer(unit.layer)[: unit.size // MASTER_BYTES] if any(inside) else None
            if small is not None and all(inside):
                unit.gather_narrow(small, self._group)
                continue
            wide = self._buffer(unit)[: unit.size]
            unit.gather(wide, self._group)
            if small is not None:
                small.copy_(wide.view(torch.float32))

    def _run(self, work: Callable[[], None]) -> Any:
        """Do something on the stream of the gathers, and return the event of its end; at once on the CPU."""
        if self._stream is None:
            work()
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    def forward_begins(self, index: int) -> None:
        """Bring a layer's weights before its forward, or before it is recomputed in a backward."""
        if self._in_backward is not None and self._in_backward[0] == index:
            return self.use(*self._in_backward, ahead=0)
        self._in_backward = None
        self.use(index, self.narrow, ahead=1)

    def _forward_ends(self, index: int, output: Any) -> None:
        """Let gradients of a layer's output begin its backward, which reads in 16 bits what its forward did."""
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            again = self._in_backward  # the forward may be one in a backward
            narrow = again[1] if again is not None and again[0] == index else self.narrow
            hidden.register_hook(lambda _: self.backward_begins(index, narrow))

    def backward_begins(self, index: int, narrow: frozenset[int]) -> None:
        """Bring a layer's weights before its backward, as its forward read them."""
        self._in_backward = index, narrow
        if self.trained is not None:
            self.trained.backward_begins(index)
        self.use(index, narrow, ahead=-1)


def narrowed(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return where weights that are gathered in `dtype` for one product lie; None for any others."""
    place: InBuffer | None = getattr(weights[0], IN_BUFFER, None)
    return None if place is None or dtype is not NARROW else place.layers.narrowed(weights)


def lie_wide(weights: Sequence[Tensor]) -> None:
    """Let weights that processes share lie in their buffers as they are stored, where products will read them."""
    for weight in weights:
        place: InBuffer | None = getattr(weight, IN_BUFFER, None)
        if place is not None:
            place.layers.lie_wide(place.unit)


def narrow_reader(weights: Sequence[Tensor]) -> Callable[[], None] | None:
    """Return what tells the layers of these weights, at the begin of a forward, that they are read in 16 bits; None for
    no weights."""
    if not weights:
        return None
    place: InBuffer = getattr(weights[0], IN_BUFFER)
    return partial(setattr, place.layers, "narrow", frozenset(map(id, weights)))


def shard(model: Any, layers: nn.ModuleList, device: torch.device) -> ShardedLayers:
    """Let a causal LM share what is added of its layers among all processes. There is no way back."""
    group = dist.new_group()  # its own: gathers on their stream never wait for sums on another
    model.__dict__[_SHARDED] = shared = ShardedLayers(device, group)
    # not always the backbone: a causal LM may call its decoder past it
    caller = next(module for module in model.modules() if any(child is layers for child in module.children()))
    caller.register_forward_pre_hook(lambda backbone, args: shared.begin())
    return shared


def sharded(model: Any) -> ShardedLayers | None:
    """Return what a causal LM's layers share with other processes, or None."""
    found: ShardedLayers | None = model.__dict__.get(_SHARDED)
    return found


def whole_trained(model: Any) -> list[nn.Parameter]:
    """List a model's trained parameters that every process has whole."""
    return [p for p in model.parameters() if p.requires_grad and not hasattr(p, IN_BUFFER)]


def first_values(parameter: Any) -> Tensor:
    """Return a parameter's first eight values in float64, of a packed one as they are stored, of a shared one as it
    was."""
    kept: Tensor | None = getattr(parameter, FIRST, None)
    if kept is not None:
        return kept
    stored = parameter.parts[0] if isinstance(parameter, PackedTensor) else parameter.detach()
    return stored.reshape(-1)[:8].double()
