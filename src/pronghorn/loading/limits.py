"""What a model's configuration says, checked before a model is built from it: a stranger's numbers must not hang, and
configuration and weights must be of one model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.families.generic import text_config
from pronghorn.loading.composite import Composite
from pronghorn.models.adapter_files import CLASSIFIES, tensor_shapes
from pronghorn.models.families import check_config

LIMITS = {
    "num_hidden_layers": 1_000,
    "depth": 1_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
    "head_dim": 10_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "moe_intermediate_size": 10_000_000,
    "vocab_size": 10_000_000,
}
"""Sizes far beyond any model's: more is a damaged or hostile file."""
_NEEDED = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
"""Sizes that something is divided by: 0 is damage, too."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_REMEDY = "copy or download the model again: configuration and weights must be of one model"


def check_sizes(name: str | Path, table: dict[str, Any]) -> None:
    """Refuse sizes in a config.json, as it is stored, that are no positive integers or absurd.

    Raises:
        DataError: names the size, its value and the limit.
    """
    for key, part in table.items():
        if key.endswith("_config") and isinstance(part, dict):
            check_sizes(f"{name}: {key}", part)
    for size, most in LIMITS.items():
        value = table.get(size)
        least = int(size in _NEEDED)
        if value is not None and (not isinstance(value, int) or not least <= value <= most):
            raise DataError(f"{name}: {size} {str(value)[:40]} is not an integer from {least} to {most:,}", _REMEDY)


def check_range(config: Any, dtype: torch.dtype) -> None:
    """Refuse float16 for a family whose hidden states are beyond its range: every loss would be NaN.

    Raises:
        ConfigError: names the family and the dtypes to use.
    """
    family = check_config(config)
    if dtype is torch.float16 and not family.float16:
        raise ConfigError(
            f"float16: hidden states of {family.members} are beyond its largest number, 65,504",
            "set dtype (a recipe's precision.dtype) to bfloat16; on GPUs before Ampere to float32",
        )


def check_values(name: str | Path, config: Any) -> None:
    """Refuse values in a configuration that transformers would only stumble over in building the model, or ignore.

    Raises:
        DataError: an unknown activation or kind of RoPE, or a stop or padding token outside the vocabulary.
        UnsupportedError: a classifier, whose head a causal language model has no place for.
    """
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for kind in getattr(config, "architectures", None) or ():
        if str(kind).endswith(_CLASSIFIERS):
            raise UnsupportedError(f"{name} is a {kind}, no causal language model", CLASSIFIES)
    for field in ("hidden_act", "hidden_activation"):
        act = getattr(config, field, None)
        if act is not None and act not in ACT2FN:
            raise DataError(f"{name}: {field} {act!r} is no activation that transformers knows", "mend config.json")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        rope_type = kind.get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise DataError(
                f"{name}: rope_type {rope_type!r} is unknown",
                f"mend config.json: transformers has default, {', '.join(ROPE_INIT_FUNCTIONS)}",
            )
    vocabulary = text_config(config).vocab_size
    stops = getattr(config, "eos_token_id", None)  # transformers gives a configuration none of its own
    for stop in stops if isinstance(stops, list) else [stops]:
        if stop is not None and not 0 <= stop < vocabulary:
            raise DataError(
                f"{name}: the stop token {stop} (eos_token_id) is outside the vocabulary of {vocabulary:,}",
                "mend config.json",
            )
    pad = getattr(text_config(config), "pad_token_id", None)
    if isinstance(pad, int) and pad >= vocabulary:
        raise DataError(f"{name}: pad_token_id {pad} is outside the vocabulary of {vocabulary:,}", "mend config.json")


def check_weights_fit(folder: Path, files: list[Path], config: Any, composite: Composite | None = None) -> None:
    """Compare a configuration with the shapes in the headers of its weights, before a model is built from it.

    Raises:
        DataError: another number of layers than the weights have, or another vocabulary or width; of a model with
            towers, too, a tensor that is none of its parts'.
    """
    family = check_config(config)
    if family.generic:  # names and sizes of its tensors are transformers' affair, which tells what is missing
        return
    shapes = {key: shape for file in files for key, shape in tensor_shapes(file).items()}
    if composite is not None:
        named = ((composite.inside(key), shape) for key, shape in shapes.items())
        shapes = {key: shape for key, shape in named if key is not None}
    check_layers(folder, "num_hidden_layers", config.num_hidden_layers, shapes, _LAYER)
    embeddings = f"{family.embeddings}.weight"
    expected = [config.vocab_size, config.hidden_size]
    for key, shape in shapes.items():
        if key.endswith(embeddings) and shape != expected:
            raise DataError(f"{folder}: config.json says {expected} for {key}, the weights hold {shape}", _REMEDY)


def check_layers(where: str | Path, key: str, said: int, tensors: Any, layer: re.Pattern[str]) -> None:
    """Refuse another number of layers than the names of the tensors show.

    Raises:
        DataError: names both numbers, and the layers that would be left out.
    """
    layers = {int(match[1]) for match in map(layer.search, tensors) if match}
    if layers and max(layers) + 1 != said:
        extra = sorted(index for index in layers if index >= said)
        left = f": layers {extra[0]} to {extra[-1]} would be left out" if extra else ""
        raise DataError(f"{where}: {key} {said:,}, but the weights hold {max(layers) + 1} layers{left}", _REMEDY)
