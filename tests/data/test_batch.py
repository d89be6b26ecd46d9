"""The packed batch: metadata, masks, label shifts, and what it refuses."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.chunks import chunks_of
from pronghorn.data.batch import (
    DOCUMENT_BUCKET,
    LOSS_ROWS_BUCKET,
    SEQLEN_BUCKET,
    TILE_ROWS,
    Collator,
    PackedBatch,
    round_up,
)
from pronghorn.errors import DataError

documents = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def collate(rows: list[list[int]], row_tokens: int, keep: float = 0.6) -> dict[str, object]:
    generator = torch.Generator().manual_seed(sum(map(sum, rows)))
    made = []
    for lengths in rows:
        ids = torch.randint(1, 90, (sum(lengths),), generator=generator)
        labels = torch.where(torch.rand(len(ids), generator=generator) < keep, ids, -100)
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist(), "lengths": lengths})
    return Collator(row_tokens, pad_token_id=0)(made)


def test_rows_are_made_on_the_host_whatever_torch_s_default_device_is() -> None:
    row = {"input_ids": list(range(3, 40)), "labels": list(range(3, 40)), "lengths": [20, 17]}
    with torch.device("meta"):
        batch = Collator(64, 0)([row])
    expected = Collator(64, 0)([row])
    packed, other = batch.pop("packed"), expected.pop("packed")
    tensors = [*batch.values(), *(value for value in vars(packed).values() if isinstance(value, torch.Tensor))]
    others = [*expected.values(), *(value for value in vars(other).values() if isinstance(value, torch.Tensor))]
    assert len(tensors) == 9 and all(map(torch.equal, tensors, others))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(documents, min_size=1, max_size=3), spare=st.integers(0, 70))
def test_metadata_of_any_rows(rows: list[list[int]], spare: int) -> None:
    row_tokens = max(map(sum, rows)) + spare
    batch = collate(rows, row_tokens)
    packed, labels, ids = batch["packed"], batch["labels"][0], batch["input_ids"][0]
    expected = [n for lengths in rows for n in [*lengths, row_tokens - sum(lengths)] if n]
    assert (
        list(packed.lengths) == expected and sum(packed.lengths) == packed.tokens == len(ids) == len(rows) * row_tokens
    )
    assert packed.real_tokens == sum(map(sum, rows))
    assert packed.bucket % DOCUMENT_BUCKET == 0 and packed.cu_seqlens.dtype == torch.int32
    bounds = packed.cu_seqlens.tolist()
    assert bounds[: len(expected) + 1] == [0, *accumulate(expected)] and set(bounds[len(expected) :]) == {packed.tokens}
    assert len(bounds) == packed.bucket + 1
    full = [(first, start, end) for start, end in pairwise(bounds) for first in range(start, end, TILE_ROWS)]
    empty = [(packed.tokens,) * 3] * (packed.tokens // TILE_ROWS + packed.bucket - len(full))
    assert sorted(map(tuple, packed.tiles.tolist())) == full + empty
    assert packed.max_seqlen == min(packed.tokens, round_up(max(expected), SEQLEN_BUCKET))
    starts = [0, *accumulate(expected)][:-1]
    assert batch["position_ids"][0].tolist() == [i for n in expected for i in range(n)]
    assert packed.document_ids.tolist() == [d for d, n in enumerate(expected) for _ in range(n)]
    # labels: never at a document's first token, never on the tail; the loss rows are exactly their predecessors
    assert all(labels[start] == -100 for start in starts)
    predicting = [i for i in range(len(labels) - 1) if labels[i + 1] != -100]
    assert packed.n_labels == len(predicting)
    assert packed.loss_rows[: packed.n_labels].tolist() == predicting
    assert len(packed.loss_rows) == round_up(max(1, len(predicting)), LOSS_ROWS_BUCKET)
    assert set(packed.loss_rows[packed.n_labels :].tolist()) <= {packed.tokens - 1}
    for i in predicting:  # a prediction never crosses a document's end
        assert packed.document_ids[i] == packed.document_ids[i + 1] and labels[i + 1] == ids[i + 1]


@settings(max_examples=40, deadline=None)
@given(lengths=documents, window=st.one_of(st.none(), st.integers(1, 50)))
def test_dense_mask_against_its_definition(lengths: list[int], window: int | None) -> None:
    tokens = sum(lengths)
    packed = PackedBatch.build(lengths, tokens=tokens)
    document = [d for d, n in enumerate(lengths) for _ in range(n)]
    assert packed.dense_mask(window)[0, 0].tolist() == [
        [document[q] == document[k] and k <= q and (window is None or q - k < window) for k in range(tokens)]
        for q in range(tokens)
    ]


def test_the_mask_is_kept_on_the_batch() -> None:
    packed = PackedBatch.build([3, 5], tokens=8)
    assert packed.dense_mask(None) is packed.dense_mask(None)
    assert packed.dense_mask(2) is not packed.dense_mask(None)
    assert packed.dense_mask(None, keep=False) is not packed.dense_mask(None)
    assert packed.to("cpu").dense_mask(None) is not packed.dense_mask(None)  # nothing is shared between batches


@pytest.mark.parametrize(
    "lengths,tokens,says",
    [([3, 4], 8, "sum to 7 but the row has 8"), ([8, 0], 8, "below 1"), ([], 0, "below 1"), ([9, -1], 8, "below 1")],
)
def test_lengths_that_do_not_fit_the_row(lengths: list[int], tokens: int, says: str) -> None:
    with pytest.raises(DataError, match=says):
        PackedBatch.build(lengths, tokens=tokens)


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1] * 9, "labels": [1] * 9, "lengths": [9]},
        {"input_ids": [1] * 4, "labels": [1] * 4, "lengths": [3]},
        {"input_ids": [1] * 4, "labels": [1] * 3, "lengths": [4]},
    ],
)
def test_rows_that_do_not_fit(row: dict[str, list[int]]) -> None:
    with pytest.raises(DataError, match="at most 8"):
        Collator(8, 0)([row])


def test_first_label_of_a_document_is_dropped_even_if_given() -> None:
    batch = Collator(8, 3)([{"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9], "lengths": [2, 3]}])
    assert batch["input_ids"][0].tolist() == [5, 6, 7, 8, 9, 3, 3, 3]
    assert batch["labels"][0].tolist() == [-100, 6, -100, 8, 9, -100, -100, -100]
    assert batch["packed"].n_labels == 3


def test_a_tokenizer_without_a_padding_token() -> None:
    """Llama's has none; what fills the tail is never looked at."""
    row = {"input_ids": [5, 6], "labels": [-100, 6], "lengths": [2]}
    batch = Collator(4, pad_token_id=None)([row])
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0]] and batch["packed"].padding == 2


