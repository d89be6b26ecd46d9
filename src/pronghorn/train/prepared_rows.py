"""What the trainer mends in texts that TRL has tokenised."""

from __future__ import annotations

import warnings
from typing import Any

import pyarrow.compute
from datasets import Dataset


def tidied(documents: Any, given: Any, tokenizer: Any) -> Any:
    """Return the documents that TRL made of the rows `given`, those that were tokenised before as they are.

    Of texts a second BOS is left out, which a text written by a chat template has (the tokenizer adds another), and so
    is a column `lengths` of the data set's own, which means the documents of packed rows here.
    """
    if "input_ids" in next(iter(given)):
        return documents
    if "lengths" in (documents.column_names or ()):
        documents = documents.remove_columns("lengths")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or tokenizer("")["input_ids"][:1] != [bos]:
        return documents
    if isinstance(documents, Dataset):
        if not _begin_twice(documents, bos):
            return documents
        warnings.warn(
            f"texts begin with {tokenizer.bos_token}, and the tokenizer adds one: documents begin with one of them",
            stacklevel=4,
        )
    return documents.map(_without_second, fn_kwargs={"bos": bos})


def _begin_twice(documents: Dataset, bos: int) -> bool:
    """Tell whether a document begins with two of them."""
    for table in documents.select_columns("input_ids").with_format("arrow").iter(batch_size=1000):
        if [bos, bos] in pyarrow.compute.list_slice(table["input_ids"], 0, 2).to_pylist():
            return True
    return False


def _without_second(row: dict[str, Any], bos: int) -> dict[str, Any]:
    """Return a row's values a token (tokens, labels, masks) less the first token, where two of `bos` begin it."""
    ids = row["input_ids"]
    start = int(list(ids[:2]) == [bos, bos])
    return {
        name: values[start:] for name, values in row.items() if isinstance(values, list) and len(values) == len(ids)
    }
