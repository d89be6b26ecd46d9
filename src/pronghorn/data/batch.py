"""A packed batch: the tokens as a dict of tensors, and `PackedBatch`, the metadata every layer shares.

Several documents lie end to end in one row of a fixed number of tokens; nothing may flow from one to the next. What
attention and the loss need to know of that (lengths, `cu_seqlens`, `max_seqlen`, which positions predict a label) is
the same in every layer, so it is made once, here, on the host, from plain integers, and goes to the device with the
batch.

The batch dict (the order matters: accelerate reads the batch size off the first tensor):
    input_ids     int64 [1, T]
    labels        int64 [1, T], unshifted; -100 at each document's first token and on the padded tail
    position_ids  int64 [1, T], restarting at 0 in each document
    packed        PackedBatch
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pronghorn.chunks import Chunks, chunks_of
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import DataError

# Attention kernels launch a grid of (documents x max_seqlen / tile) blocks, so padding either costs real time; these
# are the smallest steps that still keep the number of distinct shapes low.
DOCUMENT_BUCKET = 16
SEQLEN_BUCKET = 128
LOSS_ROWS_BUCKET = 512
LEAST_ROOM = 32
"""Documents that a graph has room for, or twice, four times … as many. Rows of 8,192 tokens of instructions have from 7
to 66, and from 8 to 160 where they are packed longest first: four graphs serve all of these, where by the batch's own
buckets of 16 a fifth of an epoch's rows found none. A tile without rows costs next to nothing."""
TILE_ROWS = 64
"""Rows of a tile of attention: documents of instructions have 100 to 300 tokens, so larger ones would be half empty."""

_TENSORS = ("cu_seqlens", "document_ids", "tiles", "chunk_documents", "chunk_bounds", "loss_rows")


def room_for(documents: int) -> int:
    """Return how many documents the graph has room for that serves a row of so many."""
    return max(LEAST_ROOM, 1 << (documents - 1).bit_length())


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


LONGEST_TAIL = 2048
"""The most tokens that are added so that a row's length is one of few: a tail is a document, and graphs serve no rows
with long ones."""