def test_copy_into_a_static_batch() -> None:
    first, second = (collate([[3, 4]], 16)["packed"], collate([[5, 1, 2]], 16)["packed"])
    names = ("cu_seqlens", "document_ids", "tiles", "chunk_documents", "chunk_bounds", "loss_rows")
    addresses = [getattr(second, name).data_ptr() for name in names]
    first.copy_into(second)
    assert [getattr(second, name).data_ptr() for name in names] == addresses
    assert all(torch.equal(getattr(second, name), getattr(first, name)) for name in names)
    assert second.chunk_documents[:4].tolist() == [[0, 1], [1, 1], [2, 1], [0, 0]]
    assert second.chunk_bounds[:4].tolist() == [[0, 3, -1, -1], [3, 4, -1, -1], [7, 9, -1, -1], [0, 0, 0, 0]]
    with pytest.raises(DataError, match="differ in shape"):
        first.copy_into(collate([[3]], 32)["packed"])
    with pytest.raises(DataError, match="loss_rows of the batch"):
        first.without_labels().copy_into(second)


def test_only_chunks_between_others_of_their_document_have_states() -> None:
    """Whatever the documents, a row of T tokens has T // 64 of them at most."""
    found = chunks_of((64, 65, 1, 200), 16, 384).chunks
    assert found[:8].tolist() == [
        [0, 64, -1, -1], [64, 64, -1, 0], [128, 1, 0, -1], [129, 1, -1, -1], [130, 64, -1, 1], [194, 64, 1, 2],
        [258, 64, 2, 3], [322, 8, 3, -1],
    ]  # fmt: skip
    assert not found[8:].any()
    for lengths in ((384,), (65,) * 5, (1,) * 384, (63, 321)):
        assert chunks_of(lengths, len(lengths), 384).chunks[:, 2:].max() < 384 // 64


def test_room_for_more_documents() -> None:
    """What a row with more documents in its bucket has, with further ones that are empty."""
    few, many = (collate([lengths], 96)["packed"] for lengths in ([50, 46], [4] * 24))
    widened = few.with_room(many.bucket)
    assert widened.bucket == many.bucket == 32 and few.bucket == 16
    for name in ("cu_seqlens", "document_ids", "tiles", "chunk_documents", "chunk_bounds"):
        assert getattr(widened, name).shape == getattr(many, name).shape, name
    assert widened.cu_seqlens[2:].tolist() == [96] * 31 and widened.tiles[2:].eq(96).all()
    assert not widened.chunk_documents[2:].any() and not widened.chunk_bounds[2:].any()
    assert widened.lengths == few.lengths and few.with_room(16) is few


def test_moving_keeps_the_host_integers() -> None:
    packed = collate([[3, 4]], 16)["packed"]
    moved = packed.to("cpu")
    assert (
        moved.lengths == packed.lengths and moved.n_labels == packed.n_labels and moved.max_seqlen == packed.max_seqlen
    )


@pytest.mark.gpu
def test_pinned_upload() -> None:
    packed = collate([[3, 4]], 16)["packed"].pin_memory()
    assert packed.cu_seqlens.is_pinned() and packed.loss_rows.is_pinned()
    there = packed.to("cuda", non_blocking=True)
    assert there.cu_seqlens.is_cuda and there.cu_seqlens.tolist() == packed.cu_seqlens.tolist()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_of_any_sequence(kind: Any) -> None:
    """Data sets give lists, arrays or tensors, as their format says."""
    plain = {"input_ids": list(range(1, 11)), "labels": list(range(1, 11)), "lengths": [3, 4, 3]}
    batch = Collator(12, 0)([{name: kind(values) for name, values in plain.items()}])
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, 6, 7, -100, 9, 10, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 0, 1]]
