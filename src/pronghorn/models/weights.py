"""Load a transformers model with every one of its weights, quantised only by bitsandbytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.models.families import has_experts
from pronghorn.models.nf4_experts import config_class
from pronghorn.models.packed_checkpoint import format_of, method_of
from pronghorn.models.packed_formats import FORMATS


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


def check_quantised(config: Any, load_in_4bit: bool) -> None:
    """Refuse a checkpoint that is quantised in a way that isn't served, or that would have to be quantised twice.

    Raises:
        UnsupportedError: quantised by others than bitsandbytes and those of `packed_formats.FORMATS`.
        ConfigError: `load_in_4bit` of a checkpoint that is packed otherwise.
    """
    method, form = method_of(config), format_of(config)
    if form is not None and load_in_4bit:
        raise ConfigError(f"load_in_4bit of a checkpoint in {form.name}", "leave it out: the weights stay as they are")
    if method and method != "bitsandbytes" and form is None:
        served = ", ".join(["bitsandbytes", *(form.name for form in FORMATS.values())])
        raise UnsupportedError(
            f"the checkpoint is quantised by {method!r}", f"use the 16-bit checkpoint, or one quantised by {served}"
        )


def bitsandbytes_config(config: Any, load_in_4bit: bool, dtype: torch.dtype) -> Any:
    """The bitsandbytes config to load with, or None; a checkpoint that is already quantised keeps its own."""
    stored = getattr(config, "quantization_config", None)
    if (stored is None and not load_in_4bit) or format_of(config) is not None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedError("4-bit loading needs bitsandbytes", "pip install 'pronghorn[nf4]'")
    if stored is not None:
        return None  # transformers reads the checkpoint's own
    from transformers import BitsAndBytesConfig

    asked = config_class() if has_experts(config) else BitsAndBytesConfig
    return asked(
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
