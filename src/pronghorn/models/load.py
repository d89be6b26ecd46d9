"""Load a model and its tokenizer: local folders, hub names, saved adapters, GGUF files, bitsandbytes checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.models.families import check_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The dtype to load weights in; None and "auto" mean bfloat16 on a GPU that has it, float16 on an older GPU, and
    float32 on the CPU (where bfloat16 is slower).

    Raises:
        ConfigError: an unknown dtype.
    """
    if dtype is None or dtype == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(
            f"dtype {dtype!r} is unknown", f"use one of {', '.join(DTYPES)}, or None for the device's own"
        )
    return DTYPES[name]


def default_device() -> torch.device:
    """This process's GPU (its local rank's under torchrun), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    from accelerate import PartialState

    device = PartialState().device
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def load_model(
    name: str | Path,
    *,
    max_seq_length: int,
    dtype: torch.dtype | str | None = None,
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
    token: str | None = None,
    revision: str | None = None,
    device: torch.device | None = None,
) -> tuple[Any, Any]:
    """Load a causal LM (with its adapter, if `name` is a saved adapter's folder) and its tokenizer.

    Args:
        name: a local folder, a hub name, or a `.gguf` file.
        max_seq_length: tokens of a packed row; at most what the model's positions allow.
        dtype: of the weights; None lets the device decide (`resolve_dtype`).
        load_in_4bit: quantise the linears to NF4 through bitsandbytes while loading.
        trust_remote_code: run Python code that comes with the checkpoint.
        token, revision: for the hub.
        device: None for this process's own.
    Raises:
        ConfigError: `max_seq_length` out of range, or options that contradict each other.
        DataError: the folder or file is missing or holds no safetensors weights.
        UnsupportedError: a family or a quantisation Pronghorn doesn't serve.
    """
    if max_seq_length <= 0:
        raise ConfigError(f"max_seq_length {max_seq_length} is not positive", "give the tokens a packed row shall hold")
    device = device or default_device()
    weights_dtype = resolve_dtype(dtype, device)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        model, tokenizer = _load_gguf(path, weights_dtype, load_in_4bit)
        model.to(device)
        check_max_seq_length(model.config, max_seq_length)
        return model, tokenizer
    if not path.exists() and (path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1):
        raise DataError(f"model folder {name} does not exist", "check the path, or give a hub name like owner/model")
    if (path / "adapter_config.json").is_file():
        return _load_with_adapter(
            path, max_seq_length, weights_dtype, load_in_4bit, trust_remote_code, token, revision, device
        )
    if path.is_dir():
        _check_weights(path)
    from transformers import AutoConfig, AutoModelForCausalLM

    name = path if path.exists() else name
    hub = {"trust_remote_code": trust_remote_code, "token": token, "revision": revision}
    try:
        config = AutoConfig.from_pretrained(name, **hub)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"model {name} is neither a folder here nor to be had from the hub ({reason})",
            "check the name and the connection; a private model needs `token`",
        ) from error
    check_config(config)
    check_max_seq_length(config, max_seq_length)
    quantization = _quantization(config, load_in_4bit, weights_dtype)
    tokenizer = _tokenizer(name, **hub)
    model = AutoModelForCausalLM.from_pretrained(
        name,
        config=config,
        dtype=weights_dtype,
        use_safetensors=True,
        attn_implementation="sdpa",
        device_map={"": device},
        **hub,
        **({"quantization_config": quantization} if quantization is not None else {}),
    )
    _keep_packed_4bit_layout(model)
    return model, tokenizer


def _tokenizer(name: str | Path, **hub: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **hub)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name} has no tokenizer that loads ({error})", "save the model's tokenizer beside it"
        ) from error


def _keep_packed_4bit_layout(model: nn.Module) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes repacks 4-bit weights at the first evaluation, for a product without a
    backward: the next training step has the right loss and wrong gradients, and a merge reads garbage. Keep it off."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def check_max_seq_length(config: Any, max_seq_length: int) -> None:
    """Raise ConfigError if rows are longer than the model's positions reach."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_seq_length > limit:
        raise ConfigError(
            f"max_seq_length {max_seq_length} > {limit}, the positions of this model (max_position_embeddings)",
            f"use max_seq_length <= {limit}",
        )


def _load_gguf(path: Path, dtype: torch.dtype, load_in_4bit: bool) -> tuple[Any, Any]:
    from pronghorn.models.gguf import load_gguf

    if not path.is_file():
        raise DataError(f"GGUF file {path} does not exist", "check the path")
    if load_in_4bit:
        raise ConfigError(
            f"load_in_4bit with {path.name}: a GGUF file is unpacked to dense weights",
            "save it once with save_pretrained and load that folder with load_in_4bit=True",
        )
    model, tokenizer = load_gguf(path, dtype)
    check_config(model.config)
    return model, tokenizer


def _load_with_adapter(
    path: Path,
    max_seq_length: int,
    dtype: torch.dtype,
    load_in_4bit: bool,
    trust_remote_code: bool,
    token: str | None,
    revision: str | None,
    device: torch.device,
) -> tuple[Any, Any]:
    """A folder that `save_pretrained` of a PEFT model wrote: its base model, then the adapter, ready to train on."""
    from peft import PeftModel

    base_name = json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
    base, tokenizer = load_model(
        base_name,
        max_seq_length=max_seq_length,
        dtype=dtype,
        load_in_4bit=load_in_4bit,
        trust_remote_code=trust_remote_code,
        token=token,
        revision=revision,
        device=device,
    )
    _check_weights(path)
    if (path / "tokenizer_config.json").is_file():
        tokenizer = _tokenizer(path, trust_remote_code=trust_remote_code)
    return PeftModel.from_pretrained(base, path, is_trainable=True), tokenizer


def _check_weights(folder: Path) -> None:
    """Refuse a folder without safetensors, and files of them that are damaged or cut short."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass  # opening compares the header with the file's size
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: not a whole safetensors file ({error})", "copy or download it again") from error
    if not files:
        found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf"))
        raise DataError(
            f"{folder} holds no safetensors weights (found: {', '.join(found) or 'no weights at all'})",
            "pickled weights are never read: convert them to safetensors; a GGUF file is given by its own path",
        )


def _quantization(config: Any, load_in_4bit: bool, dtype: torch.dtype) -> Any:
    """The bitsandbytes config to load with, or None; a checkpoint that is already quantised keeps its own."""
    stored = getattr(config, "quantization_config", None)
    method = (stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)) or ""
    if stored is not None and str(getattr(method, "value", method)) != "bitsandbytes":
        raise UnsupportedError(
            f"the checkpoint is quantised by {method!r}", "use the 16-bit checkpoint, or one quantised by bitsandbytes"
        )
    if stored is None and not load_in_4bit:
        return None
    import importlib.util

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


def trainable_parameters(model: nn.Module) -> dict[str, float]:
    """How much of the model is trained: `tensors`, `parameters`, and their `share` of all parameters."""
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    everything = sum(p.numel() for p in model.parameters())
    return {"tensors": len(trained), "parameters": sum(trained), "share": sum(trained) / max(everything, 1)}
