"""Rows in batches: the documents that TRL makes of them one by one, or TRL's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

from pronghorn import SFTTrainer
from pronghorn.errors import DataError
from pronghorn.train import tokenised
from support.processes import together
from support.tiny import tiny_model
from support.trainers import config

PAIRS = [
    {"prompt": f"How many are {i}?\n" * (4 if i < 20 else 1), "completion": f"They are {i}. " * (i % 7), "source": i}
    for i in range(40)
]
CHATS = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    for row in PAIRS
]
CHAT_PAIRS = [{"prompt": row["messages"][:1], "completion": row["messages"][1:], "source": 1} for row in CHATS]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = [{"text": f"Once upon a time {i} cats sat. " * (1 + i % 5)} for i in range(40)]


def tokenizer_of(stories: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, TEMPLATE
    return tokenizer


def documents(folder: Path, tokenizer: Any, rows: Any, **changes: Any) -> Dataset:
    """What a trainer makes of rows, without packing."""
    model = tiny_model("llama", vocab_size=len(tokenizer))
    args = config(folder, **({"max_length": 64, "packing": False} | changes))
    given = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    return SFTTrainer(model, args, train_dataset=given, processing_class=tokenizer).train_dataset


@pytest.fixture
def by_trl(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the data sets that TRL prepares."""
    prepared: list[int] = []
    stock = trl.SFTTrainer._prepare_dataset

    def noted(self: Any, rows: Any, *more: Any) -> Any:
        prepared.append(len(rows) if isinstance(rows, Dataset) else tokenised.FIRST)
        return stock(self, rows, *more)

    monkeypatch.setattr(trl.SFTTrainer, "_prepare_dataset", noted)
    return prepared


@pytest.mark.parametrize("cut", ["keep_start", "keep_end"])
@pytest.mark.parametrize("most", [None, 96, 40])
@pytest.mark.parametrize(
    "rows",
    [PAIRS, TEXTS, [{"text": row["text"] + "</s>" * (i % 2)} for i, row in enumerate(TEXTS)], CHATS, CHAT_PAIRS],
    ids=["pairs", "texts", "texts that end", "conversations", "pairs of turns"],
)
def test_documents_are_those_of_trl(
    tmp_path: Path,
    stories: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_trl: list[int],
    rows: list[dict[str, Any]],
    most: int | None,
    cut: str,
) -> None:
    tokenizer, asked = tokenizer_of(stories), {"max_length": most, "truncation_mode": cut}
    ours = documents(tmp_path, tokenizer, rows, **asked)
    assert by_trl == [tokenised.FIRST], "TRL saw the first rows alone"
    monkeypatch.setattr(tokenised, "_in_batches", lambda *_: None)
    theirs = documents(tmp_path, tokenizer, rows, **asked)
    assert by_trl[1:] == [40]
    assert ours.features == theirs.features and ours.to_dict() == theirs.to_dict()
    if rows in (PAIRS, CHAT_PAIRS) and cut == "keep_start":
        assert len(ours) == {None: 40, 96: 40, 40: 20}[most], "prompts alone, the first 20 rows, are left out"


@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        ([*PAIRS, {"prompt": "Once upon a ti", "completion": "me", "source": 1}], {}),
        (PAIRS, {"completion_only_loss": False}),
        ([row | {"completion_mask": [1]} for row in TEXTS], {}),
        (TEXTS[:1] * 20 + TEXTS[20:], {"shuffle_dataset": True}),
        ([row | {"tools": "[]"} for row in CHATS], {}),
        ([row | {"chat_template_kwargs": {"enable_thinking": False}} for row in CHATS], {}),
        ([{"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}] * 40, {}),
    ],
    ids=[
        "a token over the prompt's end",
        "prompts trained, too",
        "masks",
        "another order",
        "tools",
        "a template's arguments",
        "ShareGPT",
    ],
)
def test_what_is_not_plain_is_left_to_trl(
    tmp_path: Path, stories: Path, by_trl: list[int], rows: list[dict[str, Any]], asked: dict[str, Any]
) -> None:
    assert len(documents(tmp_path, tokenizer_of(stories), rows, **asked))
    assert by_trl[-1] == len(rows)


def test_other_documents_of_trl_are_taken(
    tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch, by_trl: list[int]
) -> None:
    """Should a later TRL make something else of texts, so does the trainer."""
    noted = trl.SFTTrainer._prepare_dataset

    def other(self: Any, *given: Any) -> Any:
        return noted(self, *given).map(lambda row: {"input_ids": [5, *row["input_ids"]], "labels": [5, *row["labels"]]})

    monkeypatch.setattr(trl.SFTTrainer, "_prepare_dataset", other)
    made = documents(tmp_path, tokenizer_of(stories), TEXTS)
    assert by_trl == [tokenised.FIRST, 40] and all(ids[0] == 5 for ids in made["input_ids"])


@pytest.mark.parametrize("differ", [False, True], ids=["the same rows", "rows that one leaves to TRL"])
def test_processes_tokenise_each_for_itself_or_none(tmp_path: Path, stories: Path, differ: bool) -> None:
    rows = [*PAIRS, {"prompt": "Once upon a ti", "completion": "me", "source": 1}]

    def work(rank: int, folder: Path) -> None:
        tokenizer = tokenizer_of(stories)
        if differ:
            with pytest.raises(DataError, match="train_dataset is another one in each of 2 processes"):
                documents(folder, tokenizer, rows if rank else PAIRS)
        else:
            made = documents(folder, tokenizer, PAIRS)
            ids, prompt = made[25]["input_ids"], len(tokenizer(PAIRS[25]["prompt"])["input_ids"])
            assert len(made) == 40 and made[25]["labels"] == [-100] * prompt + ids[prompt:]

    together(work, tmp_path)
