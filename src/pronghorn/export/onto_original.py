"""Put a run's adapter on the 16-bit base that training quantised, and tell how far that is from what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.models.families import base_causal_lm
from pronghorn.models.load import find_model

ONTO = ("seen", "original")
"""The base as training saw it, or the checkpoint that it was quantised from."""


def adapter_on_original(adapter: Path, trained: Any) -> Any:
    """Load a saved adapter with its base in 16 bits, beside the trained model, in its dtype and on its device.

    Args:
        adapter: its folder.
    Raises:
        ConfigError: nothing was quantised, or whole weights were trained.
        UnsupportedError: the checkpoint itself is quantised, so that nobody knows its original.
    """
    if not hasattr(trained, "peft_config") or not getattr(base_causal_lm(trained), "is_quantized", False):
        raise ConfigError("--onto original of a run whose base was not quantised", "leave it out")
    found = find_model(adapter, max_seq_length=1)
    if found.is_quantised:
        raise UnsupportedError(
            "--onto original of a checkpoint that is quantised itself: its original isn't known", "leave it out"
        )
    embeddings = base_causal_lm(trained).get_input_embeddings().weight
    return found.model(embeddings.dtype, embeddings.device).eval()


def nats_apart(model: Any, trained: Any, tokenizer: Any, rows: Sequence[Sequence[int]]) -> float:
    """Return the mean distance of two models' log-probabilities of rows of token ids, in nats."""
    engines = [TransformersEngine(each, tokenizer) for each in (model, trained)]
    differences = []
    for ids in rows:
        following = torch.tensor(ids[1:])[:, None]
        own, other = (engine.distribution(ids).gather(1, following) for engine in engines)
        differences.append((own - other).abs())
    return torch.cat(differences).mean().item()
