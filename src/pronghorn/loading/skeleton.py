"""Models without weights, and how these are filled in from a source, one tensor at a time.

A device never holds more than the model, or this process's part of it, and one layer or tensor.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.errors import DataError
from pronghorn.kernels.packed import PackedTensor
from pronghorn.loading.left_out import is_left_out
from pronghorn.loading.share import SharedLoading
from pronghorn.loading.staging import Staging
from pronghorn.precision.loader import StoredTensor, load

LOADING = threading.RLock()
"""Held while a model is made or loaded: accelerate and transformers change classes and torch's defaults meanwhile. What
two threads change side by side would stay, and every later model be without weights."""


def without_weights(config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    """Make the causal LM of a configuration on the meta device; its buffers, which are computed, on the CPU."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with LOADING, init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    _make_buffers_again(model, model)
    return model


@torch.no_grad()
def _make_buffers_again(module: Any, owner: Any) -> None:
    """Make buffers that no file holds in float32, as `from_pretrained` does: tables of positions, for instance."""
    from transformers import PreTrainedModel

    for child in module.children():
        _make_buffers_again(child, child if isinstance(child, PreTrainedModel) else owner)
    if module._buffers.keys() & module._non_persistent_buffers_set:
        owner._init_weights(module)


def tied_names(model: Any) -> set[str]:
    """Return the names of parameters that are others, too, and may be in a checkpoint or not."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return set(tied) if getattr(model.config, "tie_word_embeddings", False) else set()


def check_tied(model: Any, source: Iterable[StoredTensor]) -> None:
    """Refuse a checkpoint that holds a weight of its own where its configuration says that it is another one, too.

    Raises:
        DataError: names both.
    """
    tied = {name: model.all_tied_weights_keys[name] for name in tied_names(model)}
    ends = {*tied, *tied.values()}
    held = {stored.name: stored.read().clone() for stored in source if stored.name in ends} if tied else {}
    for name, other in tied.items():
        if name in held and other in held and not torch.equal(held[name], held[other]):
            raise DataError(
                f"config.json says that {name} is {other} (tie_word_embeddings), and the weights hold two",
                "set tie_word_embeddings to false in config.json",
            )


def expected_of(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a tensor on the meta device for each that a checkpoint must have, less packed ones: in float32 those that
    transformers keeps so in a model of that dtype."""
    made, tied = model.state_dict(), tied_names(model)
    # buffers that are stored lie on the CPU
    made = {n: x.to("meta") for n, x in made.items() if n not in tied and not isinstance(x, PackedTensor)}
    for pattern, kept in model._get_dtype_plan(dtype).items():
        found = [name for name in made if re.search(pattern.replace("*", ".*"), name)]
        made |= {name: made[name].to(kept) for name in found}
    return made


def fill(
    model: Any,
    source: Iterable[StoredTensor],
    expected: Mapping[str, Tensor],
    device: torch.device,
    share: SharedLoading | None,
    *,
    transform: Callable[[str, Tensor], Any],
    owners: Mapping[str, str],
    unread: tuple[str, ...] = (),
) -> Any:
    """Read all weights of a model without any, put its buffers on the device, and return it, in evaluation mode.

    Args:
        expected, transform: as `loader.load` takes them; `transform` may return None for a part of a parameter.
        share: shares the layers with other processes.
        owners: the parameter that a tensor is a part of, by the tensor's name.
        unread: ends of names of tensors that are left out, beside tied weights and what models have no place for.
    Raises:
        DataError: as `loader.load`; the model is not to be used then.
    """
    from transformers.utils import logging

    tied = tied_names(model)
    if share is not None:
        share.begin(model, dict.fromkeys(owners.get(name, name) for name in expected))
    bar = logging.tqdm(total=len(expected), desc="Loading weights")  # transformers' own, hidden by its settings
    with bar, Staging(device) as staging:

        def rename(name: str) -> str | None:
            left_out = name not in expected and is_left_out(model, model.config, name)
            return None if name in tied or left_out or name.endswith(unread) else name

        def place(name: str, stored: StoredTensor) -> Tensor:
            return staging.copy(stored, expected[name].dtype)

        for key, tensor in load(source, rename=rename, place=place, transform=transform, expected=expected):
            bar.update()
            if tensor is None:
                continue
            name = owners.get(key, key)
            put(model, name, tensor)
            del tensor  # before the next one is read, and before a layer is shared
            if share is not None:
                share.arrived(name)
    model.tie_weights()
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(device)
    return model.eval()


def put(model: Any, name: str, tensor: Tensor) -> None:
    """Put a tensor into a model as its parameter or buffer of that name."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
        return
    whole = isinstance(tensor, nn.Parameter)
    module._parameters[leaf] = tensor if whole else nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
