"""The bytes of tensors that come and go."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Allocations(TorchDispatchMode):
    """The most bytes that storages made under it hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.alive = 0, WeakIdKeyDictionary(ref_type=weakref.ref)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in (args, result))
        old = {x.untyped_storage().data_ptr() for x in given}
        self.alive.update({x.untyped_storage(): None for x in made if x.untyped_storage().data_ptr() not in old})
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.alive))
        return result
