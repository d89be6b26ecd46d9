"""Load a transformers model with every one of its weights, quantised only by bitsandbytes."""

from __future__ import annotations

import functools
import importlib.util
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from pronghorn.errors import ConfigError, DataError, PronghornError, UnsupportedError
from pronghorn.kernels.nf4 import NF4Weight, write_out
from pronghorn.loading.composite import Composite
from pronghorn.loading.left_out import is_left_out
from pronghorn.loading.nf4_experts import config_class
from pronghorn.loading.packed_checkpoint import fetched, format_of, method_of, quantisation_of, read_generation_config
from pronghorn.loading.packed_formats import FORMATS, check_experts
from pronghorn.models.families import has_experts
from pronghorn.precision.loader import checkpoint
from pronghorn.text import clip, counted, does

NOT_LOADED = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NotImplementedError, TypeError, ValueError),
)
"""What transformers and torch end in over configurations and files that they don't check. Others are told by name: what
is missing (OSError), memory that runs out (RuntimeError)."""


def whole_model(name: str | Path, composite: Composite | None = None, **options: Any) -> Any:
    """Load a model as `AutoModelForCausalLM.from_pretrained` does, with every one of its weights.

    What the checkpoint lacks, has in other shapes, or holds beside is a DataError: transformers would begin with random
    weights there, and training on them looks like training.

    Args:
        composite: of a model with towers: only the language model's weights are read.
    """
    from transformers import AutoModelForCausalLM

    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    remedy = "download or copy it again: configuration and weights must be of one model"
    try:
        if composite is None:
            if options.get("local_files_only"):  # it looks for an adapter, too, and forgets it there
                options["adapter_kwargs"] = {"local_files_only": True}
            model, info = cast("tuple[Any, Any]", AutoModelForCausalLM.from_pretrained(name, **options))
        else:
            model, info = _language_model(name, composite, **options)
    except PronghornError:
        raise
    except NOT_LOADED as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(
            f"transformers can't load {name} ({clip(reason, 300)})",
            "download or copy it again; of a newer family, try a newer transformers",
        ) from error
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):  # memory that runs out, for instance
            raise
        raise DataError(
            f"{name} lacks parts of weights that are joined, an expert's for instance (named above)", remedy
        ) from error
    lost = sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})
    if lost:
        raise DataError(
            f"{name} lacks {len(lost)} of the model's weights, or has them in other shapes ({', '.join(lost[:3])} ...)",
            remedy,
        )
    extra = sorted(key for key in info["unexpected_keys"] if not is_left_out(model, model.config, key))
    if extra:
        raise DataError(
            f"{name} holds {counted(len(extra), 'tensor')} that {does(len(extra), 'have')} no place in the model "
            f"({', '.join(extra[:3])} ...)",
            remedy,
        )
    head = getattr(model.get_output_embeddings(), "weight", None)
    if model._tied_weights_keys and head is not None and head is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False  # whatever it says: files with both have two, and merging asks it
    return keep_packed_4bit_layout(model)


