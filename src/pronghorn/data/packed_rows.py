"""A data set of packed rows: which documents share a row, and the rows themselves, joined on demand."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from torch.utils.data import Dataset

from pronghorn.data.packing import pack, packing_ceiling, packing_efficiency
from pronghorn.errors import DataError


@dataclass(frozen=True)
class PackingStats:
    """How well the documents fill the rows."""

    documents: int
    tokens: int
    """Real tokens, without padding."""
    rows: int
    row_tokens: int
    efficiency: float
    """Real tokens over all tokens of the rows."""
    ceiling: float
    """What no packing of these lengths can exceed."""


class PackedRows(Dataset):
    """Rows of documents packed by best-fit-decreasing; row i is `{"input_ids", "labels", "lengths"}`.

    Args:
        documents: each `{"input_ids": [...], "labels": [...]}` of equal length (labels unshifted, -100 untrained);
            a list or a `datasets.Dataset`.
        row_tokens: tokens a row holds at most; the collator pads it to exactly this.
        seed: of the packing.
    Raises:
        DataError: a document is empty, longer than a row, or has more or fewer labels than tokens.
    """

    column_names = ("input_ids", "labels", "lengths")
    """As a `datasets.Dataset` has them: TRL asks."""

    def __init__(self, documents: Sequence[Mapping[str, Any]] | Any, row_tokens: int, seed: int = 0) -> None:
        self._documents = documents
        self._columns: Any = None
        if _is_dataset(documents):
            self._columns = cast(Any, documents).with_format("arrow").select_columns(["input_ids", "labels"])
        lengths = lengths_of(documents)
        labelled = lengths_of(documents, "labels")
        for index, (tokens, labels) in enumerate(zip(lengths, labelled, strict=True)):
            if tokens != labels:  # a row's could still sum up, and would be other documents' labels
                raise DataError(
                    f"document {index} has {tokens} tokens and {labels} labels",
                    "give every token a label, -100 where it is not trained",
                )
        self._rows = pack(lengths, row_tokens, seed)
        self.stats = PackingStats(
            documents=len(lengths),
            tokens=sum(lengths),
            rows=len(self._rows),
            row_tokens=row_tokens,
            efficiency=packing_efficiency(lengths, self._rows, row_tokens),
            ceiling=packing_ceiling(lengths, row_tokens),
        )

    @property
    def documents(self) -> Sequence[Mapping[str, Any]] | Any:
        """The documents as they were given, in that order."""
        return self._documents

    def first(self, rows: int | None) -> PackedRows:
        """A view of the first `rows` rows (None: of all); `stats` stay those of the whole."""
        view = copy.copy(self)
        view._rows = self._rows[:rows]
        return view

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        indices = self._rows[index]
        if self._columns is not None:  # in one read, joined by Arrow: as Python's lists it takes three times as long
            return _joined(self._columns[indices])
        documents = [self._documents[i] for i in indices]
        return {
            "input_ids": list(chain.from_iterable(each["input_ids"] for each in documents)),
            "labels": list(chain.from_iterable(each["labels"] for each in documents)),
            "lengths": [len(each["input_ids"]) for each in documents],
        }


def _joined(table: Any) -> dict[str, list[int]]:
    """A row of the documents of an Arrow table."""
    import pyarrow.compute

    row = {name: pyarrow.compute.list_flatten(table[name]).to_numpy().tolist() for name in ("input_ids", "labels")}
    return {**row, "lengths": pyarrow.compute.list_value_length(table["input_ids"]).to_pylist()}


def _is_dataset(documents: Any) -> bool:
    return hasattr(documents, "with_format")


def lengths_of(documents: Any, name: str = "input_ids") -> list[int]:
    """Tokens (or what else `name` holds) of each document; a `datasets.Dataset` is asked for its list lengths, without
    decoding a token."""
    if not _is_dataset(documents):
        return [len(document[name]) for document in documents]
    import pyarrow.compute

    tables = documents.select_columns(name).with_format("arrow").iter(batch_size=10_000)
    return [n for table in tables for n in pyarrow.compute.list_value_length(table[name]).to_pylist()]
