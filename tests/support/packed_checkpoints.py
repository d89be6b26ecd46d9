"""Small checkpoints whose weights are stored in few bits, as their publishers store them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pronghorn.diagnose.shapes import byte_tokenizer
from support.tiny import tiny_model


def mxfp4_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """Write a tiny gpt-oss whose experts are in MXFP4, and return its tensors."""
    model = tiny_model("gpt_oss", seed, **{"intermediate_size": 32, **changes}).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, k, n = parameter.shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(118, 125, (experts, n, k // 32), dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = parameter.detach().contiguous()
    return write(
        folder, model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    )


def write(folder: Path, model: Any, tensors: dict[str, Tensor], stored: dict[str, Any]) -> dict[str, Tensor]:
    """Write a checkpoint with these tensors and this quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**table, "dtype": "bfloat16", "quantization_config": stored}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    byte_tokenizer(512).save_pretrained(folder)
    return tensors


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Put another tensor into a checkpoint, or take one out."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, folder / "model.safetensors", {"format": "pt"})
