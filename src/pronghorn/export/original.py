"""The checkpoint of a model with towers that a language model was loaded out of: what saving keeps of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import DataError, UnsupportedError
from pronghorn.export.folder import forget_older_templates
from pronghorn.loading.composite import Composite
from pronghorn.loading.packed_checkpoint import METADATA, MODELOPT_FILE, fetched
from pronghorn.models.families import base_causal_lm
from pronghorn.precision.loader import StoredTensor, checkpoint
from pronghorn.text import counted

_MODELS = ("config.json", "generation_config.json")
"""Files that a model's `save_pretrained` writes; the others beside the weights are a tokenizer's and a processor's."""


def composite_of(model: Any) -> Composite | None:
    """Return where a model, or the base of its adapter, lies among towers; None for what has none."""
    composite: Composite | None = getattr(base_causal_lm(model), "composite", None)
    return composite


class Original:
    """The checkpoint that a language model was loaded out of: its names, its other tensors and files."""

    def __init__(self, composite: Composite, base: Any) -> None:
        """Look into the headers of the files; nothing is read.

        Raises:
            DataError: the checkpoint is gone.
            UnsupportedError: it stores its towers in few bits, which a 16-bit checkpoint has no place for.
        """
        name = base.name_or_path
        if not Path(name).is_dir() and Path(name).is_absolute():
            raise DataError(
                f"{name}, where the model's towers are, is gone", "restore it, or save the adapter (save_pretrained)"
            )
        self.composite = composite
        self.folder = fetched(name, {"revision": getattr(base, "hub_revision", None)})
        self.towers: dict[str, StoredTensor] = {}
        """What is kept as it is, by its name in the files."""
        self._files_names: dict[str, str] = {}
        for stored in checkpoint(self.folder):
            if composite.inside(stored.name) is None:
                self.towers[stored.name] = stored
            else:
                self._files_names[composite.name_in_whole(stored.name)] = stored.name
        packed = [stored.name for stored in self.towers.values() if stored.dtype.itemsize < 2]
        if packed:
            raise UnsupportedError(
                f"{name} stores {counted(len(packed), 'tensor')} beside the language model in few bits "
                f"({packed[0]} ...)",
                "save the adapter, and merge it into the 16-bit checkpoint",
            )

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name, split and join a causal LM's tensors as the original's files have them."""
        from transformers.core_model_loading import revert_weight_conversion

        outside = {self.composite.outside(name): tensor for name, tensor in tensors.items()}
        reverted = revert_weight_conversion(self.composite.whole, outside)
        return {
            self._files_names.get(self.composite.name_in_whole(name), name): tensor for name, tensor in reverted.items()
        }

    def tower(self, name: str) -> Tensor:
        """Read one of `towers`."""
        from safetensors import safe_open

        with safe_open(self.towers[name].origin, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def write_files(self, base: Any, dtype: torch.dtype, folder: Path) -> None:
        """Copy all files but the weights: configuration, processor, tokenizer; not over those that a tokenizer saved in
        the folder before. In config.json the dtype and what training changed (vocabulary, a tied head) are set, and a
        quantisation goes."""
        theirs, own = (each / "chat_template.jinja" for each in (folder, self.folder))
        told = theirs.exists() and not (own.exists() and own.read_bytes() == theirs.read_bytes())
        for file in self.folder.iterdir():
            left_out = ".safetensors" in file.name or file.name == MODELOPT_FILE
            saved = (folder / file.name).exists() and file.name not in _MODELS
            if any(file.match(glob) for glob in METADATA) and not (left_out or saved):
                shutil.copyfile(file, folder / file.name)
        _one_template(folder, told)
        path = folder / "config.json"
        before = json.loads(path.read_text(encoding="utf-8"))
        table = {key: value for key, value in before.items() if key != "quantization_config"}
        text = dict(table.get("text_config") or {})
        original = self.composite.text_config()
        for key in ("vocab_size", "tie_word_embeddings"):
            if getattr(base.config, key) != getattr(original, key):
                text[key] = getattr(base.config, key)
                if key in table or key == "tie_word_embeddings":
                    table[key] = text[key]
        for part in (table, text):
            named = [key for key in ("dtype", "torch_dtype") if key in part]
            for key in named or (["dtype"] if part is table else []):
                part[key] = str(dtype).removeprefix("torch.")
        if text:
            table["text_config"] = text
        if table != before:
            path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _one_template(folder: Path, told: bool) -> None:
    """Move a processor's chat template out of the older places to chat_template.jinja, which a tokenizer that is saved
    here later writes anew. One that differs from the tokenizer's stays where it is.

    Args:
        told: whether a tokenizer was saved here before, with its template.
    """
    new = folder / "chat_template.jinja"
    tables = (folder / name for name in ("processor_config.json", "chat_template.json", "tokenizer_config.json"))
    read = (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {} for path in tables)
    first, older, own = (table.get("chat_template") for table in read)
    first, own = first or older, new.read_text(encoding="utf-8") if new.is_file() else own
    if isinstance(first, str) and (told or own in (None, first)):
        if not told:
            new.write_text(first, encoding="utf-8")
        forget_older_templates(folder)