def coarse(tokens: int, step: int, longest_tail: int = LONGEST_TAIL) -> int:
    """Return the step by which rows of so many tokens are rounded up where few lengths are wanted: four are left in an
    octave.

    Args:
        step: of which the result is a multiple.
        longest_tail: the most tokens that this may add.
    """
    quarter = max(1 << (tokens - 1).bit_length() >> 3, 1)
    return step * max(1, min(quarter, longest_tail) // step)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """What is the same for every layer of a packed batch of T tokens in D documents.

    `PackedBatch.build` (or a `Collator`) makes it. It is immutable, except for what is derived on first use and kept.
    """

    lengths: tuple[int, ...]
    """Tokens of each document, in order; a padded tail counts as a document, so that every row of the attention output
    is written (kernels leave rows outside all documents uninitialised)."""
    padding: int
    """How many of the T tokens are padding."""
    n_labels: int
    """Supervised positions, -1 where the batch was made without labels."""
    bucket: int
    """D_b, the number of documents `cu_seqlens` has room for."""
    max_seqlen: int
    """The longest document, rounded up to a multiple of 128 (never past T)."""
    cu_seqlens: Tensor
    """int32 [D_b + 1], cumulative lengths, padded by repeating T: the extra documents are empty."""
    document_ids: Tensor
    """int32 [T], which document each token belongs to."""
    tiles: Tensor
    """int32 [T // 64 + D_b, 3]: each tile's first row and its document's start and end, long documents first; empty
    tiles (T, T, T) fill it up. What attention by tiles works through (`kernels.attention`)."""
    chunk_documents: Tensor
    """int32 [D_b, 2]: each document's first chunk of 64 tokens, and how many it has (`chunks.Chunks`)."""
    chunk_bounds: Tensor
    """int32 [T // 64 + D_b, 4]: each chunk's first token, length and states (`chunks.Chunks`)."""
    loss_rows: Tensor | None
    """int64 [M_b], the positions whose next token is a label, padded to a multiple of 512 with T - 1, which predicts
    nothing. None where the batch was made without labels."""
    attended: set[Any] | None = field(default=None, repr=False)
    """Collects the modules whose attention kept the documents apart; None: nobody asks (`models.metadata` does)."""
    _derived: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        """T, padding included."""
        return int(self.document_ids.shape[0])

    @property
    def real_tokens(self) -> int:
        """T without the padding."""
        return self.tokens - self.padding

    @property
    def chunks(self) -> Chunks:
        """What a gated delta net works through."""
        return Chunks(self.chunk_documents, self.chunk_bounds)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Each document's [start, end) as host integers."""
        ends = list(accumulate(self.lengths))
        return [(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        *,
        tokens: int,
        padding: int = 0,
        labels: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedBatch:
        """Make the metadata of a row from its documents' lengths.

        Args:
            lengths: tokens of each document, each at least 1, the padded tail included; they sum to `tokens`.
            tokens: T, the length of the flattened row.
            padding: how many of these tokens are padding.
            labels: int64 [T] on the host, unshifted, -100 where nothing is predicted; None for a batch without labels.
            device: where the tensors shall live.
        Raises:
            DataError: the lengths don't sum to the row, or one of them is below 1.
        """
        lengths = tuple(int(n) for n in lengths)
        if not lengths or min(lengths) < 1:
            raise DataError(f"document lengths {list(lengths)} hold one below 1", "drop empty documents before packing")
        if sum(lengths) != tokens:
            raise DataError(
                f"document lengths sum to {sum(lengths)} but the row has {tokens} tokens",
                "count the padded tail as the last document, and pass one length for every document",
            )
        bucket = round_up(len(lengths), DOCUMENT_BUCKET)
        bounds = [0, *accumulate(lengths)]
        bounds += [tokens] * (bucket + 1 - len(bounds))
        loss_rows, n_labels = None, -1
        if labels is not None:
            predicting = (labels[1:] != IGNORE_INDEX).nonzero().flatten()
            n_labels = predicting.numel()
            room = round_up(max(n_labels, 1), LOSS_ROWS_BUCKET)
            loss_rows = torch.full((room,), tokens - 1, dtype=torch.int64, device="cpu")
            loss_rows[:n_labels] = predicting
            loss_rows = loss_rows.to(device)
        document_ids = array("i")  # torch.repeat_interleave waits for its threads: milliseconds on a busy host
        for document, length in enumerate(lengths):
            document_ids.extend(array("i", [document]) * length)
        chunks = chunks_of(lengths, bucket, tokens)
        return cls(
            lengths=lengths,
            padding=padding,
            n_labels=n_labels,
            bucket=bucket,
            max_seqlen=min(round_up(max(lengths), SEQLEN_BUCKET), tokens),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device="cpu").to(device),
            document_ids=torch.frombuffer(document_ids, dtype=torch.int32).to(device),
            tiles=_tiles(bounds, tokens, tokens // TILE_ROWS + bucket).to(device),
            chunk_documents=chunks.documents.to(device),
            chunk_bounds=chunks.chunks.to(device),
            loss_rows=loss_rows,
        )

    def split(self, least: int) -> tuple[list[tuple[int, int]], Tensor]:
        """Return ([start, end) of the documents of at least `least` tokens, the tiles of the others); made once."""
        key = ("split", least)
        if key not in self._derived:
            long = [(start, end) for start, end in self.segments if end - start >= least]
            skip = sum(-(-(end - start) // TILE_ROWS) for start, end in long)  # long documents' tiles come first
            self._derived[key] = long, self.tiles[skip:]
        return self._derived[key]

    def dense_mask(self, window: int | None, *, keep: bool = True) -> Tensor:
        """Return the attention mask as booleans, True where a query may look.

        Args:
            window: a query sees itself and the `window - 1` tokens before it; None for no limit.
            keep: keep the mask on the batch for the other layers (False rebuilds it: only for ablations).
        Returns:
            bool [1, 1, T, T] on the batch's device.
        """
        key = ("dense_mask", window, torch.bool, self.document_ids.device)
        if keep and key in self._derived:
            return self._derived[key]
        position = torch.arange(self.tokens, device=self.document_ids.device)
        distance = position[:, None] - position[None, :]
        mask = (self.document_ids[:, None] == self.document_ids[None, :]) & (distance >= 0)
        if window is not None:
            mask &= distance < window
        mask = mask[None, None]
        if keep:
            self._derived[key] = mask
        return mask

    def pin_memory(self) -> PackedBatch:
        """Return the same batch in page-locked host memory, so that its upload can be asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """Return the same batch on `device`; host integers stay host integers."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def clone(self) -> PackedBatch:
        """Return the same batch in tensors of its own."""
        return self._map(lambda tensor: tensor.clone())

    def without_labels(self) -> PackedBatch:
        """Return the same batch for what comes before the loss."""
        return replace(self, loss_rows=None, _derived={})

    def with_room(self, documents: int) -> PackedBatch:
        """Return the same batch with room for so many documents, the further ones empty; itself if it has as much."""
        more, tokens = documents - self.bucket, self.tokens
        if more <= 0:
            return self
        rows = (0, 0, 0, more)
        return replace(
            self,
            bucket=documents,
            cu_seqlens=pad(self.cu_seqlens, (0, more), value=tokens),
            tiles=pad(self.tiles, rows, value=tokens),
            chunk_documents=pad(self.chunk_documents, rows),
            chunk_bounds=pad(self.chunk_bounds, rows),
            _derived={},
        )

    def copy_into(self, static: PackedBatch) -> None:
        """Copy this batch's tensors into those of `static`, which a captured graph reads.

        Raises:
            DataError: the shapes differ.
        """
        for name in _TENSORS:
            source, target = getattr(self, name), getattr(static, name)
            if (source is None) != (target is None) or (source is not None and source.shape != target.shape):
                raise DataError(
                    f"{name} of the batch and of the static batch differ in shape",
                    "copy only between batches of the same row length and buckets",
                )
            if source is not None:
                target.copy_(source, non_blocking=True)

    def _map(self, move: Callable[[Tensor], Tensor]) -> PackedBatch:
        tensors = {name: getattr(self, name) for name in _TENSORS}
        moved: dict[str, Any] = {name: tensor if tensor is None else move(tensor) for name, tensor in tensors.items()}
        return replace(self, **moved, _derived={})


def _tiles(bounds: Sequence[int], tokens: int, room: int) -> Tensor:
    """Make `PackedBatch.tiles` of the documents' bounds: each has at most one partial tile, so there is room."""
    documents = sorted(pairwise(bounds), key=lambda bound: bound[0] - bound[1])
    tiles = [(first, start, end) for start, end in documents for first in range(start, end, TILE_ROWS)]
    tiles += [(tokens, tokens, tokens)] * (room - len(tiles))
    return torch.tensor(tiles, dtype=torch.int32, device="cpu")


def _tensor(values: list[int]) -> Tensor:
    """Make an int64 tensor, at a fifth of the time that torch takes to look at each entry's type."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


@dataclass(frozen=True)
class Collator:
    """Make the batch dict from packed rows; several rows become one row of several times the tokens.

    Args:
        row_tokens: every row is padded to exactly this many tokens.
        pad_token_id: the token that fills the tail (None: 0); nothing attends to it, and it is never a label.
    """

    row_tokens: int
    pad_token_id: int | None

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows of `input_ids`, `labels` (unshifted) and `lengths` (one a document).

        Raises:
            DataError: a row is longer than `row_tokens`, or its lengths don't sum to its tokens.
        """
        input_ids: list[int] = []
        labels: list[int] = []
        lengths: list[int] = []
        padding = 0
        for row in rows:
            n = len(row["input_ids"])
            if n > self.row_tokens or sum(row["lengths"]) != n or len(row["labels"]) != n:
                raise DataError(
                    f"a row of {n} tokens and {len(row['labels'])} labels has documents of {list(row['lengths'])} "
                    f"tokens, at most {self.row_tokens} in all",
                    "lengths must sum to the row and the row must fit: pack again with this row length",
                )
            tail = self.row_tokens - n
            input_ids += [*row["input_ids"], *[self.pad_token_id or 0] * tail]
            labels += [*row["labels"], *[IGNORE_INDEX] * tail]
            lengths += [*map(int, row["lengths"]), *([tail] if tail else [])]
            padding += tail
        label_tensor = _tensor(labels)
        label_tensor[[0, *accumulate(lengths)][:-1]] = IGNORE_INDEX  # nothing before a document's first predicts it
        packed = PackedBatch.build(lengths, tokens=len(input_ids), padding=padding, labels=label_tensor)
        positions = torch.arange(max(lengths), device="cpu")  # whatever torch's default device is
        return {
            "input_ids": _tensor(input_ids)[None],
            "labels": label_tensor[None],
            "position_ids": torch.cat([positions[:n] for n in lengths])[None],
            "packed": packed,
        }
