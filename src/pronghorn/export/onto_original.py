"""Choose the base that an adapter over 4 bits is merged onto: as training saw it, or the original in 16 bits.

Both merges are made in memory, rounded as a checkpoint is, and their log-probabilities compared with the adapted
model's as it was trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.merge import checkpoint_dtype, merged_tensors, place_beside
from pronghorn.loading.load import find_model
from pronghorn.models.families import base_causal_lm

ONTO = {"seen": "the base in few bits, as training saw it", "original": "the original base in 16 bits"}


@dataclass(frozen=True)
class Apart:
    """How far a merge's log-probabilities are from the adapted model's, in nats a token."""

    mean: float
    largest: float

    def __str__(self) -> str:
        """Say both."""
        return f"{self.mean:.2g} nats a token (at most {self.largest:.2g})"


def has_quantised_base(trained: Any) -> bool:
    """Tell whether a model is an adapter over a base in few bits."""
    return hasattr(trained, "peft_config") and bool(getattr(base_causal_lm(trained), "is_quantized", False))


def knows_original(adapter: Path) -> bool:
    """Tell whether a saved adapter's base was quantised while it loaded, so that the original is its checkpoint."""
    return not find_model(adapter, max_seq_length=1).is_quantised


def adapter_on_original(adapter: Path, trained: Any) -> Any:
    """Load a saved adapter with its original base in the trained model's dtype: beside that model, or on the CPU where
    no room is left.

    Args:
        adapter: its folder.
    Raises:
        ConfigError: nothing was quantised, or whole weights were trained.
        UnsupportedError: the checkpoint itself is quantised, so that nobody knows its original.
    """
    found = find_model(adapter, max_seq_length=1)
    if found.is_quantised:
        raise UnsupportedError(
            "--onto original of a checkpoint that is quantised itself: its original isn't known", "leave it out"
        )
    if not has_quantised_base(trained):
        raise ConfigError("--onto original of a run whose base was not quantised", "leave it out")
    base = base_causal_lm(trained)
    dtype = base.get_input_embeddings().weight.dtype
    size = sum(math.prod(tensor.shape) for tensor in merged_tensors(base, dtype)) * dtype.itemsize
    return found.model(dtype, place_beside(base.device, size)).eval()


@torch.no_grad()
def distances(trained: Any, original: Any, tokenizer: Any, rows: Sequence[Sequence[int]]) -> dict[str, Apart]:
    """Return how far merging an adapter onto each base of `ONTO` is from the trained model.

    Args:
        trained: the adapter over the base in few bits; left untouched.
        original: the adapter on its original, as `adapter_on_original` loads it; its weights are overwritten.
        rows: token ids; each row has two at least.
    """
    base = base_causal_lm(trained)
    dtype, right = checkpoint_dtype(base), _log_probabilities(trained, tokenizer, rows)
    merged = merged_in_place(original, dtype)
    onto_original = _apart(_log_probabilities(merged, tokenizer, rows), right)
    weights: Mapping[str, Tensor] = {
        **dict(merged.named_parameters(remove_duplicate=False)),
        **dict(merged.named_buffers(remove_duplicate=False)),
    }
    for tensor in merged_tensors(base, dtype, unbiased=True):
        weights[tensor.name].copy_(tensor.read())
    return {"seen": _apart(_log_probabilities(merged, tokenizer, rows), right), "original": onto_original}


@torch.no_grad()
def merged_in_place(model: Any, dtype: torch.dtype) -> Any:
    """Merge a model's adapter in place, rounded as a checkpoint's weights are, and return the plain model."""
    base = base_causal_lm(model)
    _untie(base)
    weights = {name.replace(".base_layer", ""): weight for name, weight in base.named_parameters()}
    for tensor in merged_tensors(base, dtype, unbiased=True):
        if tensor.name in weights:
            weights[tensor.name].copy_(tensor.read())
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:  # what it adds is in the weights now
            parameter.zero_()
    for module in model.modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():  # of outputs, to what they are now
            magnitude.weight.copy_(module.get_base_layer().weight.norm(dim=0 if module.fan_in_fan_out else 1))
    plain = model.merge_and_unload()
    for parameter in plain.parameters():
        parameter.copy_(parameter.to(dtype))
    return plain


def _untie(base: Any) -> None:
    """Give a tied head weights of its own where it or the embedding has an adapter: merged, they differ."""
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    inner = getattr(head, "base_layer", head)
    adapted = inner is not head or hasattr(embedding, "base_layer")
    if adapted and getattr(inner, "weight", None) is getattr(embedding, "base_layer", embedding).weight:
        inner.weight = torch.nn.Parameter(inner.weight.clone())


def _log_probabilities(model: Any, tokenizer: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the log-probability of each token of the rows, but for their first."""
    engine = TransformersEngine(model, tokenizer)
    return torch.cat([engine.distribution(ids).gather(1, torch.tensor(ids[1:])[:, None]) for ids in rows])


def _apart(found: Tensor, right: Tensor) -> Apart:
    differences = (found - right).abs()
    return Apart(differences.mean().item(), differences.max().item())
