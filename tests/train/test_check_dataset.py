"""Data sets of scripts that would end in somebody else's traceback, or be trained as something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from pronghorn import SFTTrainer
from pronghorn.errors import ConfigError, DataError
from support.chats import CHATML
from support.trainers import adapted, config

TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "is empty"),
        ([{"text": None}], "row 1: text is null"),
        ([{"text": 3}], "row 1: text is 3, not a text"),
        ([{"story": "One day"}], "columns story, and no 'text'|columns story are no known format"),
        ([{"chosen": "a", "rejected": "b"}], "has preference pairs"),
        ([{"conversations": [{"from": "human", "value": "a"}]}], "TRL reads `messages`"),
        ([{"messages": "[]"}], "messages is a text"),
    ],
)
def test_of_a_stream_the_first_row_is_looked_at(
    stories: Path, tmp_path: Path, rows: list[dict[str, Any]], told: str
) -> None:
    model, tokenizer = adapted(stories)
    tokenizer.chat_template = CHATML
    stream = IterableDataset.from_generator(lambda: iter(rows))
    for name in ("train_dataset", "eval_dataset"):
        sets: dict[str, Any] = {"train_dataset": Dataset.from_list([{"text": "One day"}]), name: stream}
        with pytest.raises((DataError, ConfigError), match=f"{name}.*({told})"):
            SFTTrainer(model, config(tmp_path, packing=False), tokenizer=tokenizer, **sets)


def test_a_text_field_that_is_no_column_beside_conversations(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    tokenizer.chat_template = CHATML
    rows = Dataset.from_list([{"conversations": TURNS, "text": "Who? A cat."}])
    with pytest.raises(DataError, match="columns conversations, text, and no 'txt'") as caught:
        SFTTrainer(model, config(tmp_path, dataset_text_field="txt"), tokenizer=tokenizer, train_dataset=rows)
    assert caught.value.remedy == "SFTConfig(dataset_text_field='text')"


@pytest.mark.parametrize("row", [{"text": "One day"}, {"prompt": "Who?", "completion": " A cat."}, {"messages": TURNS}])
@pytest.mark.parametrize("formatting", [None, lambda row: "A dog."])
def test_texts_that_nothing_ends_are_refused(
    stories: Path, tmp_path: Path, row: dict[str, Any], formatting: Callable[[Any], str] | None
) -> None:
    model, tokenizer = adapted(stories)
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = None, "<unk>", CHATML
    given: dict[str, Any] = {"train_dataset": Dataset.from_list([row] * 2), "formatting_func": formatting}
    args = config(tmp_path, completion_only_loss=False)
    if "messages" in row and formatting is None:
        SFTTrainer(model, args, tokenizer=tokenizer, **given)
        return
    with pytest.raises(ConfigError, match="the tokenizer no EOS token") as caught:
        SFTTrainer(model, args, tokenizer=tokenizer, **given)
    assert "tokenizer.eos_token" in caught.value.remedy
    SFTTrainer(model, config(tmp_path, completion_only_loss=False, eos_token="</s>"), tokenizer=tokenizer, **given)


@pytest.mark.parametrize("made", [None, ["A dog."], 3])
def test_a_formatting_function_that_returns_no_text_of_a_later_row(stories: Path, tmp_path: Path, made: Any) -> None:
    model, tokenizer = adapted(stories)
    rows = Dataset.from_list([{"tale": f"One day {i}."} for i in range(4)])
    with pytest.raises(DataError, match=f"row 4: formatting_func returns a {type(made).__name__}"):
        SFTTrainer(
            model,
            config(tmp_path),
            train_dataset=rows,
            tokenizer=tokenizer,
            formatting_func=lambda row: made if row["tale"] == "One day 3." else row["tale"],
        )


@pytest.mark.parametrize("packing", [True, False])
def test_a_transform_that_would_be_left_out_is_refused(stories: Path, tmp_path: Path, packing: bool) -> None:
    """Packed rows are read from the columns themselves, below any transform."""
    model, tokenizer = adapted(stories)
    tokenised = Dataset.from_list([{"input_ids": [1, 5, 6], "labels": [1, 5, 6]}] * 2)
    masked = tokenised.with_transform(lambda rows: {**rows, "labels": [[-100, -100, 6]] * len(rows["labels"])})
    for rows in (masked, Dataset.from_list([{"text": "One day"}]).with_transform(lambda rows: rows)):
        with pytest.raises(DataError, match="has a transform") as refused:
            SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=rows, tokenizer=tokenizer)
        made = eval(refused.value.remedy, {"dataset": rows, "FUNCTION": rows.format["format_kwargs"]["transform"]})
        assert made.column_names == rows.column_names and made.format["type"] is None


@pytest.mark.parametrize("packing", [True, False])
def test_what_is_given_to_evaluate_is_looked_at(stories: Path, tmp_path: Path, packing: bool) -> None:
    model, tokenizer = adapted(stories)
    rows = Dataset.from_list([{"text": "One day a cat sat."}] * 2)
    trainer = SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=rows, tokenizer=tokenizer)
    for wrong, told in (
        (rows.select([]), "eval_dataset is empty"),
        (Dataset.from_list([{"input_ids": [1, 9000]}]), "eval_dataset row 1: input_ids holds 9,000"),
        (Dataset.from_list([{"chosen": "a", "rejected": "b"}]), "eval_dataset has preference pairs"),
    ):
        with pytest.raises(DataError, match=told):
            trainer.evaluate(wrong)
    assert trainer.evaluate(rows)["eval_loss"] > 0
    trainer = SFTTrainer(
        model,
        config(tmp_path, packing=packing),
        train_dataset=Dataset.from_list([{"tale": "One day a cat sat."}] * 2),
        tokenizer=tokenizer,
        formatting_func=lambda row: row["tale"],
    )
    assert trainer.evaluate(Dataset.from_list([{"tale": "A dog ran."}]))["eval_loss"] > 0


@pytest.mark.parametrize("column", ["messages", "conversations", "prompt"])
def test_turns_that_a_format_makes_arrays_of_are_refused(stories: Path, tmp_path: Path, column: str) -> None:
    model, tokenizer = adapted(stories)
    tokenizer.chat_template = CHATML
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Lily."}]
    row = {"prompt": turns[:1], "completion": turns[1:]} if column == "prompt" else {column: turns}
    rows = Dataset.from_list([row, row]).with_format("numpy")
    with pytest.raises(
        DataError, match=rf"^train_dataset: by its format {column} is an array.*dataset\.with_format\(None\)"
    ):
        SFTTrainer(model, config(tmp_path), train_dataset=rows, tokenizer=tokenizer)
