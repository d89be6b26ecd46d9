"""The state of a model whose layers processes share: gathered as a whole, put back into parts, or refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pronghorn.errors import TrainingError, UnsupportedError
from pronghorn.memory.sharded import sharded


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
