"""Documents that came tokenised: tokens that the model can't read, and padding that nobody meant to train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import DataError
from pronghorn.models.families import base_causal_lm
from pronghorn.train.prepared_rows import rows_of_tokens


def check_given(name: str, given: Any, tokenizer: Any, model: Any) -> None:
    """Refuse documents that came tokenised whose tokens or labels aren't the model's (the loss would be NaN), and
    padding in them that would be trained or seen. Those of a stream are not looked at.

    Args:
        tokenizer: the trainer's, or None. Where it has tokens that the model lacks, `validate.check_ids` names them.
    """
    if not isinstance(given, Dataset) or given.format["type"] == "custom":  # a transform makes the rows
        return
    names = [column for column in ("input_ids", "labels", "attention_mask") if column in given.column_names]
    marked = {"completion_mask", "assistant_masks"} & {*given.column_names}
    tokens: int = base_causal_lm(model).get_input_embeddings().weight.shape[0]
    if hasattr(tokenizer, "get_vocab"):
        tokens = max(tokens, *(number + 1 for number in tokenizer.get_vocab().values()))
    first = 0
    for table in given.select_columns(names).with_format("arrow").iter(batch_size=1000):
        columns = {column: _Column(name, column, table[column], first) for column in names}
        columns["input_ids"].check(tokens, ignored=None)
        if "labels" in columns:
            columns["labels"].check(tokens, ignored=IGNORE_INDEX)
        if "attention_mask" in columns:
            _check_padding(columns, trained=not marked)
        first += len(table)


class _Column:
    """A column of lists of numbers, some rows of it: the numbers end to end, and the row of each."""

    def __init__(self, name: str, column: str, lists: Any, first: int) -> None:
        self.called, self._first = f"{name} row {{}}: {column}", first
        values = pyarrow.compute.list_flatten(lists)
        self.rows = rows_of_tokens(lists)
        if values.null_count:
            place = np.argmax(values.is_null().to_numpy())
            raise DataError(f"{self.at(place)} holds a null", "leave such rows out by dataset.filter")
        kind = values.type
        if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind) or pyarrow.types.is_null(kind)):
            raise DataError(f"{self.at(0)} holds numbers of {kind}", "dataset.cast_column to lists of int64")
        self.values = values.to_numpy()

    def at(self, place: Any) -> str:
        """Return how errors name the row of the number at a place."""
        return self.called.format(self._first + int(self.rows[place]) + 1)

    def check(self, tokens: int, ignored: int | None) -> None:
        """Refuse numbers that are none of so many `tokens` and not the one that is `ignored`."""
        wrong = (self.values < 0) | (self.values >= tokens)
        if ignored is not None:
            wrong &= self.values != ignored
        if wrong.any():
            place = np.argmax(wrong)
            raise DataError(
                f"{self.at(place)} holds {self.values[place]:,}, and the model has embeddings of {tokens:,} tokens",
                "tokenise by the model's own tokenizer"
                + ("" if ignored is None else f"; a label that isn't trained is {ignored}"),
            )


def _check_padding(columns: dict[str, _Column], trained: bool) -> None:
    """Refuse padding whose own tokens are trained (`trained`: no labels mean all are), or that stands before tokens,
    which would see it: documents are read as they are, without a mask."""
    mask, labels = columns["attention_mask"], columns.get("labels")
    if not all(np.array_equal(mask.rows, each.rows) for each in columns.values()):
        return  # of something else, or labels that are refused where rows are made
    padding = mask.values == 0
    last = np.diff(mask.rows, append=-1) != 0
    before = padding & ~last & ~np.append(padding[1:], True)
    wanted = np.full(len(padding), trained) if labels is None else labels.values != IGNORE_INDEX
    for wrong, what in ((before, "before tokens, which would see it"), (padding & wanted, "that would be trained")):
        if wrong.any():
            raise DataError(
                f"{mask.at(np.argmax(wrong))} tells of padding {what}",
                "tokenise without padding: the trainer packs documents, or pads them by itself",
            )
