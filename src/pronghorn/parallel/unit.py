"""A part of some weights of one layer in each process, and how the whole of them is gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pronghorn.kernels.fp8_blocks import has_own_codes
from pronghorn.kernels.packed import PackedTensor

ALIGNED = 256
"""Bytes that groups of weights begin at a multiple of."""
MASTER_BYTES = 4
"""Of a number that is trained."""
NARROW = torch.bfloat16
"""What trained products may be gathered in: the dtype that float32 masters are multiplied in."""
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@dataclass(frozen=True)
class Place:
    """Where a tensor lies among the weights that are gathered with it."""

    tensor: Tensor
    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: torch.Size
    bytes: int

    def of(self, whole: Tensor) -> Tensor:
        """Return the tensor's values out of all bytes."""
        return whole[self.offset : self.offset + self.bytes].view(self.dtype).view(self.shape)


class WeightGroups(NamedTuple):
    """Weights of a layer that are shared, in groups whose members must follow each other without a gap."""

    products: list[list[Tensor]]
    """Trained weights of products that fused layers compute."""
    others: list[list[Tensor]]


def weight_groups(
    layer: nn.Module, merged: Iterable[Sequence[Any]], elsewhere: set[int], trained: bool = False
) -> WeightGroups:
    """List a layer's frozen weights: first those that are multiplied with together, then the others one by one.

    Args:
        trained: list its trained weights instead.
        merged: the base linears of each product.
        elsewhere: identities of parameters that other layers have, too, which stay whole.
    """
    left = {id(p): p for p in layer.parameters() if p.requires_grad is trained and id(p) not in elsewhere}
    products, others = list[list[Any]](), list[list[Any]]()
    for linears in merged:
        for name in ("weight", "bias"):
            together = [left.pop(id(p)) for linear in linears if id(p := getattr(linear, name, None)) in left]
            (products if trained and name == "weight" else others).append(together)
    others += [[p] for p in left.values()]
    placed = [[each for group in found if group for each in _stored(group)] for found in (products, others)]
    return WeightGroups(*placed)


def _stored(group: list[Any]) -> list[list[Tensor]]:
    """List the tensors that parameters' values are stored in, in groups that begin aligned: plain weights together,
    codes of 8-bit products too, whose scales (a number a row) stay whole, as layers are built from them; of others in
    few bits each part alone, constants of bitsandbytes' blocks too."""
    if all(map(has_own_codes, group)):
        return [[p.parts[0] for p in group]]
    packed = [p for p in group if isinstance(p, PackedTensor) or getattr(p, "quant_state", None) is not None]
    if not packed:
        return [group]
    parts: list[Any] = []
    for parameter in group:
        state = getattr(parameter, "quant_state", None)
        parts += getattr(parameter, "parts", (parameter,) if state is None else (parameter, state.absmax))
    return [[part] for part in parts]


class Reference(NamedTuple):
    """An attribute by which something reads a shared tensor that is not a parameter: `.to` gives it a copy instead."""

    owner: Any
    name: str
    shared: Any

    def put_back(self) -> None:
        """Let the owner read what is shared again."""
        if getattr(self.owner, self.name, None) is not self.shared:
            setattr(self.owner, self.name, self.shared)


def references(layer: nn.Module, *names: str) -> list[Reference]:
    """List what refers to tensors that a layer's weights in few bits are stored in.

    Args:
        names: further attributes of packed weights, which become other objects when they are moved.
    """
    found = []
    for parameter in layer.parameters():
        state = getattr(parameter, "quant_state", None)
        if isinstance(parameter, PackedTensor):
            known = [name for name in ("parts", *names) if hasattr(parameter, name)]
            found += [Reference(parameter, name, getattr(parameter, name)) for name in known]
        elif state is not None:
            found.append(Reference(state, "absmax", state.absmax))
    return found


class Unit:
    """Weights of one layer that are gathered together.

    Args:
        layer: its number.
        groups: weights that must follow each other without a gap.
        device: of this process's part.
        products: these are float32 weights of products, which may be gathered in 16 bits.
    """

    def __init__(
        self,
        layer: int,
        groups: Iterable[Sequence[Tensor]],
        device: torch.device,
        processes: int,
        rank: int,
        products: bool = False,
    ) -> None:
        self.layer, self.products, self._rank = layer, products, rank
        self.places, size = _placed(groups)
        part = -(-size // (processes * ALIGNED)) * ALIGNED
        self.part = torch.zeros(part, dtype=torch.uint8, device=device)
        """This process's bytes."""
        self.size = part * processes
        """Bytes of all processes' parts together."""
        self.peers: list[Tensor] = []
        """All processes' parts, where this one reads them out of the others' memory (`parallel.peers`)."""
        self.narrow_peers: list[Tensor] = []
        """The same of trained products' numbers in 16 bits; its own part among them is for `show` to write."""
        for place in self.places:
            self.load(place, place.tensor)

    @property
    def watched(self) -> Place:
        """Return a place that shows whether the weights were moved: a parameter's, if it has one."""
        return next((place for place in self.places if isinstance(place.tensor, nn.Parameter)), self.places[0])

    def load(self, place: Place, values: Tensor) -> None:
        """Take over what of a tensor's values falls into this process's part."""
        source = values.detach().to(place.dtype).contiguous().view(-1).view(torch.uint8)
        begin = self._rank * len(self.part)
        first, last = max(begin, place.offset), min(begin + len(self.part), place.offset + len(source))
        if first < last:
            self.part[first - begin : last - begin].copy_(source[first - place.offset : last - place.offset])

    def gather(self, whole: Tensor, group: Any) -> None:
        """Gather all bytes into `whole` [size]."""
        if self.peers:
            self._copy(whole, self.peers)
        else:
            _all_gather(whole, self.part, group=group)

    def gather_narrow(self, whole: Tensor, group: Any) -> None:
        """Gather all numbers, rounded to 16 bits by the processes that have them, into `whole` [size / 4 numbers]."""
        if self.narrow_peers:
            self._copy(whole, self.narrow_peers)
        else:
            _all_gather(whole, self.part.view(torch.float32).to(NARROW), group=group)

    def show(self) -> None:
        """Let the others read this process's numbers in 16 bits as they are now."""
        self.narrow_peers[self._rank].copy_(self.part.view(torch.float32))

    def _copy(self, whole: Tensor, peers: Sequence[Tensor]) -> None:
        places = whole.chunk(len(peers))
        for step in range(len(places)):  # each begins with its own, so that not all read one GPU at a time
            rank = (self._rank + step) % len(places)
            places[rank].copy_(peers[rank])


def _placed(groups: Iterable[Sequence[Tensor]]) -> tuple[list[Place], int]:
    """Give each tensor its place, and return the bytes of all."""
    places, offset = list[Place](), 0
    for group in groups:
        offset = -(-offset // ALIGNED) * ALIGNED
        for tensor in group:
            places.append(Place(tensor, offset, tensor.dtype, tensor.shape, tensor.nbytes))
            offset += tensor.nbytes
    return places, offset
