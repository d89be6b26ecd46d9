"""Tensors that checkpoints hold and models leave out, by what their classes and configurations say."""

from __future__ import annotations

import re
from typing import Any

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COMPUTED = (re.compile(r"rotary_emb\.inv_freq"), re.compile(r"(?:^|\.)position_ids$"))
"""Buffers that models compute and old checkpoints hold, those of Llama 2 for instance, in each layer."""


def is_left_out(model: Any, config: Any, name: str) -> bool:
    """Tell whether a checkpoint may hold this tensor though the model has no place for it.

    A class names such tensors. Layers that predict further tokens lie behind the model's own: transformers names those
    of published models alone (layer 46 of GLM-4.5-Air), and the configuration says how many there are. Buffers that a
    model computes may lie in old checkpoints.

    Args:
        model: a causal LM or its class, which doesn't tell its buffers.
        config: the language model's.
    """
    if any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ()):
        return True
    layer, further = _LAYER.search(name), getattr(config, "num_nextn_predict_layers", None) or 0
    if layer is not None and 0 <= int(layer[1]) - config.num_hidden_layers < further:
        return True
    kinds = [pattern for pattern in _COMPUTED if pattern.search(name)]
    buffers = [buffer for buffer, _ in model.named_buffers()] if kinds and not isinstance(model, type) else []
    return any(pattern.search(buffer) for pattern in kinds for buffer in buffers)
