"""What GGUF files, which llama.cpp reads, say of a family's models beyond their shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Part = Callable[[Tensor], Tensor]
"""Takes of some of a checkpoint's rows (slices of the first dimension) those of a tensor in the file."""


def _nothing(config: Any) -> Mapping[str, Any]:
    return {}


def _served(config: Any) -> str | None:
    return None


def _rope(config: Any) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = config.rope_parameters
    return rope


def _whole(name: str, config: Any) -> Mapping[str, Part]:
    return {name: all_rows}


def all_rows(rows: Tensor) -> Tensor:
    """Take a tensor as it is."""
    return rows


@dataclass(frozen=True)
class Gguf:
    """How a family's models are written as GGUF."""

    architecture: str
    """`general.architecture`."""
    interleaved: bool = False
    """Whether rows of queries and keys are interleaved: llama.cpp rotates neighbouring rows of a head where
    transformers rotates its halves."""
    values: Callable[[Any], Mapping[str, Any]] = _nothing
    """Reads from the configuration what the file must say, by the names of gguf.GGUFWriter's methods without `add_`."""
    unlike: Callable[[Any], str | None] = _served
    """Says what a configuration has that llama.cpp's model of the architecture hasn't, or None."""
    rope: Callable[[Any], Mapping[str, Any]] = _rope
    """Reads the RoPE parameters of layers without a window."""
    parts: Callable[[str, Any], Mapping[str, Part]] = _whole
    """Returns, of the name of a checkpoint's tensor and the configuration, what in the file is made of it, under the
    names that modules of their own would have; nothing of what transformers doesn't load."""
    goes_on: tuple[str, ...] = ()
    """Tokens that end a part of an answer, and not the answer, where other families' end it."""
