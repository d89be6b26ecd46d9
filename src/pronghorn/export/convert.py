"""GGUF files to plain safetensors folders, which load in a second where the GGUF file takes half a minute."""

from __future__ import annotations

from pathlib import Path

import torch

from pronghorn.export.folder import whole_folder
from pronghorn.models.gguf import load_gguf


def convert_gguf(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model and tokenizer of the GGUF file `path` as a checkpoint into `folder`, which appears whole.

    Args:
        path: the `.gguf` file.
        folder: where to; what was there is replaced once everything is written.
        dtype: of the checkpoint's weights.
    Raises:
        DataError, UnsupportedError: as `load_gguf`.
        TrainingError: the disk is full.
    """
    model, tokenizer = load_gguf(Path(path), dtype)
    with whole_folder(Path(folder)) as writing:
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
