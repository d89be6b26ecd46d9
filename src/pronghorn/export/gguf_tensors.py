"""Which tensors of a GGUF file a checkpoint's become: their names, their rows' order, what is done to their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import DataError, UnsupportedError
from pronghorn.export.gguf_rope import head_dim_of
from pronghorn.families.gguf_spec import Gguf, Part, Rows
from pronghorn.families.spec import FamilySpec
from pronghorn.precision.loader import StoredTensor

MERGE = (
    "export it merged (--to merged, in scripts save_pretrained_merged), and convert that with llama.cpp's "
    "convert_hf_to_gguf.py"
)


def parts_of(name: str, table: Any, config: Any, family: FamilySpec, form: Gguf) -> Sequence[Part]:
    """Return the tensors of the file that a causal LM's becomes, each with its name.

    Args:
        name: in the causal LM.
        table: `models.gguf.name_table`'s.
    Raises:
        UnsupportedError: it has no name in the file.
    """
    module, _, leaf = name.rpartition(".")
    named = table.get_name(module)
    own = f"{named}.{leaf}" if named else table.get_name(name) and f"{table.get_name(name)}.weight"
    parts = form.parts(name, config)
    if parts is None:
        parts = [_usual(named or "", config, family, form)]
    parts = [replace(part, name=part.name or own or "") for part in parts]
    if not all(part.name for part in parts):
        raise UnsupportedError(f"{name} has no name in a GGUF file of {form.architecture}", MERGE)
    return parts


def _usual(name: str, config: Any, family: FamilySpec, form: Gguf) -> Part:
    """Return how a tensor is changed where its family says nothing of it, by its name in the file without the leaf."""
    if family.norm_offset and name.endswith("norm"):
        return Part(change=lambda weight: weight + family.norm_offset)
    if not form.interleaved or not name.endswith(("attn_q", "attn_k")):
        return Part()
    # llama.cpp rotates neighbours of a head where transformers rotates halves
    heads, size = config.num_attention_heads if name.endswith("q") else config.num_key_value_heads, head_dim_of(config)
    order = [half * size // 2 + row for row in range(size // 2) for half in range(2)]
    return Part(rows=[head * size + row for head in range(heads) for row in order])


def shape_of(part: Part, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor of the file, given that of the checkpoint's."""
    return part.shape or (*(shape[:1] if part.rows is None else [len(part.rows)]), *shape[1:])


def changed(part: Part, weight: Tensor) -> Tensor:
    """Return a tensor of the file, given the checkpoint's."""
    if part.rows is not None:
        weight = weight[list(part.rows)]
    if part.columns is not None:
        weight = weight[:, list(part.columns)]
    if part.change is not None:
        weight = part.change(weight)
    return weight.reshape(shape_of(part, weight.shape))


def split(stored: StoredTensor, config: Any, form: Gguf) -> Iterator[StoredTensor]:
    """Yield what modules of their own would have of a checkpoint's tensor."""
    for name, take in form.split(stored.name, config).items():

        def rows(start: int, stop: int, take: Rows = take) -> Tensor:
            taken: Tensor = take(stored.rows(start, stop))
            return taken

        shape = tuple(take(torch.empty(stored.shape, device="meta")).shape)
        yield replace(stored, name=name, shape=shape, rows=rows)


def stacked(source: Iterator[StoredTensor], count: int) -> Iterator[StoredTensor]:
    """Yield a checkpoint's tensors, and of so many experts' alike ones a tensor with all of them."""
    from safetensors import safe_open

    waiting: dict[str, dict[int, StoredTensor]] = {}
    for stored in source:
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", stored.name)
        if expert is None:
            yield stored
            continue
        name = f"{expert[1]}.{expert[3]}"
        alike = waiting.setdefault(name, {})
        alike[int(expert[2])] = stored
        if len(alike) < count:
            continue
        del waiting[name]

        def rows(start: int, stop: int, alike: dict[int, StoredTensor] = alike) -> Tensor:
            with ExitStack() as stack:
                origins = dict.fromkeys(alike[number].origin for number in range(start, stop))
                files = {origin: stack.enter_context(safe_open(origin, "pt")) for origin in origins}
                return torch.stack(
                    [files[alike[number].origin].get_tensor(alike[number].name) for number in range(start, stop)]
                )

        yield replace(stored, name=name, shape=(count, *stored.shape), rows=rows)
    if waiting:
        name, alike = next(iter(waiting.items()))
        raise DataError(f"the checkpoint has {len(alike)} of {count} experts' {name}", "export or download it again")
