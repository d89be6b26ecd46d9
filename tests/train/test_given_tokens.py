"""Documents that came tokenised: numbers that are none of the model's tokens, and padding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset, Features, Sequence, Value

from pronghorn import SFTTrainer
from pronghorn.errors import DataError
from pronghorn.train.given_tokens import check_given
from pronghorn.train.prepared_rows import supervised
from support.trainers import adapted, config

GOOD = {"input_ids": [1, 5, 6], "labels": [-100, 5, 6], "attention_mask": [1, 1, 1]}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [1, 512]}, "input_ids holds 512, and the model has embeddings of 512 tokens"),
        ({"input_ids": [1, -1]}, "input_ids holds -1,"),
        ({"input_ids": [1, 5, 6], "labels": [-1, 5, 6]}, "labels holds -1, .* a label that isn't trained is -100"),
        ({"input_ids": [1, 5, 6], "labels": [-100, 5, 600]}, "labels holds 600,"),
        ({"input_ids": [1.0, 5.0]}, "input_ids holds numbers of double"),
        ({"input_ids": [1, None]}, "input_ids holds a null"),
        (
            {"input_ids": [1, 5, 2], "attention_mask": [1, 1, 0]},
            "attention_mask tells of padding that would be trained",
        ),
        ({**GOOD, "attention_mask": [1, 1, 0]}, "padding that would be trained"),
        ({**GOOD, "labels": [-100, -100, 6], "attention_mask": [0, 0, 1]}, "padding before tokens, which would see it"),
    ],
)
def test_what_no_kernel_should_meet_is_refused(
    stories: Path, tmp_path: Path, row: dict[str, Any], told: str, packing: bool
) -> None:
    model, tokenizer = adapted(stories)
    rows = Dataset.from_list([*[{name: GOOD[name] for name in row}] * 1200, row])
    number = 1 if "double" in told else 1201  # the whole column is
    for name in ("train_dataset", "eval_dataset"):
        sets: dict[str, Any] = {"train_dataset": Dataset.from_list([GOOD]), name: rows}
        with pytest.raises(DataError, match=f"^{name} row {number}: .*{told}"):
            SFTTrainer(model, config(tmp_path, packing=packing), tokenizer=tokenizer, **sets)


@pytest.mark.parametrize("packing", [True, False])
def test_padding_that_changes_nothing_is_trained_around(stories: Path, tmp_path: Path, packing: bool) -> None:
    model, tokenizer = adapted(stories)
    padded = {"input_ids": [1, 5, 6, 2, 2], "labels": [-100, 5, 6, -100, -100], "attention_mask": [1, 1, 1, 0, 0]}
    rows = Dataset.from_list([padded, padded])
    trainer = SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=rows, tokenizer=tokenizer)
    assert getattr(trainer.train_dataset, "documents", trainer.train_dataset)[0]["labels"] == padded["labels"]


def test_columns_of_every_kind_are_read(stories: Path) -> None:
    model, tokenizer = adapted(stories)
    fixed = Features({"input_ids": Sequence(Value("int32"), length=2), "attention_mask": Sequence(Value("bool"))})
    alike = [{"input_ids": [1, 5], "attention_mask": [True, True]}] * 3
    for rows in (
        Dataset.from_list(alike, features=fixed),
        Dataset.from_list([{"input_ids": [], "labels": []}, GOOD]),
        Dataset.from_list([{"input_ids": []}]),
        Dataset.from_list([{**GOOD, "attention_mask": [0]}]),  # of something else
        Dataset.from_list([{**GOOD, "labels": [-100, 5]}]),  # refused where rows are made of them
        Dataset.from_list([{"input_ids": [1, 5, 2], "attention_mask": [1, 1, 0], "completion_mask": [0, 1, 0]}]),
        Dataset.from_list([GOOD]).with_format("torch"),
        Dataset.from_list([GOOD, GOOD]).select([1]),
    ):
        check_given("rows", rows, tokenizer, model)
    with pytest.raises(DataError, match=re.escape("rows row 2: input_ids holds 700")):
        check_given("rows", Dataset.from_list([{"input_ids": [700]}, GOOD]).select([1, 0]), tokenizer, model)


def hidden() -> pyarrow.Array:
    """Three lists, the second of which is null and has numbers all the same, as Arrow may."""
    offsets, numbers = pyarrow.array([0, 2, 4, 6], pyarrow.int32()), pyarrow.array([1, 5, 6, 7, 1, 700])
    return pyarrow.ListArray.from_arrays(offsets, numbers, mask=pyarrow.array([False, True, False]))


def test_numbers_that_lie_under_a_null_are_counted_nowhere(stories: Path) -> None:
    model, tokenizer = adapted(stories)
    with pytest.raises(DataError, match=re.escape("rows row 3: input_ids holds 700")):
        check_given("rows", Dataset(pyarrow.table({"input_ids": hidden()})), tokenizer, model)
    documents = Dataset(pyarrow.table({"labels": hidden()}))
    assert supervised("rows", documents) is documents  # null labels are refused later
