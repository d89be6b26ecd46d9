"""What GGUF files, which llama.cpp reads, say of a family's models beyond their shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _nothing(config: Any) -> Mapping[str, Any]:
    return {}


def _served(config: Any) -> str | None:
    return None


def _rope(config: Any) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = config.rope_parameters
    return rope


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
