"""Weights of a checkpoint: every one of them there, never pickled, quantised only by bitsandbytes."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pronghorn.errors import DataError, UnsupportedError

_EMBEDDINGS = re.compile(r"\.(embed_tokens|lm_head)(\.base_layer)?\.weight$")
"""Keys in a saved adapter of what PEFT saves whole: `modules_to_save`, and embeddings that were resized."""


def check_weights(folder: Path) -> None:
    """Refuse a folder without safetensors, and files of them that are damaged, cut short or gone: those that loading
    reads, a whole model's before its parts. Others (Mistral's own beside transformers', old parts) may be anything."""
    from safetensors import SafetensorError, safe_open

    name = "adapter_model" if (folder / "adapter_config.json").is_file() else "model"
    whole, index = folder / f"{name}.safetensors", folder / f"{name}.safetensors.index.json"
    files = [whole] if whole.is_file() else []
    if not files and index.is_file():
        files = [folder / name for name in sorted({*json_value(index, "weight_map").values()})]
    for file in files:
        if not file.is_file():
            raise DataError(f"{index} names {file.name}, which is not there", "copy or download it")
        try:
            with safe_open(file, "pt"):
                pass  # opening compares the header with the file's size
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: not a whole safetensors file ({error})", "copy or download it again") from error
    if not files:
        kinds = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
        found = sorted(file.name for file in folder.iterdir() if file.suffix in kinds)
        raise DataError(
            f"{folder} holds no safetensors weights to load (found: {', '.join(found) or 'no weights at all'})",
            "pickled weights are never read: convert them to safetensors; a GGUF file is given by its own path",
        )


def saved_embedding_rows(folder: Path) -> int | None:
    """Rows of the embeddings or head that were saved whole with the adapter in `folder`, or None."""
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return None
    with safe_open(file, "pt") as weights:
        ends = [key for key in weights.keys() if _EMBEDDINGS.search(key)]  # noqa: SIM118  # it is no mapping
        return int(weights.get_slice(ends[0]).get_shape()[0]) if ends else None


def json_value(path: Path, key: str) -> Any:
    """What the JSON file holds under the key."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no {key} to be read ({error!r})", "copy, download or save it again") from error


def whole_model(name: str | Path, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, but what the checkpoint lacks, or has in other shapes, is a DataError:
    transformers would begin with random weights there, and training on them looks like training."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        name, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    model, info = loaded
    lost = sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})
    if lost:
        raise DataError(
            f"{options.get('gguf_file', name)} lacks {len(lost)} of the model's weights, or has them in other shapes "
            f"({', '.join(lost[:3])} ...)",
            "download or copy it again: configuration and weights must be of one model",
        )
    _keep_packed_4bit_layout(model)
    return model


def check_quantised(config: Any) -> None:
    """Raise UnsupportedError for a checkpoint that is quantised by others than bitsandbytes."""
    stored = getattr(config, "quantization_config", None)
    method = (stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)) or ""
    if stored is not None and str(getattr(method, "value", method)) != "bitsandbytes":
        raise UnsupportedError(
            f"the checkpoint is quantised by {method!r}", "use the 16-bit checkpoint, or one quantised by bitsandbytes"
        )


def bitsandbytes_config(config: Any, load_in_4bit: bool, dtype: torch.dtype) -> Any:
    """The bitsandbytes config to load with, or None; a checkpoint that is already quantised keeps its own."""
    stored = getattr(config, "quantization_config", None)
    if stored is None and not load_in_4bit:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedError("4-bit loading needs bitsandbytes", "pip install 'pronghorn[nf4]'")
    if stored is not None:
        return None  # transformers reads the checkpoint's own
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _keep_packed_4bit_layout(model: nn.Module) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes repacks 4-bit weights at the first evaluation, for a product without a
    backward: the next training step has the right loss and wrong gradients, and a merge reads garbage. Keep it off."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
