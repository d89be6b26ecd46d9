"""Weights that processes share: each holds a part of every layer, and gathers whole layers one ahead.

    forward    compute   … │ layer k      │ layer k + 1 │     layer k + 1's weights arrive while layer k computes, in
               gather        of k + 1       of k + 2          the buffer that layer k - 1 is done with

    backward   compute   … │ layer k      │ layer k - 1 │     the same, downwards
               gather        of k - 1       of k - 2

There are two buffers, and every weight has a fixed place in one of them: layer k's in buffer k mod 2. So the model's
parameters stay the very tensors that they were, fused layers read them where they always lie, and what autograd saved
of them in the forward is right again in the backward. Bytes are gathered as they are stored: a 4-bit base travels in 4
bits.

Either a layer's frozen weights are shared (LoRA), or all of it, which is trained: `memory.sharded_training`. Adapters
and what lies outside the layers (embeddings, head, last norm) are whole in each process. FSDP2 would make DTensors of
weights, which layers find in other places in each forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pronghorn.errors import TrainingError, UnsupportedError
from pronghorn.kernels.packed import PackedTensor
from pronghorn.memory.sharded_training import TrainedParts

BUFFERS = 2
IN_BUFFER = "_pronghorn_in_buffer"
"""The attribute of a parameter whose place in a buffer must not change."""
_FIRST = "_pronghorn_first_values"
_SHARDED = "_pronghorn_sharded"
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
ALIGNED = 256
"""Bytes that groups of weights begin at a multiple of."""


class ShardedLayers:
    """The weights of one model's decoder layers, all frozen or all trained, shared by the processes of a group.

    Args:
        device: where the buffers are; weights may still be on the CPU.
        group: of processes, all of which call the layers in the same order; None for all there are.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self._group, self._device = group, device
        self.processes, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._buffers = [torch.zeros(0, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._holds: list[int | None] = [None] * BUFFERS
        """The layer whose weights are in each buffer, or on their way."""
        self._arrived: list[Any] = [None] * BUFFERS
        self._in_backward: int | None = None
        self._shards: dict[int, Tensor] = {}
        self._places: dict[int, list[_Place]] = {}
        self.trained: TrainedParts | None = None
        """Where layers are trained."""

    def add(self, index: int, layer: nn.Module, groups: list[list[Tensor]]) -> None:
        """Keep a part of a layer's weights, and let go of the rest. All processes add the same layers.

        Args:
            index: the layer's place among those that are shared, in the order of the forward.
            groups: weights that must follow each other without a gap, as `weight_groups` lists them.
        """
        for parameter in layer.parameters():
            if not parameter.requires_grad:
                setattr(parameter, _FIRST, first_values(parameter).to(self._device))
        places, size = _placed(groups)
        part = -(-size // (self.processes * ALIGNED)) * ALIGNED
        self._shards[index] = shard = torch.zeros(part, dtype=torch.uint8, device=self._device)
        for place in places:
            setattr(place.tensor, IN_BUFFER, True)
            _copy_part(shard, self._rank * part, _bytes(place.tensor), place.offset)
        self._places[index] = places
        self._widen(part * self.processes)
        self._put(index)
        layer.register_forward_pre_hook(_Before(self, index))
        layer.register_forward_hook(_After(self, index))

    def _widen(self, size: int) -> None:
        """Make buffers of at least so many bytes. What they hold is gathered again when it is needed."""
        if size <= self._buffers[0].numel():
            return
        self._buffers = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        for index in self._places:
            self._put(index)

    def train(self) -> None:
        """Train all that was added: each process its parts. No more layers may be added."""
        layers = range(len(self))
        tensors = [[(place.tensor, place.offset) for place in self._places[index]] for index in layers]
        self.trained = TrainedParts([self._shards[index] for index in layers], tensors, self.processes)

    @property
    def bytes(self) -> int:
        """Return the bytes that this process holds: its parts and the buffers."""
        trained = 0 if self.trained is None else self.trained.bytes
        return trained + sum(each.nbytes for each in (*self._shards.values(), *self._buffers))

    def use(self, index: int, ahead: int) -> None:
        """Let compute wait for a layer's weights, and begin to gather those of the layer that comes next.

        Args:
            ahead: 1 in a forward, -1 in a backward, 0 to gather nothing else.
        """
        self._gather(index)
        arrived = self._arrived[index % BUFFERS]
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        following = index + ahead
        if ahead and following in self._shards:
            self._gather(following)

    def _put(self, index: int) -> None:
        """Let a layer's weights lie in its buffer."""
        buffer = self._buffers[index % BUFFERS]
        for place in self._places[index]:
            part = buffer[place.offset : place.offset + place.tensor.nbytes]
            place.tensor.data = part.view(place.dtype).view(place.tensor.shape)

    def begin(self) -> None:
        """Make ready for a forward: trained parts may have changed, and weights been copied elsewhere."""
        if self.trained is not None:
            self.trained.begin()
            self._holds = [None] * BUFFERS
        self.put_back()

    def whole(self, index: int) -> list[Tensor]:
        """Return a layer's tensors as they are now, gathered. Every process calls it."""
        self._holds[index % BUFFERS] = None
        self.use(index, 0)
        return [place.tensor.detach() for place in self._places[index]]

    def load(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Take over this process's part of a layer's tensors, in the order in which `whole` gives them."""
        shard = self._shards[index]
        begin = self._rank * shard.numel()
        for place, tensor in zip(self._places[index], tensors, strict=True):
            _copy_part(shard, begin, _bytes(tensor.to(place.dtype)), place.offset)

    def outside(self, model: nn.Module) -> list[Tensor]:
        """Return what of a model is trained and whole in every process."""
        inside = {id(place.tensor) for layer in self._places.values() for place in layer}
        return [p for p in model.parameters() if p.requires_grad and id(p) not in inside]

    def __len__(self) -> int:
        return len(self._shards)

    def tensors(self, index: int) -> list[Tensor]:
        """Return the tensors of a layer whose values lie in its buffer, which may hold another layer's."""
        return [place.tensor for place in self._places[index]]

    def put_back(self) -> None:
        """Let weights that were copied elsewhere lie in their buffers again."""
        for index in self._places:
            if self._is_moved(index):
                self._put(index)

    def _is_moved(self, index: int) -> bool:
        """Tell whether `.to` copied a layer's weights elsewhere: to the same device by another name, as trainers do.

        Raises:
            TrainingError: it made other weights of them.
        """
        place, buffer = self._places[index][0], self._buffers[index % BUFFERS]
        first = place.tensor
        if first.data_ptr() == buffer.data_ptr() + place.offset:
            return False
        if first.device.type != buffer.device.type or first.dtype is not place.dtype:
            raise TrainingError(
                f"weights that {self.processes} processes share were moved to {first.device} as {first.dtype}",
                "leave the model where it was loaded, in its dtype; launch.strategy: copies lets it be moved",
            )
        return True

    def _gather(self, index: int) -> None:
        """Start to gather a layer's weights, after all that compute was given so far: it may read the buffer."""
        slot, shard = index % BUFFERS, self._shards[index]
        if self._holds[slot] == index:
            return
        self._holds[slot] = index
        whole = self._buffers[slot][: shard.numel() * self.processes]
        if self._stream is None:
            _all_gather(whole, shard, group=self._group)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _all_gather(whole, shard, group=self._group)
            self._arrived[slot] = self._stream.record_event()

    def forward_begins(self, index: int) -> None:
        """Bring a layer's weights before its forward, or before it is recomputed in a backward."""
        recomputed = self._in_backward == index
        self._in_backward = self._in_backward if recomputed else None
        self.use(index, 0 if recomputed else 1)

    def backward_begins(self, index: int) -> None:
        """Bring a layer's weights before its backward."""
        self._in_backward = index
        if self.trained is not None:
            self.trained.collect_above(index)
        self.use(index, -1)


class _BeforeAll:
    """A hook: the forward of what holds the layers begins."""

    def __init__(self, sharded: ShardedLayers) -> None:
        self._sharded = sharded

    def __call__(self, backbone: nn.Module, args: Any) -> None:
        self._sharded.begin()


class _Before:
    """A hook: a layer's forward begins."""

    def __init__(self, sharded: ShardedLayers, index: int) -> None:
        self._sharded, self._index = sharded, index

    def __call__(self, layer: nn.Module, args: Any) -> None:
        self._sharded.forward_begins(self._index)


class _After(_Before):
    """A hook: a layer's forward ends, and gradients of its output will begin its backward."""

    def __call__(self, layer: nn.Module, args: Any, output: Any = None) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._sharded.backward_begins(self._index))


def weight_groups(
    layer: nn.Module, merged: Iterable[Sequence[Any]], elsewhere: set[int], trained: bool = False
) -> list[list[Tensor]]:
    """List a layer's frozen weights: first those that are multiplied with together, then the others one by one.

    Args:
        trained: list its trained weights instead.
        merged: the base linears of each product.
        elsewhere: identities of parameters that other layers have, too, which stay whole.
    """
    left = {id(p): p for p in layer.parameters() if p.requires_grad is trained and id(p) not in elsewhere}
    groups: list[list[Any]] = []
    for linears in merged:
        for name in ("weight", "bias"):
            together = [left.pop(id(p)) for linear in linears if id(p := getattr(linear, name, None)) in left]
            groups.append(together)
    groups += [[p] for p in left.values()]
    return [placed for group in groups if group for placed in _stored(group)]


def _stored(group: list[Any]) -> list[list[Tensor]]:
    """List the tensors that parameters' values are stored in, in groups that begin aligned: plain weights together,
    of those in few bits each part alone, constants of bitsandbytes' blocks too."""
    packed = [p for p in group if isinstance(p, PackedTensor) or getattr(p, "quant_state", None) is not None]
    if not packed:
        return [group]
    parts: list[Any] = []
    for parameter in group:
        state = getattr(parameter, "quant_state", None)
        parts += getattr(parameter, "parts", (parameter,) if state is None else (parameter, state.absmax))
    return [[part] for part in parts]


def shard(model: Any, device: torch.device) -> ShardedLayers:
    """Let a causal LM share what is added of its layers among all processes. There is no way back."""
    group = dist.new_group()  # its own: gathers on their stream never wait for reductions on another
    model.__dict__[_SHARDED] = shared = ShardedLayers(device, group)
    model.base_model.register_forward_pre_hook(_BeforeAll(shared))
    return shared


def sharded(model: Any) -> ShardedLayers | None:
    """Return what a causal LM's layers share with other processes, or None."""
    found: ShardedLayers | None = model.__dict__.get(_SHARDED)
    return found


@torch.no_grad()
def whole_state(model: Any) -> dict[str, Tensor]:
    """Return the state of a causal LM whose layers are trained and shared, in the first process's host memory: a layer
    is gathered at a time. Every process calls it; others get nothing."""
    shared, first = sharded(model), dist.get_rank() == 0
    assert shared is not None
    places = {id(p): (i, j) for i in range(len(shared)) for j, p in enumerate(shared.tensors(i))}
    state: dict[str, Tensor] = dict(model.state_dict()) if first else {}
    names: dict[tuple[int, int], list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in places:
            names.setdefault(places[id(parameter)], []).append(name)
    for i in range(len(shared)):
        for j, tensor in enumerate(shared.whole(i)):
            kept = tensor.to("cpu", copy=True) if first else None
            state.update({name: kept for name in names[i, j]} if kept is not None else {})
    return state


@torch.no_grad()
def load_state(model: Any, read: Any, names: Iterable[str]) -> None:
    """Put tensors by name into a causal LM whose layers are trained and shared.

    Args:
        read: returns the tensor of a name.
        names: all that there are.
    Raises:
        TrainingError: a layer's weight isn't among them.
    """
    shared, left = sharded(model), set(names)
    assert shared is not None
    known = {id(p): name for name, p in model.named_parameters()}
    for i in range(len(shared)):
        of_layer = [known[id(p)] for p in shared.tensors(i)]
        if missing := [name for name in of_layer if name not in left]:
            raise TrainingError(f"a checkpoint lacks {missing[0]}", "go on from another checkpoint, or begin anew")
        shared.load(i, [read(name) for name in of_layer])
        left.difference_update(of_layer)
    model.load_state_dict({name: read(name) for name in left}, strict=False)


def refuse_sharded(model: Any, what: str) -> None:
    """Raise UnsupportedError if a causal LM's weights lie in parts, so that nobody can read them all."""
    shared = sharded(model)
    if shared is not None:
        raise UnsupportedError(
            f"{what} of a model whose layers are shared by {shared.processes} processes",
            "save the model by its trainer; `pronghorn export` merges an adapter in one process",
        )


def first_values(parameter: Any) -> Tensor:
    """Return a parameter's first eight values in float64, of a packed one as they are stored, of a shared one as it
    was."""
    kept: Tensor | None = getattr(parameter, _FIRST, None)
    if kept is not None:
        return kept
    stored = parameter.parts[0] if isinstance(parameter, PackedTensor) else parameter.detach()
    return stored.reshape(-1)[:8].double()


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in its layer's buffer."""

    tensor: Tensor
    offset: int
    """In bytes."""
    dtype: torch.dtype


def _placed(groups: Iterable[list[Tensor]]) -> tuple[list[_Place], int]:
    """Give each tensor its place, and return the bytes of all."""
    places, offset = list[_Place](), 0
    for group in groups:
        offset = -(-offset // ALIGNED) * ALIGNED
        for tensor in group:
            places.append(_Place(tensor, offset, tensor.dtype))
            offset += tensor.nbytes
    return places, offset


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _copy_part(shard: Tensor, begin: int, source: Tensor, offset: int) -> None:
    """Copy what of `source`, which lies at `offset` of a layer, falls into the part that begins at `begin`."""
    first, last = max(begin, offset), min(begin + shard.numel(), offset + source.numel())
    if first < last:
        shard[first - begin : last - begin].copy_(source[first - offset : last - offset])
