"""Write a 16-bit checkpoint again with its linears in 8 bits, as others load them.

    <linear>.weight        e4m3 [N, K]
    <linear>.weight_scale  bfloat16 [N, 1], a scale a row: w ≈ code · scale

That is compressed-tensors' `float-quantized` with the strategy `channel`, which vLLM and transformers multiply in FP8
with scales of activations a token, as `compute = "fp8_both"` does here: the same codes. Embeddings, head and norms
stay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.folder import refuse_filled, whole_folder, write_index
from pronghorn.export.licences import copy_licences
from pronghorn.kernels.quantise import DTYPE, weight_scales
from pronghorn.loading.load import find_model
from pronghorn.loading.packed_checkpoint import METADATA, quantisation_of
from pronghorn.loading.skeleton import check_tied, tied_names, without_weights
from pronghorn.models.families import has_experts
from pronghorn.precision.loader import checkpoint, load

SHARD_BYTES = 5 * 10**9
"""Of weights, that a file holds at most, or one tensor."""


def check_parts(name: Path, config: Any, composite: Any, remedy: str) -> None:
    """Refuse a model with parts that aren't written in 8 bits.

    Raises:
        UnsupportedError: it has towers or experts.
    """
    part = "towers" if composite is not None else "experts" if config is not None and has_experts(config) else None
    if part is not None:
        raise UnsupportedError(f"{name} has {part}, which aren't written in 8 bits", remedy)


def write_fp8_checkpoint(source: str | Path, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a checkpoint in 16 bits (a merged model, for instance) with its linears in 8 bits.

    Tensors are read, quantised and written one file at a time: memory holds one file's.

    Args:
        source: a local folder of safetensors weights.
        folder: where to; must be empty, or not be there.
        shard_bytes: of weights, that a file holds at most, or one tensor.
    Returns:
        The folder.
    Raises:
        ConfigError: something is there, or the source is not a whole model.
        UnsupportedError: a model with experts, or one that is quantised already.
        DataError: weights are missing, damaged, or not of this model.
    """
    path, target = Path(source), Path(folder)
    refuse_filled(target)
    found = find_model(path, max_seq_length=1) if path.is_dir() else None
    config = None if found is None else found.config
    check_parts(path, config, found and found.composite, "keep the 16-bit checkpoint")
    if config is None:
        raise ConfigError(
            f"{path} is not a folder of a whole model", "merge an adapter first, with save_pretrained_merged"
        )
    if quantisation_of(config):
        raise UnsupportedError(f"{path} is quantised already", "give the 16-bit checkpoint")
    model = without_weights(config, config.dtype, None)
    head = model.get_output_embeddings()
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    check_tied(model, checkpoint(path))
    tied = tied_names(model)
    expected = {name: each.to("meta") for name, each in model.state_dict().items() if name not in tied}
    tensors = load(checkpoint(path), rename=lambda name: None if name in tied else name, expected=expected)
    with whole_folder(target) as writing:
        for file in path.iterdir():
            if any(file.match(glob) for glob in METADATA) and ".safetensors" not in file.name:
                shutil.copyfile(file, writing / file.name)
        copy_licences(path, writing)
        table = json.loads((path / "config.json").read_text(encoding="utf-8"))
        table["quantization_config"] = _quantisation([name for name, module in model.named_modules() if module is head])
        (writing / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        stored = (each for each in checkpoint(path) if each.name in expected)
        like = ((each.name, expected[each.name].to(each.dtype)) for each in stored)  # of another shape is refused below
        _write(writing, _quantised(tensors, linears), dict(_quantised(like, linears)), shard_bytes)
    return target


def _quantised(tensors: Iterator[tuple[str, Tensor]], linears: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, the weights of these linears as codes and scales."""
    for name, tensor in tensors:
        linear = name.removesuffix(".weight")
        if linear not in linears or linear == name:
            yield name, tensor
            continue
        wide = tensor.float()
        scales = weight_scales(wide.abs().amax(1))
        yield name, (wide * (1 / scales)[:, None]).to(DTYPE)
        yield f"{linear}.weight_scale", scales.bfloat16()[:, None]


def _write(folder: Path, tensors: Iterator[tuple[str, Tensor]], like: dict[str, Tensor], shard_bytes: int) -> None:
    """Write tensors into files of at most so many bytes, with an index; `like` has them in their order, on the meta
    device."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split, read = split_torch_state_dict_into_shards(like, max_shard_size=shard_bytes), dict[str, Tensor]()
    for file, names in split.filename_to_tensors.items():
        while not read.keys() >= set(names):
            read |= [next(tensors)]
        save_file({name: read.pop(name).contiguous() for name in names}, folder / file, {"format": "pt"})
    next(tensors, None)  # raises where one is missing, or has no place
    write_index(folder, split)


def _quantisation(left_out: list[str]) -> dict[str, Any]:
    """Make the quantization_config."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**numbers, "strategy": "channel", "dynamic": False, "observer": "minmax"}
    activations = {**numbers, "strategy": "token", "dynamic": True, "observer": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": left_out,
        "kv_cache_scheme": None,
    }
