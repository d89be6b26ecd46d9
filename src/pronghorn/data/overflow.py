"""Apply `data.overflow` to documents of more tokens than a row has: refuse, leave out, cut the end, or split."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from pronghorn.data.packed_rows import lengths_of
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import ConfigError, DataError
from pronghorn.text import counted

Overflow = Literal["error", "drop", "truncate", "split"]
_RAISE = "raise model.max_seq_length"  # recipes alone come here: TRL cuts the documents of scripts
_AT_ONCE = 64
"""Documents that are too long and in memory at a time."""


@dataclass(slots=True)
class Fitted:
    """Of the documents that are too long, how many were dropped, cut at the end (truncated) and cut into pieces
    (split), how many documents that made, and how many pieces were dropped for having no supervised token."""

    documents: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    dropped_pieces: int = 0


def fit_dataset(whole: Any, max_seq_length: int, overflow: Overflow, folder: Path | None) -> tuple[Fitted, Any]:
    """Apply the rule to a `datasets.Dataset`: (what was done, the documents that fit and, after them, the cut ones).

    "split" makes documents of at most `max_seq_length` tokens that have all the labels. A document that loses its last
    label by the cut is dropped, and so is a piece without one. Cut documents lie in a file without a name,
    memory-mapped as the others are: it is gone with the last process that reads it, however that ends.

    Args:
        folder: where the file is made; where nothing can be written there, or None, it is with other temporary files.
    Raises:
        DataError: an overlong document with "error"; nothing is left. ConfigError: rows too short to split.
    """
    from datasets import concatenate_datasets

    lengths = lengths_of(whole)
    long = [i for i, n in enumerate(lengths) if n > max_seq_length]
    if not long:
        return Fitted(), whole
    if overflow == "split" and max_seq_length < 2:
        raise ConfigError(f"max_seq_length {max_seq_length} < 2 with data.overflow: split", _RAISE)
    if overflow == "error":
        source = whole[long[0]]["source"] or f"document {long[0] + 1}"
        raise DataError(
            f"{source} has {lengths[long[0]]} tokens > max_seq_length {max_seq_length}",
            f"{_RAISE} or set data.overflow to drop, truncate or split",
        )
    short = whole.select([i for i, n in enumerate(lengths) if n <= max_seq_length])
    fitted = Fitted(dropped=len(long) if overflow == "drop" else 0)
    cut = [] if overflow == "drop" else [_written(whole, long, max_seq_length, overflow, fitted, folder)]
    kept = [each for each in (short, *cut) if len(each)]
    if not kept:
        raise DataError(
            f"of {counted(len(long), 'document')} none is left at max_seq_length {max_seq_length} with "
            f"data.overflow: {overflow}",
            _RAISE,
        )
    return fitted, concatenate_datasets(kept) if len(kept) > 1 else kept[0]


def outcomes(whole: Any, max_seq_length: int) -> dict[Overflow, Fitted]:
    """Return what each rule would do with a `datasets.Dataset` that has documents over `max_seq_length`, else {}."""
    long = [index for index, tokens in enumerate(lengths_of(whole)) if tokens > max_seq_length]
    if not long or max_seq_length < 2:
        return {}
    rules: dict[Overflow, Fitted] = {"drop": Fitted(dropped=len(long)), "truncate": Fitted(), "split": Fitted()}
    for table in _tables(whole.select_columns("labels"), long):
        for labels in _arrays(table["labels"]):
            _cuts(labels, max_seq_length, "truncate", rules["truncate"])
            _cuts(labels, max_seq_length, "split", rules["split"])
    return rules


def _cuts(labels: Any, length: int, overflow: Overflow, fitted: Fitted) -> list[tuple[int, int, int]]:
    """Return (number, first, end) of what becomes of a document with more tokens than `length`, and count it.

    Pieces are consecutive. A first token can't be supervised, so each begins with the last token of the one before,
    where it has its label.
    """
    tokens = len(labels)
    starts = range(0, tokens - 1, length - 1) if overflow == "split" else range(1)
    cuts = [(number, start, min(start + length, tokens)) for number, start in enumerate(starts, 1)]
    supervised = [cut for cut in cuts if (labels[cut[1] + 1 : cut[2]] != IGNORE_INDEX).any()]
    fitted.documents += len(supervised)
    if overflow == "split":
        fitted.split += 1
        fitted.dropped_pieces += len(cuts) - len(supervised)
    else:
        fitted.truncated += len(supervised)
        fitted.dropped += 1 - len(supervised)
    return supervised


def _written(whole: Any, long: list[int], length: int, overflow: Overflow, fitted: Fitted, folder: Path | None) -> Any:
    """Write what is cut of the documents `long` into a file without a name, and return it as a `datasets.Dataset`."""
    import pyarrow
    from datasets import Dataset
    from datasets.fingerprint import Hasher
    from datasets.table import InMemoryTable

    schema = whole.features.arrow_schema
    writable = folder is not None and os.access(folder, os.W_OK)
    with TemporaryFile(dir=folder if writable else None) as file:
        with pyarrow.ipc.new_stream(file, schema) as stream:
            for table in _tables(whole, long):
                columns: dict[str, list[Any]] = {name: [] for name in schema.names}
                for source, ids, labels in zip(
                    table["source"].to_pylist(), _arrays(table["input_ids"]), _arrays(table["labels"]), strict=True
                ):
                    for number, first, end in _cuts(labels, length, overflow, fitted):
                        piece = f"{source} piece {number}".lstrip() if overflow == "split" else source
                        own = labels[first:end].copy()
                        own[0] = IGNORE_INDEX
                        for name, value in (("input_ids", ids[first:end]), ("labels", own), ("source", piece)):
                            columns[name].append(value)
                stream.write_table(pyarrow.table(columns, schema))
        file.flush()
        buffer = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    # a fingerprint of ours: datasets' own would hash all bytes
    return Dataset(InMemoryTable.from_buffer(buffer), fingerprint=Hasher.hash([whole._fingerprint, length, overflow]))


def _tables(documents: Any, indices: list[int]) -> Iterator[Any]:
    """Yield these documents as Arrow tables, some at a time."""
    yield from documents.select(indices).with_format("arrow").iter(batch_size=_AT_ONCE)


def _arrays(column: Any) -> Iterator[Any]:
    """Yield each list of numbers of a column, without copying it."""
    return (each.values.to_numpy() for each in column)


MUCH = 0.01
"""The share of documents from which on it is a warning that they are dropped or cut."""


def lost_documents(dropped: int, dropped_share: float, truncated: int, cut_share: float) -> str:
    """Say how many documents were dropped and cut, and which share that is."""
    return f"{counted(dropped, 'document')} dropped ({dropped_share:.1%}), {truncated:,} truncated ({cut_share:.1%})"
