"""How checkpoints store weights in few bits: by quantization_config, which tensors make up which parameter.

| `quant_method` | of | tensors |
|---|---|---|
| `mxfp4` | gpt-oss's experts | `_blocks`, `_scales` |
| `fp8` | DeepSeek, Qwen: e4m3, scales of 128 x 128 | `weight`, `weight_scale_inv` |
| `compressed-tensors` | `float-quantized`: e4m3, scales of rows, tensors or blocks | `weight`, `weight_scale` |
| | `nvfp4-pack-quantized` | `weight_packed`, `weight_scale`, `weight_global_scale` |
| `modelopt` | NVIDIA's NVFP4 | `weight`, `weight_scale`, `weight_scale_2` |
| | NVIDIA's FP8, a scale a tensor | `weight`, `weight_scale` |

Scales of activations and of a KV cache are for inference, and aren't read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.errors import DataError, UnsupportedError
from pronghorn.kernels import nvfp4
from pronghorn.kernels.fp8_blocks import FP8Tensor
from pronghorn.kernels.mxfp4 import GROUP, MXFP4Tensor
from pronghorn.kernels.packed import PackedTensor
from pronghorn.models.experts import expert_parameters

Packed = tuple[str, PackedTensor, dict[str, int]]
"""A parameter's name, the tensor (on the meta device) that takes its place, and the number of each part by its name in
the checkpoint."""
NOT_READ = (
    ".input_scale", ".input_global_scale", ".activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
"""Ends of the names of scales that inference has for activations."""
ALSO_NAMED = "also_named"
"""An entry that `Composite` adds to a quantization_config: pairs of how modules' names start in the causal LM and in
the model with towers; patterns may mean either."""
_REMEDY = "use the 16-bit checkpoint (load_in_4bit makes it smaller)"


@dataclass(frozen=True)
class Format:
    """How a kind of packed checkpoint stores its parameters."""

    name: str
    """For people."""
    packed: Callable[[Any, dict[str, Any]], Iterator[Packed]]
    """Lists the packed parameters of a skeleton, given the checkpoint's quantization_config."""
    has_experts: bool = False
    """Experts' weights may be packed."""


