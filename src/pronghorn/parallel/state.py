"""The state of a model whose layers processes share: gathered as a whole, put back into parts, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pronghorn.errors import TrainingError, UnsupportedError
from pronghorn.parallel.sharded import IN_BUFFER, InBuffer, ShardedLayers, sharded


@contextmanager
def gathering(model: Any) -> Iterator[Callable[[Tensor], Tensor] | None]:
    """Let the first process read the weights of a causal LM whose layers are shared, one layer gathered at a time.

    Every process enters; the others gather with the first one until its block ends.

    Yields:
        In the first process what returns a parameter's values, as long as no other layer's are read; then None in the
        others.
    """
    shared = sharded(model)
    assert shared is not None
    if dist.get_rank() > 0:
        while (layer := _told(shared)) >= 0:
            shared.whole(layer)
        yield None
        return
    held: dict[int, Tensor] = {}

    @torch.no_grad()
    def read(parameter: Tensor) -> Tensor:
        place: InBuffer | None = getattr(parameter, IN_BUFFER, None)
        if place is None:
            return parameter.detach()
        if id(parameter) not in held:
            layer = place.unit.layer
            held.clear()  # before the next one needs room
            _told(shared, layer)
            held.update(zip(map(id, shared.tensors(layer)), shared.whole(layer), strict=True))
        return held[id(parameter)]

    try:
        yield read
    finally:
        _told(shared, -1)


def _told(shared: ShardedLayers, number: int = 0) -> int:
    """Return the first process's number to all."""
    told = torch.tensor([number], device=shared.device)
    dist.broadcast(told, 0)
    return int(told)


@torch.no_grad()
def load_state(model: Any, read: Any, names: Iterable[str]) -> None:
    """Put tensors by name into a causal LM, whose layers may be trained and shared.

    Args:
        read: returns the tensor of a name.
        names: all that there are.
    Raises:
        TrainingError: a weight isn't among them.
    """
    shared, left = sharded(model), set(names)
    known = {id(p): name for name, p in model.named_parameters()}
    if missing := [name for name in known.values() if name not in left]:
        raise TrainingError(f"a checkpoint lacks {missing[0]}", "go on from another checkpoint, or begin anew")
    if shared is not None:
        for i in range(len(shared)):
            of_layer = [known[id(p)] for p in shared.tensors(i)]
            shared.load(i, [read(name) for name in of_layer])
            left.difference_update(of_layer)
    model.load_state_dict({name: read(name) for name in left}, strict=False)


def refuse_sharded(model: Any, what: str) -> None:
    """Raise UnsupportedError if a causal LM's weights lie in parts, so that nobody can read them all."""
    shared = sharded(model)
    if shared is not None:
        raise UnsupportedError(
            f"{what} needs all of the model's weights, and each of {shared.processes} processes has a part of them",
            "save the model by its trainer; `pronghorn export` merges an adapter in one process",
        )
