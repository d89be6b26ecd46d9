"""Load a model and its tokenizer: local folders, hub names, saved adapters, GGUF files, bitsandbytes checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pronghorn.data.downloads import only_cached, room_for
from pronghorn.errors import ConfigError, DataError, PronghornError, UnsupportedError
from pronghorn.families.registry import without_dropout
from pronghorn.loading.adapter import has_more_tokens, with_adapter
from pronghorn.loading.composite import Composite
from pronghorn.loading.limits import check_range, check_sizes, check_values, check_weights_fit
from pronghorn.loading.new_tokens import grow_embeddings
from pronghorn.loading.one_by_one import load_one_by_one
from pronghorn.loading.packed_checkpoint import beside_config, format_of, load_packed
from pronghorn.loading.share import SharedLoading
from pronghorn.loading.skeleton import LOADING
from pronghorn.loading.weights import bitsandbytes_config, check_quantised, prepare_4bit, whole_model, with_dtype
from pronghorn.models.adapter_files import CONFIG, check_adapter_config, check_adapter_weights, check_embeddings
from pronghorn.models.families import check_config
from pronghorn.models.report import LOADED_BY
from pronghorn.precision.loader import check_weights, json_value, model_beneath

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROW_LENGTH = 2048
"""Tokens of a packed row where nobody says."""
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """Return the dtype to load weights in.

    None and "auto" mean bfloat16 on a GPU that has it, float16 on an older GPU, and float32 on the CPU (where bfloat16
    is slower).

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
    """Return this process's GPU (its local rank's under torchrun), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    from accelerate import PartialState

    device = PartialState().device
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def load_model(
    name: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | None = None, **options: Any
) -> tuple[Any, Any]:
    """Load a causal LM (with its adapter, if `name` is a saved adapter's folder) and its tokenizer.

    Args:
        name: a local folder, a hub name, or a `.gguf` file.
        dtype: of the weights; None lets the device decide (`resolve_dtype`).
        device: None for this process's own.
        options: those of `find_model`.
    Raises:
        ConfigError, DataError, UnsupportedError: as `find_model`; DataError, too, where weights are missing.
    """
    device = default_device() if device is None else torch.device(device)
    weights_dtype = resolve_dtype(dtype, device)
    found = find_model(name, **options)
    tokenizer = found.tokenizer()
    return found.model(weights_dtype, device), tokenizer


@dataclass(frozen=True)
class FoundModel:
    """A model that is there, everything checked that needs no weights: its tokenizer can be used before they load."""

    name: str | Path
    config: Any
    """None for a GGUF file and for an adapter, which has its base's."""
    base: FoundModel | None
    """What a saved adapter goes on."""
    max_seq_length: int | None
    load_in_4bit: bool
    hub: dict[str, Any]
    composite: Composite | None = None
    """Where the model lies among towers; `config` is the language model's."""
    experts_in_16bit: bool = False
    """Whether `load_in_4bit` leaves experts as they are."""

    @property
    def is_adapter(self) -> bool:
        """Whether it is a saved adapter's folder."""
        return self.base is not None

    @property
    def is_generic(self) -> bool:
        """Whether layers are transformers' own: no family file knows the model, or they have dropout."""
        found = self.base or self
        return found.config is not None and check_config(found.config).generic

    @property
    def is_quantised(self) -> bool:
        """Whether weights are loaded in fewer bits than they are computed in."""
        config = (self.base or self).config
        return self.load_in_4bit or getattr(config, "quantization_config", None) is not None

    def tokenizer(self) -> Any:
        """Load the tokenizer; an adapter's own if one was saved with it."""
        path = Path(self.name)
        if path.suffix == ".gguf":
            from pronghorn.loading.gguf import tokenizer_of

            return tokenizer_of(path)
        if self.base is not None and not (path / "tokenizer_config.json").is_file():
            return self.base.tokenizer()
        with room_for(self.name):
            return _tokenizer(self.name, **self.hub)

    def model(self, dtype: torch.dtype, device: torch.device, share: SharedLoading | None = None) -> Any:
        """Load the model with weights of `dtype` (those of a quantised base stay as stored) on `device`.

        Args:
            share: shares the layers with other processes while it loads, where the house's loader does. What
                transformers loads instead is whole: on `device` if it is quantised, else on the CPU.
        """
        if self.base is not None:
            base, tokenizer = self.base.model(dtype, device), self.tokenizer()
            rows = check_embeddings(
                Path(self.name), base.get_input_embeddings().weight.shape[0]
            )  # others pad or cut them
            if rows is not None or has_more_tokens(self.name, tokenizer, self.base.tokenizer()):
                grow_embeddings(base, tokenizer, exactly=rows)  # trained with new tokens
            _stop_at(base, tokenizer.eos_token_id)
            return with_adapter(base, self.name)
        with room_for(self.name), LOADING:
            model = self._whole_base(dtype, device, share)
        if self.composite is not None:
            model.composite = self.composite  # plain attributes, never saved: saving goes back to the checkpoint
            model.hub_revision = self.hub["revision"]
            model._checkpoint_conversion_mapping = self.composite.adapter_names  # which PEFT looks for
        return model

    def _whole_base(self, dtype: torch.dtype, device: torch.device, share: SharedLoading | None) -> Any:
        """Load the model without an adapter."""
        if self.config is None:
            from pronghorn.loading.gguf import load_gguf

            model, _ = load_gguf(Path(self.name), dtype, device)
            check_config(model.config)
            check_max_seq_length(model.config, self.max_seq_length)
            return model
        check_range(self.config, dtype)
        if format_of(self.config) is not None:
            return load_packed(self.name, self.config, dtype, device, self.hub, self.composite, share)
        quantization = bitsandbytes_config(self.config, self.load_in_4bit, dtype, self.experts_in_16bit)
        attention = check_config(self.config).load_attention
        shares = share is not None and not self.is_quantised
        model, reason = None, ""
        to_gpu = device.type == "cuda" and not self.is_quantised  # on a CPU transformers is faster: it maps the files
        if quantization is not None or shares or to_gpu:
            model, reason = load_one_by_one(
                self.name, self.config, quantization, dtype, device, self.hub, attention, self.composite, share
            )
        if model is None:
            model = whole_model(
                self.name,
                self.composite,
                config=self.config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=attention,
                device_map={"": torch.device("cpu") if shares else device},
                **self.hub,
                **({"quantization_config": quantization} if quantization is not None else {}),
            )
        if quantization is not None:
            model.__dict__[LOADED_BY] = reason
        elif self.is_quantised:
            with_dtype(model, dtype)
        return prepare_4bit(model, device)


def _is_missing(name: str | Path) -> bool:
    """Tell whether a model's name is that of a folder, and not of a hub's model, but none is there."""
    path = Path(os.path.expanduser(name))
    is_path = path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1
    return is_path and not path.exists()


def find_model(
    name: str | Path,
    *,
    max_seq_length: int | None,
    load_in_4bit: bool = False,
    experts_in_16bit: bool = False,
    dropout: bool = True,
    trust_remote_code: bool = False,
    token: str | None = None,
    revision: str | None = None,
    weights: bool = True,
) -> FoundModel:
    """Find a model and check all that can be checked without its weights.

    Args:
        name: a local folder (a saved adapter's too), a hub name, or a `.gguf` file.
        max_seq_length: tokens of a packed row; at most what the model's positions allow. None: not asked.
        load_in_4bit: quantise linears and experts to NF4 through bitsandbytes while loading.
        experts_in_16bit: leave the experts out of that.
        dropout: without, layers drop nothing in training, whatever the model's configuration says.
        trust_remote_code: run Python code that comes with the checkpoint.
        token, revision: for the hub; of a saved adapter's base the revision that it was trained on, if not given.
        weights: without, these and what reads them needn't be there.
    Raises:
        ConfigError: `max_seq_length` out of range, or options that contradict each other.
        DataError: the folder or file is missing, or holds no safetensors weights or not all of them.
        UnsupportedError: a family or a quantisation Pronghorn doesn't serve.
    """
    if max_seq_length is not None and (type(max_seq_length) is not int or max_seq_length <= 0):
        raise ConfigError(
            f"max_seq_length {max_seq_length!r} is not a positive number", "give the tokens a packed row shall hold"
        )
    if experts_in_16bit and not load_in_4bit:
        raise ConfigError(
            "experts_in_16bit without load_in_4bit, which alone changes them", "leave experts_in_16bit out"
        )
    if not isinstance(name, str | Path) or not str(name):
        what = repr(name) if name is None or isinstance(name, str | int) else f"is a {type(name).__name__}, and"
        raise ConfigError(f"model_name {what} is not a name", "give a folder, a .gguf file or a hub name (owner/model)")
    path = Path(os.path.expanduser(name))  # leaves a home that isn't there as it is
    hub = {"trust_remote_code": trust_remote_code, "token": token, "revision": revision, **only_cached(path)}
    if path.suffix == ".gguf":
        _check_gguf(path, load_in_4bit)
        return FoundModel(path, None, None, max_seq_length, load_in_4bit, hub)
    if _is_missing(name):
        raise DataError(f"model folder {name} does not exist", "check the path, or give a hub name like owner/model")
    if path.is_file():
        raise DataError(f"{path} is a file, not a model's folder", "give the folder that holds config.json and weights")
    if (path / "run.json").is_file() and not (path / "config.json").is_file():
        inside = next((part for part in ("adapter", "model") if (path / part).is_dir()), "adapter")
        raise DataError(f"{path} is a run, not a model", f"give {path / inside}")
    if path.is_dir() and weights and not any((path / name).is_file() for name in ("config.json", CONFIG)):
        gguf, beneath = next(path.glob("*.gguf"), None), model_beneath(path)
        remedy = f"give {beneath}" if beneath else "give a model's folder, or copy its config.json beside it"
        raise DataError(
            f"{path} holds no config.json" + (" but GGUF files" if gguf else ""),
            f"give {gguf}, by its own path" if gguf else remedy,
        )
    files = check_weights(path) if path.is_dir() and weights else []
    if (path / CONFIG).is_file():
        base_name = json_value(path / CONFIG, "base_model_name_or_path")
        if not base_name or not isinstance(base_name, str):
            raise DataError(
                f"{path / CONFIG} does not name the model that the adapter goes on",
                "set base_model_name_or_path to its folder or hub name",
            )
        if _is_missing(base_name):
            raise DataError(
                f"the adapter's base, {base_name}, does not exist",
                f"put it back there, or write where it is now into base_model_name_or_path of {path / CONFIG}",
            )
        if (Path(os.path.expanduser(base_name)) / CONFIG).is_file():
            raise DataError(
                f"{path / CONFIG} names {base_name} as its base model, which is an adapter itself",
                "set base_model_name_or_path to a whole model; save_pretrained_merged makes one of an adapter",
            )
        table = check_adapter_config(path / CONFIG)
        if weights:
            check_adapter_weights(path, table)
        base = find_model(
            base_name,
            max_seq_length=max_seq_length,
            load_in_4bit=load_in_4bit,
            experts_in_16bit=experts_in_16bit,
            dropout=dropout,
            trust_remote_code=trust_remote_code,
            token=token,
            revision=revision or table.get("revision"),
            weights=weights,
        )
        return FoundModel(path, None, base, max_seq_length, load_in_4bit, hub)
    found = path if path.exists() else name
    with room_for(found):
        config = _config(found, hub)
    composite = Composite.of(found, config)
    if composite is not None:
        config = composite.text_config()
    if not dropout:
        without_dropout(config)
    check_config(config)
    check_values(found, config)
    check_max_seq_length(config, max_seq_length)
    check_quantised(config, load_in_4bit, experts_in_16bit)
    if files:
        check_weights_fit(path, files, config, composite)
    if weights:
        bitsandbytes_config(config, load_in_4bit, torch.float32)
    return FoundModel(found, config, None, max_seq_length, load_in_4bit, hub, composite, experts_in_16bit)


def _config(name: str | Path, hub: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    try:
        table, _ = PretrainedConfig.get_config_dict(name, **hub)
        check_sizes(name, table)  # before transformers makes lists as long as they say
        config = AutoConfig.from_pretrained(name, **hub)
        if getattr(config, "quantization_config", None) is None:
            stored = beside_config(name, hub)
            if stored is not None:
                config.quantization_config = stored
        return config
    except PronghornError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, StrictDataclassError) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        if isinstance(error, OSError) and not isinstance(name, Path):
            reason = reason.split(". ")[0].split(", and couldn't")[0].replace("Repo id must use", "names have only")
            raise DataError(
                f"model {name} is neither a folder here nor to be had from the hub ({reason})",
                "check the name (owner/model) and the connection; a private model needs HF_TOKEN in the environment",
            ) from error
        if "not a valid JSON file" in reason:
            raise DataError(
                f"{name}: its config.json is not valid JSON",
                "download it again; git lfs pull, if Git LFS left a pointer",
            ) from error
        raise UnsupportedError(
            f"{name}: its config.json can't be used ({reason})",
            "give a causal language model that this version of transformers knows; trust_remote_code runs code that "
            "comes with a model",
        ) from error


def _tokenizer(name: str | Path, **hub: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, **hub)
    except Exception as error:  # tokenizers, in Rust, has no class for what it can't read
        reason = str(error).partition(":")[0].strip().partition("\n")[0]
        raise DataError(
            f"{name} has no tokenizer that loads ({reason})", "copy the files of the base's tokenizer into that folder"
        ) from error
    end, unknown = tokenizer.eos_token, getattr(tokenizer, "unk_token", None)
    if end is not None and end != unknown and tokenizer.eos_token_id == getattr(tokenizer, "unk_token_id", None):
        raise DataError(f"{name}: its tokenizer has no token {end!r} (eos_token)", "fix its tokenizer_config.json")
    if not isinstance(longest := getattr(tokenizer, "model_max_length", 0), int | float):
        raise DataError(f"{name}: model_max_length {longest!r} is not a number", "fix its tokenizer_config.json")
    return tokenizer


def _stop_at(base: Any, end: int | None) -> None:
    """Let generation stop at an adapter's own end token, too: that of the chat template that it was trained with."""
    if (config := base.generation_config) is None:  # a class of transformers that can't generate
        return
    stops = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
    if end is not None and end not in stops:
        config.eos_token_id = [end, *stops]


def row_length(config: Any, asked: int | None) -> int:
    """Return the tokens of a packed row: as asked, or the usual ones, as far as the model's positions reach."""
    limit = getattr(config, "max_position_embeddings", None) or 0
    return asked or (min(ROW_LENGTH, limit) if limit > 0 else ROW_LENGTH)


def check_max_seq_length(config: Any, max_seq_length: int | None) -> None:
    """Raise ConfigError if rows are longer than the model's positions reach."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and 0 < limit < (max_seq_length or 0):  # -1 says that there is no limit
        raise ConfigError(
            f"max_seq_length {max_seq_length} > {limit}, the positions of this model (max_position_embeddings)",
            f"use max_seq_length <= {limit}",
        )


def _check_gguf(path: Path, load_in_4bit: bool) -> None:
    if not path.is_file():
        raise DataError(f"GGUF file {path} does not exist", "check the path")
    if load_in_4bit:
        raise ConfigError(
            f"load_in_4bit with {path.name}: a GGUF file is unpacked to dense weights",
            "save it once with save_pretrained and load that folder with load_in_4bit=True",
        )
