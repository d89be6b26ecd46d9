"""Weights of a checkpoint: every one of them there, never pickled, quantised only by bitsandbytes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pronghorn.errors import DataError, UnsupportedError


def check_weights(folder: Path) -> list[Path]:
    """Return the safetensors files that loading reads: a whole model's, else its parts. Others in the folder may be
    anything (Mistral's own beside transformers', old parts).

    Raises:
        DataError: there are none, or one is damaged, cut short, gone, or outside the folder.
    """
    from safetensors import SafetensorError, safe_open

    name = "adapter_model" if (folder / "adapter_config.json").is_file() else "model"
    whole, index = folder / f"{name}.safetensors", folder / f"{name}.safetensors.index.json"
    files = [whole] if whole.is_file() else []
    if not files and index.is_file():
        parts = json_value(index, "weight_map")
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise DataError(f"{index}: its weight_map names no files", "copy, download or save it again")
        outside = [part for part in parts.values() if Path(part).is_absolute() or ".." in Path(part).parts]
        if outside:
            raise DataError(f"{index} names a file outside its folder ({outside[0]})", "download it again")
        files = [folder / part for part in sorted(set(parts.values()))]
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
    return files


def json_value(path: Path, key: str) -> Any:
    """What the JSON file holds under the key."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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