def _language_model(
    name: str | Path, composite: Composite, *, config: Any, token: Any, revision: Any, **options: Any
) -> tuple[Any, Any]:
    """Load the causal LM in a model with towers: transformers reads slices of files when it needs them."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    folder = fetched(name, {"token": token, "revision": revision, "local_files_only": options.get("local_files_only")})
    kinds: Any = AutoModelForCausalLM._model_mapping
    options = {key: value for key, value in options.items() if key not in ("use_safetensors", "trust_remote_code")}
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for stored in checkpoint(folder):
            inside = composite.inside(stored.name)
            if inside is None:
                continue
            if stored.origin not in files:
                files[stored.origin] = opened.enter_context(safe_open(stored.origin, "pt"))
            tensors[inside] = files[stored.origin].get_slice(stored.name)
        model, info = kinds[type(config)].from_pretrained(None, config=config, state_dict=tensors, **options)
    model.name_or_path = model.config._name_or_path = str(name)
    read_generation_config(model, folder, composite)
    return model, info


def check_quantised(config: Any, load_in_4bit: bool, experts_in_16bit: bool = False) -> None:
    """Refuse a checkpoint that is quantised in a way that isn't served, or that would have to be quantised twice.

    Raises:
        UnsupportedError: quantised by others than bitsandbytes and those of `packed_formats.FORMATS`, or with experts
            in a format that has none.
        ConfigError: `load_in_4bit` of a checkpoint that is packed otherwise, or `experts_in_16bit` without experts.
    """
    method, form = method_of(config), format_of(config)
    if experts_in_16bit and not has_experts(config):
        raise ConfigError(f"experts_in_16bit of {config.model_type}, which has no experts", "leave it out")
    if form is not None:
        check_experts(form, has_experts(config))
    if form is not None and load_in_4bit:
        raise ConfigError(f"load_in_4bit of a checkpoint in {form.name}", "leave it out: the weights stay as they are")
    if not method and getattr(config, "quantization_config", None) is not None:
        raise DataError(
            "the checkpoint's quantization_config has no quant_method", "download its config.json again, or fix it"
        )
    if method == "bitsandbytes" and not quantisation_of(config).get("load_in_4bit"):
        raise UnsupportedError(
            "the checkpoint is quantised by bitsandbytes to 8 bits", "use one in 4 bits, or the 16-bit checkpoint"
        )
    if method and method != "bitsandbytes" and form is None:
        served = ", ".join(["bitsandbytes", *(form.name for form in FORMATS.values())])
        raise UnsupportedError(
            f"the checkpoint is quantised by {method!r}", f"use the 16-bit checkpoint, or one quantised by {served}"
        )


def bitsandbytes_config(config: Any, load_in_4bit: bool, dtype: torch.dtype, experts_in_16bit: bool = False) -> Any:
    """Return the bitsandbytes config to load with, or None; a checkpoint that is already quantised keeps its own."""
    stored = getattr(config, "quantization_config", None)
    if (stored is None and not load_in_4bit) or format_of(config) is not None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedError("4-bit loading needs bitsandbytes", "pip install 'pronghorn[nf4]'")
    if stored is not None:
        return None  # transformers reads the checkpoint's own
    from transformers import BitsAndBytesConfig

    asked = config_class() if has_experts(config) and not experts_in_16bit else BitsAndBytesConfig
    return asked(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def with_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Give a model of a checkpoint in 4 bits the dtype that was asked for, and return it: of its other weights, and of
    what the 4 bits are written out to and multiplied in. transformers 5 leaves what the checkpoint has.

    Raises:
        DataError: a linear that should be in 4 bits isn't.
    """
    kept = "|".join(pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype))  # in float32
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.to(torch.float32 if kept and re.search(kept, name) else dtype)
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None and hasattr(module, "compute_type_is_set"):
            raise DataError(
                f"{name} is plain in a checkpoint that bitsandbytes quantised otherwise",
                "download it again, or name it in llm_int8_skip_modules of config.json's quantization_config",
            )
        if state is not None:
            state.dtype = module.compute_dtype = dtype
            module.compute_type_is_set = True
    return model


def keep_packed_4bit_layout(model: nn.Module) -> Any:
    """Keep bitsandbytes from repacking 4-bit weights, as it does on CPUs with AVX512-BF16 at the first evaluation.

    That is for a product without a backward: the next training step has the right loss and wrong gradients, and a merge
    reads garbage.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def prepare_4bit(model: nn.Module, device: torch.device) -> Any:
    """Keep the layout of 4-bit weights (`keep_packed_4bit_layout`) of a model that stays on `device`, and return it.

    Raises:
        UnsupportedError: bitsandbytes misreads some of them there.
    """
    if torch.device(device).type == "cpu":
        for name, module in model.named_modules():
            state = getattr(getattr(module, "weight", None), "quant_state", None)
            if state is not None and _is_misread(state.shape[-1], state.blocksize):
                rows = f"whose rows of {state.shape[-1]:,} end inside a block of {state.blocksize}"
                raise UnsupportedError(
                    f"a model in 4 bits on the CPU: bitsandbytes misreads {name}, {rows}",
                    "use a GPU, or the model in 16 or 32 bits",
                )
    return keep_packed_4bit_layout(model)


@functools.cache
def _is_misread(columns: int, block: int) -> bool:
    """Tell whether bitsandbytes on the CPU takes scales of other blocks for rows of so many columns, as 0.50 does with
    32 more than a multiple of 64: there a weight is a quarter off, where 4 bits are a tenth."""
    if not columns % block:
        return False
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.linspace(-1, 1, 16 * columns, dtype=torch.float32, device="cpu").pow(3).view(16, columns)
    codes, state = quantize_4bit(weight, blocksize=block, compress_statistics=True, quant_type="nf4")
    right = torch.empty_like(weight)
    write_out(NF4Weight.of(SimpleNamespace(data=codes, quant_state=state)), right)
    return not torch.allclose(dequantize_4bit(codes, state), right)
