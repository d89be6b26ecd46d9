"""Which documents train reasoning where the prompt opens it."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from pronghorn.data.reasoning import is_trained
from support.chats import CHATML, byte_level

OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def document(tokenizer: Any, prompt: str, answer: str) -> dict[str, list[int]]:
    before, after = tokenizer(prompt)["input_ids"], tokenizer(answer)["input_ids"]
    labels = [-100] * len(before) + after
    return {"input_ids": before + after, "labels": [-100, *labels[1:]]}


PLAIN = ("a<think>\n\n</think>\n\n", "b")


@pytest.mark.parametrize(
    ("template", "loss_on", "documents", "trained"),
    [
        (OPENS, "completion", [PLAIN, ("longer<think></think>", "bb")], False),
        (OPENS, "completion", [PLAIN, ("c<think>\n", "thought</think>b")], True),
        (OPENS, "completion", [PLAIN, ("no block", "b")], False),
        (OPENS, "completion", [("", "a text without an answer")], True),
        (OPENS, "all", [("", "a<think>\n\n</think>\n\nb")], True),
        (CHATML, "completion", [PLAIN], True),
        (None, "completion", [PLAIN], True),
    ],
)
def test_reasoning_is_trained(
    template: str | None, loss_on: str, documents: list[tuple[str, str]], trained: bool
) -> None:
    tokenizer = byte_level(template)
    rows = Dataset.from_list([document(tokenizer, *each) for each in documents])
    assert is_trained(rows, tokenizer, loss_on) == trained
