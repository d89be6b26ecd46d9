"""A data set of packed rows: which documents share a row, and the rows themselves, joined on demand."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from pronghorn.data.dealing import Unsupervised
from pronghorn.data.packing import IGNORE_INDEX, pack, packing_ceiling, packing_efficiency
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
    """Packed rows, each full and a fair sample of the documents; row i is `{"input_ids", "labels", "lengths"}`.

    Args:
        documents: a list or a `datasets.Dataset`, each `{"input_ids": [...], "labels": [...]}` of equal length (labels
            unshifted, -100 if unsupervised). They stay readable as `documents`.
        row_tokens: the most tokens of a row; the collator pads it to exactly this.
        seed: of the packing.
        alone: give every document a row of its own.
    Raises:
        DataError: a document is empty, longer than a row, or has more or fewer labels than tokens.
    """

    column_names = ("input_ids", "labels", "lengths")
    """As a `datasets.Dataset` has them: TRL asks."""

    def __init__(
        self, documents: Sequence[Mapping[str, Any]] | Any, row_tokens: int, seed: int = 0, alone: bool = False
    ) -> None:
        from datasets import Dataset as ArrowDataset

        self.documents = documents
        names = ["input_ids", "labels"]
        columns: Any = documents
        if not hasattr(documents, "with_format"):
            columns = ArrowDataset.from_dict({name: [document[name] for document in documents] for name in names})
        self._columns = columns.with_format("arrow").select_columns(names)
        lengths = lengths_of(columns)
        for index, (tokens, labels) in enumerate(zip(lengths, lengths_of(columns, "labels"), strict=True)):
            if tokens != labels:  # a row's could still sum up, and would be other documents' labels
                raise DataError(
                    f"document {index} has {tokens} tokens and {labels} labels",
                    "give every token a label, -100 where it is not trained",
                )
        self._rows = [[index] for index in range(len(lengths))] if alone else pack(lengths, row_tokens, seed)
        self._lengths = lengths
        self.stats = PackingStats(
            documents=len(lengths),
            tokens=sum(lengths),
            rows=len(self._rows),
            row_tokens=row_tokens,
            efficiency=packing_efficiency(lengths, self._rows, row_tokens),
            ceiling=packing_ceiling(lengths, row_tokens),
        )

    def first(self, rows: int | None) -> PackedRows:
        """Return a view of the first `rows` rows (None: of all); `stats` stay those of the whole."""
        view = copy.copy(self)
        view._rows = self._rows[:rows]
        return view

    def costs(self, attention: float) -> list[float]:
        """Return what each row takes, in the time of one token beside attention.

        Args:
            attention: the time that a document of one token takes in attention; one of n tokens takes n² of it.
        """
        tokens = self.stats.row_tokens
        rows = ([self._lengths[i] for i in row] for row in self._rows)
        documents = ([*row, tokens - sum(row)] for row in rows)  # the padded tail attends to itself
        return [tokens + attention * sum(n * n for n in lengths) for lengths in documents]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | Unsupervised) -> dict[str, list[int]]:
        if isinstance(index, Unsupervised):
            row = self[index.row]
            return {**row, "labels": [IGNORE_INDEX] * len(row["labels"])}
        import pyarrow.compute

        # in one read, joined by Arrow: Python's lists take three times as long
        table = self._columns[self._rows[index]]
        row = {name: pyarrow.compute.list_flatten(table[name]).to_numpy().tolist() for name in table.column_names}
        return {**row, "lengths": pyarrow.compute.list_value_length(table["input_ids"]).to_pylist()}


def lengths_of(documents: Any, name: str = "input_ids") -> list[int]:
    """Return the tokens (or what else `name` holds) of each document of a `datasets.Dataset`, without decoding one."""
    import pyarrow.compute

    chosen = getattr(documents, "_indices", None)  # of a selection, which `datasets` gathers row by row
    if chosen is not None:
        return pyarrow.compute.list_value_length(documents.data[name]).take(chosen.column(0)).to_pylist()
    tables = documents.select_columns(name).with_format("arrow").iter(batch_size=10_000)
    return [n for table in tables for n in pyarrow.compute.list_value_length(table[name]).to_pylist()]
