"""Every data file of the shared folder with the format that it is recognised as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pronghorn.config.recipe import Source
from pronghorn.config.sections import Format
from pronghorn.data.formats import RowReader
from pronghorn.data.rows import Conversation, OnBad, PromptCompletion, Row, TextDocument
from pronghorn.data.sources import read_source

QUESTION = {"prompt": "question", "completion": "answer"}


def read_rows(
    path: str | Path, columns: Mapping[str, str] | None = None, format: Format = "auto", on_bad: OnBad | None = None
) -> list[Row]:
    """Read every row of a file or folder for supervised fine-tuning; arguments and errors are `RowReader`'s."""
    return list(read_source(Source(path=Path(path)), RowReader(format, columns, on_bad)))


FILES: list[tuple[str, str, dict[str, str], str, int, type]] = [  # file, format, columns, what it is, rows, class
    ("gsm8k/train.jsonl", "auto", QUESTION, "prompt_completion", 7473, PromptCompletion),
    ("gsm8k/test.jsonl", "auto", QUESTION, "prompt_completion", 1319, PromptCompletion),
    ("llamafactory/alpaca_en_demo.json", "auto", {}, "alpaca", 999, Conversation),
    ("llamafactory/glaive_toolcall_en_demo.json", "auto", {}, "sharegpt", 300, Conversation),
    ("llamafactory/v1_sft_demo.jsonl", "auto", {}, "messages", 500, Conversation),
    ("llamafactory/kto_en_demo.json", "messages", {}, "messages", 300, Conversation),
    ("rasbt/instruction-data.json", "auto", {}, "alpaca", 1100, Conversation),
    ("rasbt/instruction-data-with-preference.json", "alpaca", {"output": "chosen"}, "alpaca", 1100, Conversation),
    ("dolly/dolly_3k.json", "auto", {}, "alpaca", 2996, Conversation),
    ("tinystories/tinystories_10k.txt", "auto", {}, "text", 1728, TextDocument),
]
PAIRS = ("llamafactory/dpo_en_demo.json", "rasbt/instruction-data-with-preference.json")
"""Files of preference pairs."""
