"""Load checkpoints whose weights are stored in few bits, as they are: frozen, written out or multiplied per use.

    config.json's quant_method  ->  a format  ->  skeleton on the meta device, its packed parameters in place
    the loader's tensors, one at a time  ->  parts of these parameters, and all other weights in the model's dtype

A format (`packed_formats`) says which tensors of a checkpoint make up a parameter. Nothing is unpacked on the way: the
device never holds more than the model and one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.errors import DataError
from pronghorn.loading.composite import Composite
from pronghorn.loading.packed_formats import FORMATS, NOT_READ, Format, packed_parameters
from pronghorn.loading.share import SharedLoading
from pronghorn.loading.skeleton import check_tied, expected_of, fill, put, without_weights
from pronghorn.models.families import check_config
from pronghorn.precision.loader import StoredTensor, checkpoint, json_value
from pronghorn.text import clip

METADATA = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files of a hub's repository that loading reads beside weights; folders below it hold other formats."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where NVIDIA's Model Optimizer says how it quantised; newer versions say it in config.json, too."""


def quantisation_of(config: Any) -> dict[str, Any]:
    """Return a configuration's quantization_config as a dict, empty where it has none."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return {}
    return dict(stored) if isinstance(stored, dict) else dict(stored.to_dict())


def method_of(config: Any) -> str:
    """Return a configuration's quant_method, empty where it has none."""
    method = quantisation_of(config).get("quant_method", "")
    return str(getattr(method, "value", method))


def format_of(config: Any) -> Format | None:
    """Return the format of a checkpoint with this configuration; None for what transformers loads."""
    return FORMATS.get(method_of(config))


def beside_config(name: str | Path, hub: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of a ModelOpt checkpoint that has it in a file of its own, or None.

    Raises:
        DataError: the file can't be read.
    """
    from transformers.utils import cached_file

    file = cached_file(
        str(name), MODELOPT_FILE, **_asked(hub),
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    if file is None:
        return None
    stored = json_value(Path(file), "quantization")
    if not isinstance(stored, dict):
        raise DataError(f"{file}: its quantization is not a table", "copy, download or save it again")
    return {"quant_method": "modelopt", **stored} if stored.get("quant_algo") else None  # it may be the KV cache alone


def _asked(hub: dict[str, Any]) -> dict[str, Any]:
    """Return what the hub's client takes of the options of `find_model`."""
    return {name: hub[name] for name in ("token", "revision", "local_files_only") if hub.get(name) is not None}


@dataclass(frozen=True)
class PackedSkeleton:
    """The model of a packed checkpoint, its weights on the meta device until `fill`, buffers on the CPU."""

    model: Any
    dtype: torch.dtype
    """Of the weights that aren't packed."""
    parts: dict[str, tuple[str, int]]
    """(parameter, number of its part) by the part's name in the checkpoint."""

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype | None = None) -> PackedSkeleton:
        """Make the model of a configuration whose quantization_config names one of `FORMATS`."""
        stored, form = quantisation_of(config), format_of(config)
        assert form is not None
        plain = type(config).from_dict(config.to_dict())
        del plain.quantization_config
        plain._name_or_path = config._name_or_path
        dtype = dtype or config.dtype or torch.bfloat16
        model = without_weights(plain, dtype, check_config(plain).load_attention)
        parts: dict[str, tuple[str, int]] = {}
        for name, packed, names in packed_parameters(form, model, stored):
            put(model, name, nn.Parameter(packed, requires_grad=False))
            parts |= {part: (name, number) for part, number in names.items()}
        return cls(model, dtype, parts)

    def expected(self) -> dict[str, Tensor]:
        """Return a tensor on the meta device for every tensor that a checkpoint must have, by its name there."""
        return expected_of(self.model, self.dtype) | {
            part: self.model.get_parameter(name).parts[number] for part, (name, number) in self.parts.items()
        }

    def fill(self, source: Iterable[StoredTensor], device: torch.device, share: SharedLoading | None = None) -> Any:
        """Read all weights to a device and return the model (`skeleton.fill`)."""
        expected, waiting = self.expected(), dict[str, dict[int, Tensor]]()

        def join(key: str, tensor: Tensor) -> Tensor | None:
            """Return a packed parameter when the last of its parts has come, None before."""
            if key not in self.parts:
                return tensor
            parameter, number = self.parts[key]
            arrived = waiting.setdefault(parameter, {})
            arrived[number] = tensor
            skeleton: Any = self.model.get_parameter(parameter)
            if len(arrived) < len(skeleton.parts):
                return None
            del waiting[parameter]  # nothing holds a layer that is shared
            return nn.Parameter(skeleton.of_parts([arrived[each] for each in sorted(arrived)]), requires_grad=False)

        shaped, owners = _shaped(source, expected), {part: name for part, (name, _) in self.parts.items()}
        return fill(self.model, shaped, expected, device, share, transform=join, owners=owners, unread=NOT_READ)


