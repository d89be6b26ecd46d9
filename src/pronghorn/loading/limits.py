"""What a model's configuration says, checked before a model is built from it: a stranger's numbers must not hang, and
configuration and weights must be of one model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.families.generic import text_config
from pronghorn.loading.composite import Composite
from pronghorn.loading.left_out import is_left_out
from pronghorn.loading.packed_checkpoint import method_of
from pronghorn.loading.stored_4bit import check_4bit
from pronghorn.models.adapter_files import CLASSIFIES
from pronghorn.models.families import check_config, expert_counts, has_experts
from pronghorn.precision.loader import PLAIN, StoredTensor, checkpoint

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
    "max_position_embeddings": 10**12,
}
"""Sizes far beyond any model's: more is a damaged or hostile file."""
_NEEDED = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
"""Sizes of which 0 is damage, too: something is divided by them, or nothing fits."""
_OF_EACH_LAYER = ("intermediate_size", "moe_intermediate_size")
"""Sizes that may be a list (Gemma 3n)."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_REMEDY = "copy or download the model again: configuration and weights must be of one model"
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_WRAPPED = re.compile(
    r"^(?:base_model\.model|module)\.|(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""What PEFT, DistributedDataParallel, torch.compile and FSDP put into the names of a model's weights."""


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
        several = size in _OF_EACH_LAYER and isinstance(value, list)
        numbers = [] if value is None else value if several else [value]
        if not all(isinstance(number, int) and least <= number <= most for number in numbers):
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
        DataError: an unknown activation or kind of RoPE, numbers with which no hidden state would be right, more
            experts a token than there are, or a stop or padding token outside the vocabulary.
        UnsupportedError: a classifier, whose head a causal language model has no place for.
    """
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for kind in getattr(config, "architectures", None) or ():
        if str(kind).endswith(_CLASSIFIERS):
            raise UnsupportedError(f"{name} is a {kind}, no causal language model", CLASSIFIES)
    text = text_config(config)
    if isinstance(text, dict):
        raise DataError(f"{name}: a text_config, which {config.model_type} doesn't have", "fix config.json")
    if getattr(config, "return_dict", True) is False:
        raise DataError(f"{name}: return_dict false, with which models fail", "remove it from config.json")
    for field in _EPSILONS:
        epsilon = getattr(text, field, None)
        if isinstance(epsilon, int | float) and not 0 <= epsilon < 1:
            raise DataError(
                f"{name}: {field} {epsilon} is not from 0 to 1; 1e-05 or 1e-06 is common", "fix config.json"
            )
    for field in ("hidden_act", "hidden_activation"):
        act = getattr(config, field, None)
        if act is not None and act not in ACT2FN:
            raise DataError(f"{name}: {field} {act!r} is not an activation that transformers knows", "fix config.json")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        rope_type = kind.get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise DataError(
                f"{name}: rope_type {rope_type!r} is unknown",
                f"fix config.json: transformers has default, {', '.join(ROPE_INIT_FUNCTIONS)}",
            )
        _check_rope(name, config, kind)
    counts = [count for count in expert_counts(text) if isinstance(count, int) and count > 1]
    chosen = getattr(text, "num_experts_per_tok", None)
    if counts and has_experts(config) and isinstance(chosen, int) and not 1 <= chosen <= counts[0]:
        raise DataError(f"{name}: num_experts_per_tok {chosen} of {counts[0]:,} experts", "fix config.json")
    _check_stops(name, getattr(config, "eos_token_id", None), text.vocab_size, "fix config.json")
    pad = getattr(text, "pad_token_id", None)  # torch counts negative ones from the end
    if isinstance(pad, int) and not -text.vocab_size <= pad < text.vocab_size:
        raise DataError(
            f"{name}: pad_token_id {pad} is outside the vocabulary of {text.vocab_size:,}", "fix config.json"
        )
    file = Path(name) / "generation_config.json"
    if file.is_file():
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
            stops = table.get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{file} is not a JSON table ({error})",
                "copy or download it again; git lfs pull, if Git LFS left a pointer",
            ) from error
        _check_stops(file, stops, text.vocab_size, "fix it: generation stops there")


def _check_rope(name: str | Path, config: Any, kind: dict[str, Any]) -> None:
    """Refuse numbers with which rotary positions are NaN, all alike, or of another size than the heads."""
    for field in _ROPE_NUMBERS:
        value = kind.get(field, 1)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise DataError(f"{name}: {field} {value!r} of its RoPE is not a positive number", "fix config.json")
    for field in sorted({"short_factor", "long_factor"} & kind.keys()):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(width * kind.get("partial_rotary_factor", 1)) // 2
        if len(kind[field]) != pairs:
            raise DataError(
                f"{name}: {len(kind[field])} numbers in {field}, and heads have {pairs} frequencies", "fix config.json"
            )


def _check_stops(where: str | Path, stops: Any, vocabulary: int, remedy: str) -> None:
    for stop in stops if isinstance(stops, list) else [stops]:
        if stop is not None and not (isinstance(stop, int) and 0 <= stop < vocabulary):
            raise DataError(
                f"{where}: the stop token {stop!r} (eos_token_id) is outside the vocabulary of {vocabulary:,}", remedy
            )


def check_weights_fit(folder: Path, files: list[Path], config: Any, composite: Composite | None = None) -> None:
    """Compare a configuration with the headers of its weights, before a model is built from it.

    Raises:
        DataError: tensors that an index names and its files lack; names that a wrapper gave them; codes of which the
            configuration says nothing, or the other way round; another number of layers than the weights have, or
            another vocabulary or width; of a model with towers, too, a tensor that is none of its parts'.
    """
    from transformers import AutoModelForCausalLM

    next(checkpoint(folder), None)  # compares an index with its files, which transformers doesn't
    stored = [tensor for file in files for tensor in checkpoint(file)]
    _check_stored(folder, files, stored, config, composite)
    family = check_config(config)
    if family.generic:  # names and sizes of its tensors are transformers' affair, which tells what is missing
        return
    shapes = {tensor.name: [*tensor.shape] for tensor in stored}
    if composite is not None:
        named = ((composite.inside(key), shape) for key, shape in shapes.items())
        shapes = {key: shape for key, shape in named if key is not None}
    kinds: Any = AutoModelForCausalLM._model_mapping
    own = [key for key in shapes if not is_left_out(kinds[type(config)], config, key)]
    check_layers(folder, "num_hidden_layers", config.num_hidden_layers, own, _LAYER)
    plain = getattr(config, "quantization_config", None) is None  # else the head may be packed
    ends = tuple(f"{name}.weight" for name in ([family.embeddings, family.head] if plain else [family.embeddings]))
    expected = [config.vocab_size, config.hidden_size]
    for key, shape in shapes.items():
        if key.endswith(ends) and shape != expected:
            raise DataError(f"{folder}: config.json says {expected} for {key}, the weights hold {shape}", _REMEDY)


def _check_stored(
    folder: Path, files: list[Path], stored: list[StoredTensor], config: Any, composite: Composite | None
) -> None:
    """Refuse tensors that transformers would leave out or read as other numbers."""
    first: dict[str, StoredTensor] = {}
    for tensor in stored:
        other = first.setdefault(tensor.name, tensor)
        if other is not tensor and not torch.equal(_again(other), _again(tensor)):
            raise DataError(
                f"{other.origin} and {tensor.origin} hold other values of {tensor.name}",
                "download or save the checkpoint again, into an empty folder",
            )
    for tensor in stored:
        if (found := _WRAPPED.search(tensor.name)) is not None:
            raise DataError(
                f"{tensor.origin}: {tensor.name} has {found[0]!r} of a wrapper around the model in its name",
                "save the model inside: accelerator.unwrap_model(model).save_pretrained(FOLDER); of adapters by "
                "save_pretrained_merged",
            )
    packed = [tensor for tensor in stored if tensor.dtype not in PLAIN and tensor.name.endswith((".weight", "_proj"))]
    if composite is not None:  # towers aren't read
        packed = [tensor for tensor in packed if composite.inside(tensor.name) is not None]
    if packed and getattr(config, "quantization_config", None) is None:
        raise DataError(
            f"{packed[0].origin}: {packed[0].name} is {packed[0].dtype}, and config.json has no quantization_config "
            "that says what its numbers mean",
            "bring back the config.json that was saved with these weights, or use the 16-bit checkpoint",
        )
    if method_of(config) == "bitsandbytes":
        if not any(".quant_state." in tensor.name for tensor in stored):
            raise DataError(
                f"{folder}: config.json says that bitsandbytes quantised the weights, and they are plain",
                "remove quantization_config from it; load_in_4bit=True (model.load_in_4bit) quantises plain weights",
            )
        check_4bit(files)


def _again(stored: StoredTensor) -> Tensor:
    """Read the bytes of a tensor whose file was closed."""
    found = next(tensor.read() for tensor in checkpoint(Path(stored.origin)) if tensor.name == stored.name)
    return found.flatten().view(torch.uint8)


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
