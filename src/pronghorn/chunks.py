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
    """int32 [T // 64 + D_b, 4]: each chunk's first token, length, and the numbers of the states at its start and end.
    A document's start and end have none (-1), so that there are at most T // 64, whatever the documents. Where there is
    no chunk all are 0."""


def chunks_of(lengths: Sequence[int], bucket: int, tokens: int) -> Chunks:
    """Make the chunks of documents of these lengths, on the host; there is room for `bucket` documents."""
    documents, chunks, start, state = array("i"), array("i"), 0, 0
    for length in lengths:
        count = -(-length // CHUNK)
        documents.extend((len(chunks) // 4, count))
        for number in range(count):
            first, last = number == 0, number == count - 1
            size = length - number * CHUNK if last else CHUNK
            chunks.extend((start + number * CHUNK, size, -1 if first else state - 1, -1 if last else state))
            state += not last
        start += length
    documents.extend([0, 0] * (bucket - len(lengths)))
    chunks.extend([0, 0, 0, 0] * (tokens // CHUNK + bucket - len(chunks) // 4))
    bounds = torch.frombuffer(chunks, dtype=torch.int32).view(-1, 4)
    return Chunks(torch.frombuffer(documents, dtype=torch.int32).view(-1, 2), bounds)