def load_packed(
    name: str | Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    hub: dict[str, Any],
    composite: Composite | None = None,
    share: SharedLoading | None = None,
) -> Any:
    """Load a packed checkpoint from a folder or the hub.

    Args:
        composite: of a model with towers, which stay in their files.
        dtype: of the weights that aren't packed, and of those that are when they are written out.
        share: shares the layers with other processes.
    Raises:
        DataError: files or tensors are missing, damaged or of other shapes or dtypes; nothing is half-loaded.
    """
    skeleton = PackedSkeleton.of(config, dtype)  # a format that isn't served is told before anything is fetched
    folder = fetched(name, hub)
    check_tied(skeleton.model, language_source(folder, composite))
    model = skeleton.fill(language_source(folder, composite), device, share)
    read_generation_config(model, folder, composite)
    return model


def language_source(folder: Path, composite: Composite | None) -> Iterable[StoredTensor]:
    """Yield the tensors of a folder's checkpoint, of a model with towers the language model's."""
    source = checkpoint(folder)
    return source if composite is None else composite.language(source)


def _shaped(source: Iterable[StoredTensor], expected: Mapping[str, Tensor]) -> Iterator[StoredTensor]:
    """Give single numbers the shape that is expected ([], [1] and [1, 1] are all published), and scales that are stored
    as powers of two (e8m0) float32."""
    for stored in source:
        target = expected.get(stored.name)
        if target is None:
            yield stored
            continue
        one = target.numel() == 1 and all(size == 1 for size in stored.shape)
        shape = tuple(target.shape) if one else stored.shape
        power = stored.dtype is torch.float8_e8m0fnu and target.dtype is torch.float32

        def rows(
            start: int, stop: int, stored: StoredTensor = stored, shape: Any = shape, power: bool = power
        ) -> Tensor:
            tensor = stored.read().reshape(shape)
            return tensor.float() if power else tensor

        dtype = torch.float32 if power else stored.dtype
        yield replace(stored, shape=shape, dtype=dtype, rows=rows) if one or power else stored


def fetched(name: str | Path, hub: dict[str, Any]) -> Path:
    """Return a model's folder; of one on the hub, what was downloaded of it: the weights that its index names, or
    model.safetensors. A repository may hold the publisher's own format beside these, or other precisions."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    def download(patterns: Iterable[str]) -> Path:
        wanted = sorted(patterns)
        return Path(snapshot_download(str(name), allow_patterns=wanted, ignore_patterns=["*/*"], **_asked(hub)))

    try:
        index = download(METADATA) / "model.safetensors.index.json"
        return download(set(json_value(index, "weight_map").values()) if index.is_file() else ["model.safetensors"])
    except (OSError, ValueError) as error:
        raise DataError(f"model {name} can't be had from the hub ({error})", "check the name and connection") from error


def read_generation_config(model: Any, folder: Path, composite: Composite | None = None) -> None:
    """Give a model the generation_config.json of its folder or, as transformers does, what a language model's
    config.json says of generation.

    Raises:
        DataError: it holds a value that transformers doesn't take.
    """
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    options: dict[str, Any] = {}
    if not file.is_file() and composite is None and model.can_generate():
        file, options = folder / "config.json", {"_from_model_config": True}
    if not file.is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, file.name, **options)
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{file} can't be used ({clip(str(error), 300)})", "fix it, or remove it") from error