def _mxfp4(model: Any, stored: dict[str, Any]) -> Iterator[Packed]:
    """Yield gpt-oss's experts: `<parameter>_blocks` and `<parameter>_scales`."""
    for name, parameter in expert_parameters(model):
        experts, k, n = parameter.shape
        if k % GROUP:
            raise UnsupportedError(
                f"{name} has {k} rows an expert, and MXFP4 stores groups of {GROUP}", "use the 16-bit checkpoint"
            )
        blocks = _empty(torch.uint8, experts, n, k // GROUP, GROUP // 2)
        scales = _empty(torch.uint8, experts, n, k // GROUP)
        packed = MXFP4Tensor([blocks, scales], parameter.shape, parameter.dtype)
        yield name, packed, {f"{name}_blocks": 0, f"{name}_scales": 1}


def _fine_grained(model: Any, stored: dict[str, Any]) -> Iterator[Packed]:
    """Yield linears of DeepSeek and Qwen: e4m3 in blocks; without a block's size one scale a tensor."""
    if stored.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedError(f"quantization_config: fmt {stored['fmt']!r} is not e4m3", _REMEDY)
    block = stored.get("weight_block_size")
    left_out = stored.get("modules_to_not_convert") or stored.get("ignored_layers") or ()
    for name, linear in _linears(model, stored, [*left_out, _head_of(model)], regular=True):
        yield _fp8(name, linear, block or linear.weight.shape, "weight_scale_inv")


def _compressed(model: Any, stored: dict[str, Any]) -> Iterator[Packed]:
    """Yield linears of llm-compressor, in groups that have a scheme each."""
    groups = [group for group in (stored.get("config_groups") or {}).values() if group["weights"] is not None]
    for group in groups:
        _check_scheme(group, stored)
    _check_transforms(stored)
    if not groups:
        raise ValueError("quantization_config has no config_groups")
    for name, linear in _linears(model, stored, stored.get("ignore") or ()):
        group = _group_of(_names(name, stored), groups)
        if group is None:
            continue
        if group["weights"]["num_bits"] == 4:
            yield _nvfp4(name, linear, ("weight_packed", "weight_scale", "weight_global_scale"), divides=True)
        else:
            n, k = linear.weight.shape
            blocks = {"tensor": (n, k), "channel": (1, k), "block": group["weights"].get("block_structure")}
            yield _fp8(name, linear, blocks[group["weights"]["strategy"]], "weight_scale")


def _group_of(names: list[str], groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the group of a linear: one that names it comes before one with a pattern, and that before all linears'."""
    for fits in (
        lambda target: target in names,
        lambda target: target != "Linear" and _is_listed(names, [target]),
        lambda target: target == "Linear",
    ):
        for group in groups:
            if any(map(fits, group["targets"])):
                return group
    return None


def _check_transforms(stored: dict[str, Any]) -> None:
    """Refuse weights that are rotated so that inputs or outputs have to be, too, in every forward."""
    schemes = (stored.get("transform_config") or {}).get("config_groups") or {}
    for name, scheme in schemes.items():
        for apply in scheme["apply"]:
            if apply["location"] not in ("weight_input", "weight_output"):
                rotated = f"{apply['location']} of {apply['targets']}: transform {name} of its quantization_config"
                raise UnsupportedError(f"the checkpoint rotates activations ({rotated})", _REMEDY)


def _check_scheme(group: dict[str, Any], stored: dict[str, Any]) -> None:
    """Refuse a scheme of llm-compressor's that isn't served."""
    weights, form = group["weights"], group.get("format") or stored.get("format")
    scheme = weights["num_bits"], weights["type"], weights.get("strategy")
    nvfp4s = form == "nvfp4-pack-quantized" and scheme == (4, "float", "tensor_group") and weights["group_size"] == 16
    fp8s = scheme[:2] == (8, "float") and scheme[2] in ("tensor", "channel", "block")
    if not (nvfp4s or (fp8s and form in ("float-quantized", "naive-quantized"))) or not weights.get("symmetric", True):
        said = f"{form!r}, weights of {weights['num_bits']} bits ({weights['type']}, a scale a {scheme[2]})"
        raise UnsupportedError(
            f"the checkpoint is in compressed-tensors' {said}",
            f"use one in float-quantized or nvfp4-pack-quantized, or {_REMEDY}",
        )


def _modelopt(model: Any, stored: dict[str, Any]) -> Iterator[Packed]:
    """Yield linears of NVIDIA's Model Optimizer: NVFP4, or FP8 with a scale a tensor."""
    algorithm, left_out = stored.get("quant_algo"), stored.get("ignore") or stored.get("exclude_modules") or ()
    if algorithm not in ("NVFP4", "FP8"):
        raise UnsupportedError(f"the checkpoint is in ModelOpt's {algorithm}", f"use one in NVFP4 or FP8, or {_REMEDY}")
    for name, linear in _linears(model, stored, left_out):
        if algorithm == "NVFP4":
            yield _nvfp4(name, linear, ("weight", "weight_scale", "weight_scale_2"), divides=False)
        else:
            yield _fp8(name, linear, linear.weight.shape, "weight_scale")


FORMATS = {
    "mxfp4": Format("MXFP4", _mxfp4, has_experts=True),
    "fp8": Format("fine-grained FP8", _fine_grained),
    "compressed-tensors": Format("compressed-tensors (FP8, NVFP4)", _compressed),
    "modelopt": Format("ModelOpt (NVFP4, FP8)", _modelopt),
}
"""By `quant_method` of a checkpoint's quantization_config."""


def packed_parameters(form: Format, model: Any, stored: dict[str, Any]) -> list[Packed]:
    """List a skeleton's packed parameters.

    Raises:
        UnsupportedError: a scheme, a layer or a size that isn't served, by name.
        DataError: metadata that can't be read.
    """
    check_experts(form, any(True for _ in expert_parameters(model)))
    try:
        return list(form.packed(model, stored))
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise DataError(
            f"the quantization_config of a checkpoint in {form.name} can't be used ({error!r})",
            "copy or download its config.json again",
        ) from error


def check_experts(form: Format, has_experts: bool) -> None:
    """Refuse a model with experts in a format that packs linears only.

    Raises:
        UnsupportedError: names the format.
    """
    if has_experts and not form.has_experts:
        raise UnsupportedError(
            f"a checkpoint in {form.name} of a model with experts (one packed weight an expert)", _REMEDY
        )


def _fp8(name: str, linear: nn.Linear, block: Iterable[int], scales: str) -> Packed:
    n, k = linear.weight.shape
    rows, columns = map(int, block)
    if min(rows, columns) < 1:
        raise ValueError(f"blocks of {rows} x {columns}")
    parts = [_empty(torch.float8_e4m3fn, n, k), _empty(torch.float32, -(-n // rows), -(-k // columns))]
    packed = FP8Tensor(parts, (n, k), linear.weight.dtype, min(rows, n), min(columns, k))
    return f"{name}.weight", packed, {f"{name}.weight": 0, f"{name}.{scales}": 1}


def _nvfp4(name: str, linear: nn.Linear, names: tuple[str, str, str], divides: bool) -> Packed:
    n, k = linear.weight.shape
    if k % nvfp4.GROUP:
        raise UnsupportedError(f"{name} has {k} inputs, and NVFP4 stores groups of {nvfp4.GROUP}", _REMEDY)
    parts = [_empty(torch.uint8, n, k // 2), _empty(torch.float8_e4m3fn, n, k // nvfp4.GROUP), _empty(torch.float32, 1)]
    packed = nvfp4.NVFP4Tensor(parts, (n, k), linear.weight.dtype, divides)
    return f"{name}.weight", packed, {f"{name}.{part}": number for number, part in enumerate(names)}


def _linears(
    model: Any, stored: dict[str, Any], left_out: Iterable[str], regular: bool = False
) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linears that are packed, all but those that are left out.

    Args:
        regular: any pattern may be a regular expression.
    Raises:
        UnsupportedError: the head is among them.
    """
    left_out = list(left_out)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not _is_listed(_names(name, stored), left_out, regular):
            if module is model.get_output_embeddings():
                raise UnsupportedError(f"{name} is packed, which stays in 16 bits here", _REMEDY)
            yield name, module


def _names(name: str, stored: dict[str, Any]) -> list[str]:
    """Return a module's name, and those that it has in a model with towers."""
    also = [f"{whole}{name.removeprefix(own)}" for own, whole in stored.get(ALSO_NAMED, ()) if name.startswith(own)]
    return [name, *also]


def _head_of(model: Any) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def _is_listed(names: Iterable[str], patterns: Iterable[str], regular: bool = False) -> bool:
    """Tell whether a module with these names is one of those, or inside one: names or ends of names, globs, or `re:`
    expressions; if `regular`, expressions without `re:`, too, as transformers reads them."""
    return any(_fits(name, pattern, regular) for pattern in patterns for name in names)


def _fits(name: str, pattern: str, regular: bool) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    whole = name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")
    if whole or fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
        return True
    if not regular:
        return False
    try:
        return name.endswith(pattern) or re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name) is not None
    except re.error:  # a glob
        return False


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
