"""Held-out shares and counts: which conversations, always the same, and none on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console
from transformers import AutoTokenizer

from pronghorn.config.recipe import Data, Recipe, Source
from pronghorn.data.cache import documents
from pronghorn.errors import DataError
from pronghorn.train.documents import prepare
from support.templates import with_template


def row(number: int, more: str = "") -> str:
    return json.dumps({"prompt": f"Question {number}{more}", "completion": f"Answer {number}"})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("\n".join(row(number) for number in range(60)))
    (tmp_path / "b.jsonl").write_text("\n".join(row(number, "?") for number in range(40)))
    return tmp_path


def sides(data: Data, tokenizer: Any, seed: int = 1) -> tuple[list[Any], list[Any]]:
    """The token ids of the documents that are trained, and held out."""
    both = [documents(data, split, tokenizer, 256, seed) for split in ("train", "eval")]  # type: ignore[arg-type]
    train, held = ([tuple(ids) for ids in prepared.dataset["input_ids"]] for prepared in both)
    assert both[0].key != both[1].key
    return train, held


@pytest.mark.parametrize(("share", "count"), [("5%", 5), ("7", 7), (7, 7), ("12.5%", 12), ("80%", 80), ("99", 99)])
def test_a_share_or_a_count_is_held_out(files: Path, stories: Path, share: str | int, count: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    sources = [Source(path=files / "a.jsonl"), Source(path=files / "b.jsonl")]
    data = Data(train=sources, eval=share, cache=files / "cache")  # type: ignore[arg-type]
    train, held = sides(data, tokenizer)
    assert len(held) == count and len(train) == 100 - count and not set(train) & set(held)
    assert sides(data, tokenizer) == (train, held)
    assert set(sides(data, tokenizer, seed=2)[1]) != set(held)


def test_rows_of_a_list_on_one_line_are_conversations_of_their_own(tmp_path: Path, stories: Path) -> None:
    (tmp_path / "a.json").write_text(f"[{','.join(row(number) for number in range(60))}]")
    data = Data(train=tmp_path / "a.json", eval="10%", cache=tmp_path / "cache")
    train, held = sides(data, AutoTokenizer.from_pretrained(stories))
    assert (len(train), len(held)) == (54, 6)


def test_rows_that_are_added_and_repeated_stay_on_their_side(files: Path, stories: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    data = Data(train=files / "a.jsonl", eval="10", cache=files / "cache")
    _, held = sides(data, tokenizer)
    text = (files / "a.jsonl").read_text()
    (files / "a.jsonl").write_text(text + "\n" + text)
    train, again = sides(Data(train=files / "a.jsonl", eval="20", cache=files / "cache"), tokenizer)
    assert set(again) == set(held) and len(again) == 20 and len(train) == 100


def test_weights_and_max_samples_are_of_what_is_left(files: Path, stories: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    sources = [Source(path=files / "a.jsonl", weight=1, max_samples=10), Source(path=files / "b.jsonl", weight=3)]
    data = Data(train=sources, eval="10%", max_samples=30, cache=files / "cache")
    train, held = sides(data, tokenizer)
    assert len(held) == 4 and len(train) == 36 and not set(train) & set(held)


def test_a_source_with_a_share_that_is_held_out_whole_is_named(files: Path, stories: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    (files / "b.jsonl").write_text(row(0, "?"))
    sources = [Source(path=files / "a.jsonl", weight=3), Source(path=files / "b.jsonl", weight=1)]
    data = Data(train=sources, eval="50%", cache=files / "cache")
    told = 0
    for seed in range(8):  # of one row half of the seeds hold all out
        if documents(data, "eval", tokenizer, 256, seed).counts[1].used:
            told += 1
            with pytest.raises(DataError, match=r"b\.jsonl: data\.eval: 50% holds all of it out"):
                documents(data, "train", tokenizer, 256, seed)
        else:
            assert documents(data, "train", tokenizer, 256, seed).counts[1].used > 1
    assert 0 < told < 8


def test_a_conversation_of_several_documents_stays_whole(tmp_path: Path, stories: Path) -> None:
    tokenizer = with_template("qwen-3", stories)
    thought = {"role": "assistant", "content": "b", "reasoning_content": "R"}
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, thought, {"role": "user", "content": "c"}, thought]}
        for n in range(20)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Data(train=tmp_path / "a.jsonl", eval="25%", cache=tmp_path / "cache")
    prepared = [documents(data, split, tokenizer, 256, 1) for split in ("train", "eval")]  # type: ignore[arg-type]
    lines = [{source.split(" up to ")[0] for source in each.dataset["source"]} for each in prepared]
    assert [len(each.dataset) for each in prepared] == [30, 10] and not lines[0] & lines[1]


def test_what_leaves_nothing_is_refused(files: Path, stories: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    for share, what in (("60", "leaves nothing to train"), ("0.1%", "leaves nothing to evaluate")):
        with pytest.raises(DataError, match=f"of 60 conversations {what}"):
            sides(Data(train=files / "a.jsonl", eval=share, cache=files / "cache"), tokenizer)
    for share in ("0%", "100%", "0"):
        with pytest.raises(ValidationError):
            Data(train=files / "a.jsonl", eval=share)


@pytest.mark.parametrize(("copied", "told"), [(40, "40 of 40 documents"), (3, "3 of 40 documents"), (0, None)])
def test_a_file_to_evaluate_on_that_holds_what_is_trained_is_told_of(
    files: Path, stories: Path, copied: int, told: str | None
) -> None:
    rows = [row(number, "" if number < copied else "!") for number in range(40)]
    (files / "held.jsonl").write_text("\n".join(rows))
    table: dict[str, Any] = {
        "model": {"name": str(stories), "max_seq_length": 128},
        "data": {"train": files / "a.jsonl", "eval": files / "held.jsonl", "cache": files / "cache"},
        "train": {"output": files / "run"},
    }
    recipe, tokenizer = Recipe.model_validate(table), AutoTokenizer.from_pretrained(stories)
    console = Console(record=True, width=200, quiet=False)
    prepare(recipe, "eval", tokenizer, console, prepare(recipe, "train", tokenizer, console))
    said = console.export_text()
    assert (f"data.eval: {told} are trained, too: their loss says nothing of new data" in said) is bool(told)
    assert ("are trained" in said) is bool(told)
