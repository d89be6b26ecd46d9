"""The overflow rules document by document, in plain Python, and `fit_dataset` on a list of documents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Sequence, Value

from pronghorn.data.overflow import Fitted, Overflow, fit_dataset
from pronghorn.data.packing import IGNORE_INDEX, Document

FEATURES = Features(
    {"input_ids": Sequence(Value("int32")), "labels": Sequence(Value("int32")), "source": Value("string")}
)


def as_dataset(documents: list[Document]) -> Any:
    """Return documents as the token cache holds them."""
    columns = {name: [getattr(document, name) for document in documents] for name in FEATURES}
    return Dataset.from_dict(columns, features=FEATURES)


def fit(
    documents: list[Document], length: int, overflow: Overflow = "error", folder: Path | None = None
) -> tuple[list[Document], Fitted]:
    """Return the documents that the rule leaves, and what it did."""
    fitted, dataset = fit_dataset(as_dataset(documents), length, overflow, folder)
    return [Document(**row) for row in dataset], fitted


def fit_reference(documents: list[Document], length: int, overflow: Overflow) -> tuple[list[Document], dict[str, int]]:
    """Return what `fit` does, one document after the other; those that fit come first."""
    count, cut = asdict(Fitted()), list[Document]()
    for document in (each for each in documents if len(each) > length):
        if overflow == "split":
            starts = range(0, len(document) - 1, length - 1)
            pieces = [
                Document(
                    document.input_ids[start : start + length],
                    [IGNORE_INDEX, *document.labels[start + 1 : start + length]],
                    f"{document.source} piece {number}".lstrip(),
                )
                for number, start in enumerate(starts, 1)
            ]
            supervised = [piece for piece in pieces if piece.supervised]
            count["split"] += 1
            count["dropped_pieces"] += len(pieces) - len(supervised)
            cut += supervised
        else:
            beginning = Document(document.input_ids[:length], document.labels[:length], document.source)
            keeps = overflow == "truncate" and beginning.supervised > 0
            count["truncated" if keeps else "dropped"] += 1
            cut += [beginning] if keeps else []
    count["documents"] = len(cut)
    return [*(each for each in documents if len(each) <= length), *cut], count
