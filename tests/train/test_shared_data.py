"""Every data set of the shared folder trains on a tiny model: what people have, as it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pronghorn.config.recipe import Recipe
from pronghorn.train.run import run
from support.runs import QUIET
from support.templates import with_template

QUESTION = {"prompt": "question", "completion": "answer"}
SETS: list[tuple[str, dict[str, Any]]] = [  # file, how its rows are read
    ("gsm8k/train.jsonl", {"columns": QUESTION}),
    ("gsm8k/test.jsonl", {"columns": QUESTION}),
    ("llamafactory/alpaca_en_demo.json", {}),
    ("llamafactory/glaive_toolcall_en_demo.json", {"chat_template": "qwen-3"}),
    ("llamafactory/v1_sft_demo.jsonl", {}),
    ("llamafactory/kto_en_demo.json", {"format": "messages"}),
    ("rasbt/instruction-data.json", {}),
    ("rasbt/instruction-data-with-preference.json", {"format": "alpaca", "columns": {"output": "chosen"}}),
    ("dolly/dolly_3k.json", {}),
    ("tinystories/tinystories_10k.txt", {}),
]


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest) -> Path:
    """The folder of data and models; without it these tests are skipped."""
    folder = Path(request.config.getoption("--shared")).resolve()
    if not (folder / "data").is_dir():
        pytest.skip(f"no data sets at {folder}: give the folder with data/ and models/ by --shared PATH")
    return folder


@pytest.fixture
def chat_model(tmp_path: Path, stories: Path) -> Path:
    """stories260k with the special tokens and the template of Qwen 3."""
    from transformers import AutoModelForCausalLM

    tokenizer = with_template("qwen-3", stories)
    model: Any = AutoModelForCausalLM.from_pretrained(stories)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def recipe(model: Path, train: Path, folder: Path, **data: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name": str(model), "max_seq_length": 512},
            "adapter": {"r": 4},
            "data": {
                **{"train": train, "eval": 4, "eval_rows": 1, "overflow": "split", "max_samples": 24},
                **{"cache": folder / "cache"},
                **data,
            },
            "train": {"output": folder / "run", "max_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0},
            "report": {"html": False},
        }
    )


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("file", "data"), SETS, ids=[file for file, _ in SETS])
def test_a_data_set_of_the_shared_folder_trains(
    file: str, data: dict[str, Any], shared: Path, chat_model: Path, tmp_path: Path
) -> None:
    record = run(recipe(chat_model, shared / "data" / file, tmp_path, **data), QUIET)
    assert record.steps[-1]["labelled"] > 0 and record.packing["dropped"] == 0
    before, after = record.heldout["before"], record.heldout["after"]
    known = file.startswith("tinystories")  # this model was made of them
    assert before is not None and after is not None and (after != before if known else after < before)


def test_thinking_and_tool_calls_train_together(chat_model: Path, tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} and 2?"},
                {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [call]},
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "<think>\nIt says 3.\n</think>\n\nIt is 3."},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes.", "weight": number % 2},
            ],
            "tools": [{"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}],
        }
        for number in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    record = run(recipe(chat_model, tmp_path / "rows.jsonl", tmp_path), QUIET)
    assert record.packing["sources"][0]["rows"] == 24 and record.packing["documents"] > 24
    assert record.heldout["after"] < record.heldout["before"]  # type: ignore[operator]
