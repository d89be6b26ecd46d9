"""Bytes that autograd saves in a forward."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from pronghorn.data.batch import PackedBatch
from pronghorn.models.families import base_causal_lm

TOKENS = 48


class Kept:
    """A saved tensor, which goes with the graph that it was saved for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(model: Any, packed: PackedBatch | None, autocast: torch.dtype | None, padded: bool = False) -> int:
    """Bytes that autograd saves in the backbone's forward for its backward, weights and buffers aside."""
    backbone = base_causal_lm(model).base_model
    arguments: dict[str, Any] = {"input_ids": torch.arange(TOKENS)[None], "position_ids": torch.arange(TOKENS)[None]}
    arguments |= {"packed": packed} if packed else {}
    arguments |= {"attention_mask": torch.arange(TOKENS)[None] < TOKENS - 3} if padded else {}
    live: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Kept:
        live.add(kept := Kept(tensor))
        return kept

    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        with torch.no_grad():
            backbone(**arguments, use_cache=False)  # weights that are merged have moved now
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            y = backbone(**arguments, use_cache=False)
    storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage() for kept in live}
    own = {t.untyped_storage().data_ptr() for t in itertools.chain(model.parameters(), model.buffers())}
    del y
    return sum(storage.nbytes() for at, storage in storages.items() if at not in own)
