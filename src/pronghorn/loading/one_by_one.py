"""Load a 16-bit checkpoint through the house's loader, one tensor at a time: to a GPU, quantised to NF4 on the way, or
shared by several processes.

    config.json  ->  skeleton on the meta device (with bitsandbytes' linears, where transformers' quantiser puts them)
    the loader's tensors, one at a time  ->  the device, in the model's dtype  ->  that quantiser's operation

The operation is the one that `from_pretrained` calls, so that storage is the same to the bit and PEFT and saving find
what they look for. The device never holds more than the model, or this process's part of it, and one layer or tensor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import PronghornError
from pronghorn.loading.composite import Composite
from pronghorn.loading.joined import Joining, Names, Part, parts_of
from pronghorn.loading.left_out import is_left_out
from pronghorn.loading.packed_checkpoint import fetched, language_source, read_generation_config
from pronghorn.loading.share import SharedLoading
from pronghorn.loading.skeleton import expected_of, fill, tied_names, without_weights
from pronghorn.loading.weights import NOT_LOADED


class Skeleton:
    """A causal LM on the meta device, with bitsandbytes' linears or plain ones, buffers on the CPU, until `fill`.

    Args:
        asked: the BitsAndBytesConfig to quantise by, or None.
    """

    def __init__(
        self, config: Any, asked: Any, dtype: torch.dtype, device: torch.device, attention: str | None
    ) -> None:
        model = without_weights(config, dtype, attention)
        self.model, self.device, self.expected = model, device, expected_of(model, dtype)
        self.names: Names
        self.parts: dict[str, Part] = {}
        self._quantizer: Any = None
        if asked is None:
            return
        from transformers.quantizers.auto import AutoHfQuantizer

        self._quantizer = AutoHfQuantizer.from_config(asked, pre_quantized=False)
        self._quantizer.validate_environment(device_map={"": device})
        self._quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": device}, checkpoint_files=None)
        self._operation = self._quantizer.get_quantize_ops()

    def why_not(self, names: list[str]) -> str | None:
        """Return why transformers' `from_pretrained` loads a checkpoint of these tensors, or None: the house's loader
        does.

        Weights that are joined from several tensors in other ways than experts are, and tied weights that lie in the
        files all the same, follow rules that are transformers' own.
        """
        model, tied = self.model, tied_names(self.model)
        self.names = Names(model, self.expected)
        parts = parts_of(self.names, names, self.expected)
        self.parts = parts or {}
        unknown = {new for name in names if name not in self.parts and (new := self.names.of(name)) not in tied}
        unknown -= self.expected.keys()
        apart = self.names.joins and any(not is_left_out(model, model.config, name) for name in unknown)
        if parts is None or apart:
            return "the checkpoint has parts of weights, which transformers joins"
        if any(self.names.of(name) in tied for name in names):
            return "the checkpoint holds tied weights twice"
        return None

    def fill(self, source: Any, share: SharedLoading | None = None) -> Any:
        """Read all weights of the checkpoint that `why_not` was asked about, join and quantise them if there is reason
        to, and return the model (`skeleton.fill`)."""
        model, quantizer, parts = self.model, self._quantizer, self.parts
        quantised = {name for name in self.expected if quantizer and quantizer.param_needs_quantization(model, name)}
        owners = {name: part.weight for name, part in parts.items()}
        whole = {name: tensor for name, tensor in self.expected.items() if name not in set(owners.values())}
        joining = Joining(parts, self.expected)

        def made(name: str, tensor: Tensor) -> Tensor | None:
            """Quantise a weight that is complete."""
            joined = joining.add(name, tensor)
            if joined is None or joined[0] not in quantised:
                return joined and joined[1]
            weight, tensor = joined
            result: Tensor = self._operation.convert({weight: [tensor]}, full_layer_name=weight, model=model)[weight]
            return result

        expected = whole | {name: self.expected[part.weight][0, : part.rows] for name, part in parts.items()}
        renamed = (
            replace(stored, name=stored.name if stored.name in parts else self.names.of(stored.name))
            for stored in source
        )
        fill(model, renamed, expected, self.device, share, transform=made, owners=owners)
        if quantizer is not None:
            model.hf_quantizer = quantizer
            quantizer.postprocess_model(model)
        return model


def load_one_by_one(
    name: str | Path,
    config: Any,
    asked: Any,
    dtype: torch.dtype,
    device: torch.device,
    hub: dict[str, Any],
    attention: str | None,
    composite: Composite | None,
    share: SharedLoading | None = None,
) -> tuple[Any, str]:
    """Load a 16-bit checkpoint, and quantise it if asked; (None, why) where that is transformers' to do.

    Args:
        asked: the BitsAndBytesConfig, or None.
        hub: its revision and token.
        composite: of a model with towers, which stay in their files.
        share: shares the layers with other processes.
    Raises:
        DataError: files or tensors are missing, damaged or of other shapes or dtypes; nothing is half-loaded.
    """
    if hub.get("trust_remote_code"):
        return None, "the checkpoint's own code may load it"
    folder = fetched(name, hub)
    if not Path(name).is_dir() and not any(folder.glob("*.safetensors")):
        return None, "the repository has no safetensors, and transformers may have them converted"
    plain = type(config).from_dict(config.to_dict())
    plain._name_or_path = str(name)
    try:
        skeleton = Skeleton(plain, asked, dtype, device, attention)
        reason = skeleton.why_not([stored.name for stored in language_source(folder, composite)])
    except PronghornError:
        raise
    except NOT_LOADED as error:  # a strange configuration, or names that are transformers' own and have changed
        return None, f"this version of transformers doesn't make it without weights ({error})"
    if reason is not None:
        return None, reason
    model = skeleton.fill(language_source(folder, composite), share)
    model.name_or_path = str(name)
    read_generation_config(model, folder, composite)
    return model, ""
