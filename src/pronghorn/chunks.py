"""Chunks of 64 tokens that the gated delta rule works through; none crosses a document's end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class Chunks(NamedTuple):
    """Chunks that don't cross documents; sizes depend on the row's tokens and its bucket of documents only."""

    documents: Tensor
    """int32 [D_b, 2]: each document's first chunk and number of chunks; 0 chunks where there is no document."""
    chunks: Tensor
    """int32 [T // 64 + D_b, 2]: each chunk's first token and length; length 0 where there is no chunk."""


def chunks_of(lengths: Sequence[int], bucket: int, tokens: int) -> Chunks:
    """Make the chunks of documents of these lengths, on the host; there is room for `bucket` documents."""
    documents, chunks, start = array("i"), array("i"), 0
    for length in lengths:
        documents.extend((len(chunks) // 2, -(-length // CHUNK)))
        for first in range(0, length, CHUNK):
            chunks.extend((start + first, min(CHUNK, length - first)))
        start += length
    documents.extend([0, 0] * (bucket - len(lengths)))
    chunks.extend([0, 0] * (tokens // CHUNK + bucket - len(chunks) // 2))
    return Chunks(*(torch.frombuffer(x, dtype=torch.int32).view(-1, 2) for x in (documents, chunks)))
