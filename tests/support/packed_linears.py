"""Small dense models whose linears are stored in few bits, as llm-compressor, ModelOpt, Qwen and DeepSeek publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.packed_checkpoints import write
from support.tiny import tiny_model

SIZES = {"hidden_size": 160, "intermediate_size": 336, "head_dim": 32, "num_hidden_layers": 2}
"""Blocks of 128 are cut short in both directions; sizes are multiples of 16."""
BLOCK = 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _group(strategy: str, bits: int = 8, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
KINDS: dict[str, dict[str, Any]] = {
    "fine-grained": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    "rows": {**COMPRESSED, **_group("channel")},
    "tensors": {**COMPRESSED, **_group("tensor")},
    "blocks": {**COMPRESSED, **_group("block", block_structure=[BLOCK, BLOCK])},
    "nvfp4": {**COMPRESSED, "format": "nvfp4-pack-quantized", **_group("tensor_group", 4, group_size=16)},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
"""The quantization_config of each."""


def stored_as(kind: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return a weight's tensors by their names after the linear's, and what they stand for in float32."""
    n, k = weight.shape
    wide = weight.detach().float()
    if kind in ("nvfp4", "modelopt"):
        scale = wide.abs().max() / (6 * 448)
        scales = (wide.view(n, -1, 16).abs().amax(-1) / 6 / scale).to(torch.float8_e4m3fn)
        inverse = (1 / scale).reshape(1)
        factors = scales.float() / inverse if kind == "nvfp4" else scales.float() * scale
        units = wide.view(n, -1, 16) / factors[..., None]
        codes = (units.abs()[..., None] - E2M1).abs().argmin(-1)
        dense = (E2M1[codes] * torch.where(units < 0, -1.0, 1.0) * factors[..., None]).view(n, k)
        nibbles = (codes + 8 * (units < 0)).to(torch.uint8).view(n, k // 2, 2)
        packed = nibbles[..., 0] | nibbles[..., 1] << 4
        if kind == "nvfp4":
            more = {"weight_global_scale": inverse, "input_global_scale": torch.ones(1)}
            return {"weight_packed": packed, "weight_scale": scales, **more}, dense
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": scale, "input_scale": scale}, dense
    blocks = {"rows": (1, k), "tensors": (n, k), "modelopt fp8": (n, k)}
    rows, columns = blocks.get(kind, (BLOCK, BLOCK))
    padded = torch.nn.functional.pad(wide, (0, -k % columns, 0, -n % rows))
    parts = padded.view(len(padded) // rows, rows, -1, columns)
    scales = parts.abs().amax((1, 3)) / 448
    scales = scales.bfloat16() if kind == "rows" else scales
    each = scales.float().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    codes = (wide / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if kind == "fine-grained" else "weight_scale"
    shapes = {"tensors": (1,), "modelopt fp8": ()}
    return {"weight": codes, name: scales.view(shapes.get(kind, scales.shape))}, codes.float() * each


def packed_linears(folder: Path, kind: str, family: str = "llama", **changes: Any) -> dict[str, Tensor]:
    """Write such a checkpoint, and return its linears' dense weights in float32 by their names."""
    model = tiny_model(family, **{**SIZES, **changes}).to(torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and type(model.get_submodule(path)) is torch.nn.Linear and path != "lm_head":
            parts, dense[name] = stored_as(kind, parameter)
            tensors |= {f"{path}.{part}": tensor.contiguous().clone() for part, tensor in parts.items()}
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[name] = parameter.detach().contiguous()
    write(folder, model, tensors, KINDS[kind])
    return dense
