"""Bytes that autograd saves in a forward."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from pronghorn.data.batch import PackedBatch
from pronghorn.models.families import base_causal_lm

TOKENS = 48


def saved_bytes(model: Any, packed: PackedBatch | None, autocast: torch.dtype | None, padded: bool = False) -> int:
    """Bytes that autograd saves in the backbone's forward, weights and buffers aside."""
    backbone = base_causal_lm(model).base_model
    arguments: dict[str, Any] = {"input_ids": torch.arange(TOKENS)[None], "position_ids": torch.arange(TOKENS)[None]}
    arguments |= {"packed": packed} if packed else {}
    arguments |= {"attention_mask": torch.arange(TOKENS)[None] < TOKENS - 3} if padded else {}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        with torch.no_grad():
            backbone(**arguments, use_cache=False)  # weights that are merged have moved now
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = backbone(**arguments, use_cache=False)
    own = {t.untyped_storage().data_ptr() for t in itertools.chain(model.parameters(), model.buffers())}
    del y
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
