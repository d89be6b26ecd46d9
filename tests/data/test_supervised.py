"""Which tokens of tool calls, reasoning and excepted turns are supervised: rows checked by hand, and many against the
prompts that transformers makes for generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.labels import label_rows
from pronghorn.data.rows import Conversation
from pronghorn.errors import DataError
from support.chats import CHATML, byte_level, trained
from support.data_files import read_rows
from support.templates import with_template

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
AGAIN, LAST = {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}
RESULT = {"role": "tool", "content": "1"}
TOOL = {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}
THOUGHT = {**ANSWER, "reasoning_content": "R"}
LATER = {**LAST, "reasoning_content": "S"}
IN_TEXT = {"role": "assistant", "content": "<think>\nR\n</think>\n\nb"}
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
ASKS, SEES = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}, {"from": "observation", "value": "1"}


def messages(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


QWEN_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
NO_THOUGHT = "<think>\n\n</think>\n\n"
BY_HAND: list[tuple[str, dict[str, Any], list[list[str]]]] = [  # template, row, supervised texts of each document
    ("chatml", messages(USER, ANSWER, AGAIN, LAST), [["b<|im_end|>", "d<|im_end|>"]]),
    ("chatml", messages(USER, {**ANSWER, "train": False}, AGAIN, LAST), [["d<|im_end|>"]]),
    ("chatml", messages(USER, {**ANSWER, "weight": 1}, AGAIN, {**LAST, "weight": 0}), [["b<|im_end|>"]]),
    ("chatml", messages(USER, THOUGHT), [["<think>\nR\n</think>\n\nb<|im_end|>"]]),
    ("chatml", messages(USER, IN_TEXT, AGAIN, LAST), [["<think>\nR\n</think>\n\nb<|im_end|>", "d<|im_end|>"]]),
    ("gemma", {"conversations": [HUMAN, {**GPT, "weight": 0}, HUMAN, GPT]}, [["b<end_of_turn>"]]),
    ("phi-4", {"prompt": [USER, ANSWER, AGAIN], "completion": [LAST]}, [["d<|im_end|>"]]),
    ("llama-3", {"prompt": [USER], "completion": [ANSWER, AGAIN, LAST]}, [["b<|eot_id|>", "d<|eot_id|>"]]),
    ("llama-3.1", messages(USER, CALL, RESULT, ANSWER, tools=[TOOL]), [
        ['{"name": "f", "parameters": {"x": 1}}<|eot_id|>', "b<|eot_id|>"]
    ]),
    ("qwen-2.5", messages(USER, CALL, RESULT, ANSWER, tools=[TOOL]), [[QWEN_CALL, "b<|im_end|>"]]),
    ("qwen-2.5", messages(USER, {**CALL, "content": "Well"}, RESULT, ANSWER), [["Well\n" + QWEN_CALL, "b<|im_end|>"]]),
    ("qwen-2.5", {"conversations": [HUMAN, ASKS, SEES, GPT], "tools": json.dumps([TOOL])}, [
        [QWEN_CALL.replace('{"x": 1}', "{}"), "b<|im_end|>"]
    ]),
    ("qwen-2.5", messages(USER, {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                          {"role": "function", "name": "f", "content": "1"}, ANSWER, functions=[TOOL]),
     [[QWEN_CALL, "b<|im_end|>"]]),
    ("qwen-3", messages(USER, ANSWER, AGAIN, LAST), [["b<|im_end|>", NO_THOUGHT + "d<|im_end|>"]]),
    ("qwen-3", messages(USER, THOUGHT, AGAIN, LATER), [  # earlier reasoning is gone from the second document's prompt
        ["<think>\nR\n</think>\n\nb<|im_end|>"], ["<think>\nS\n</think>\n\nd<|im_end|>"]
    ]),
    ("qwen-3", messages(USER, IN_TEXT, AGAIN, {**LATER, "weight": 0}), [["<think>\nR\n</think>\n\nb<|im_end|>"]]),
    ("qwen-3", messages(USER, {**CALL, "reasoning_content": "R"}, RESULT, LATER, tools=[TOOL]), [
        ["<think>\nR\n</think>\n\n" + QWEN_CALL, "<think>\nS\n</think>\n\nd<|im_end|>"]
    ]),
    ("mistral", messages(USER, CALL, RESULT, ANSWER, AGAIN, LAST, tools=[TOOL]), [  # tools before the last question
        ['[TOOL_CALLS]  [{"name": "f", "arguments": {"x": 1}}]</s>', " b</s>"], [" d</s>"]
    ]),
    ("gpt-oss", messages(USER, {**ANSWER, "thinking": "R"}), [
        ["<|channel|>analysis<|message|>R<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"]
    ]),
    ("gpt-oss", messages(USER, {**CALL, "reasoning": "R"}, RESULT, LATER, tools=[TOOL]), [
        ["<|channel|>analysis<|message|>R<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
         '{"x": 1}<|call|>',
         "<|channel|>analysis<|message|>S<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>"],
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "row", "expected"), BY_HAND, ids=[f"{i}-{t[0]}" for i, t in enumerate(BY_HAND)])
def test_rows_checked_by_hand(
    template: str, row: dict[str, Any], expected: list[list[str]], shared: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(template, shared / "models" / "stories260k")
    (tmp_path / "row.jsonl").write_text(json.dumps(row))
    documents = label_rows(read_rows(tmp_path / "row.jsonl"), tokenizer).documents
    assert [trained(document, tokenizer) for document in documents] == expected
    if len(documents) > 1:
        assert " up to message " in documents[0].source and " up to " not in documents[-1].source


@pytest.mark.matrix(3)
@pytest.mark.parametrize("template", ["llama-3.1", "qwen-2.5", "qwen-3", "mistral", "gpt-oss"])
def test_supervised_tokens_follow_the_prompt_of_generation(template: str, shared: Path) -> None:
    """Beside glaive's tool calls: what transformers renders before a turn, tokenised by itself, and the turn after it.
    Every second row is given reasoning in its assistant's turns, where the template has a place for it."""
    tokenizer = with_template(template, shared / "models" / "stories260k")
    rows = read_rows(shared / "data" / "llamafactory" / "glaive_toolcall_en_demo.json")[:24]
    checked = 0
    for number, row in enumerate(rows):
        assert isinstance(row, Conversation)
        said = [message.as_dict() for message in row.messages]
        for turn, message in enumerate(said):
            if message["role"] == "assistant" and number % 2 and template in ("qwen-3", "gpt-oss"):
                reasoning = {"reasoning_content": f"Thought {turn}."}
                row.messages[turn].extra.update(reasoning)  # type: ignore[attr-defined]
                message.update(reasoning, thinking=reasoning["reasoning_content"])

        def render(end: int, answer: bool, said: Any = said, row: Any = row) -> str:
            return str(
                tokenizer.apply_chat_template(
                    said[:end], tools=list(row.tools) or None, tokenize=False, add_generation_prompt=answer
                )
            )

        expected = set()
        for turn, message in enumerate(said):
            if message["role"] == "assistant":
                prompt, whole = render(turn, True), render(turn + 1, False).rstrip()
                assert whole.startswith(prompt)
                before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
                expected.add((tuple(before), whole[len(prompt) :]))
        documents = label_rows([row], tokenizer).documents
        for document in documents:
            for start, end in runs(document.labels):
                prompt_ids, text = tuple(document.input_ids[:start]), tokenizer.decode(document.input_ids[start:end])
                matches = [(p, t) for p, t in expected if p == prompt_ids and same_turn(t, text)]
                assert len(matches) == 1, (row.source, text)
                expected.remove(matches[0])
                checked += 1
        assert not expected, row.source
    assert checked > 60


def runs(labels: list[int]) -> list[tuple[int, int]]:
    """Where runs of supervised tokens begin and end."""
    edges = [i for i in range(len(labels) + 1) if (labels[i] if i < len(labels) else -100) == -100]
    starts = [i for i, label in enumerate(labels) if label != -100 and labels[i - 1] == -100]
    return [(start, next(edge for edge in edges if edge > start)) for start in starts]


def same_turn(alone: str, text: str) -> bool:
    """Qwen 3 writes an empty block only in a last turn, and gpt-oss ends only that with <|return|>."""
    endings = (alone, alone.removeprefix(NO_THOUGHT), alone.replace("<|return|>", "<|end|>"))
    return "".join(text.split()) in ("".join(ending.split()) for ending in endings)  # decoding moves spaces


def test_what_can_not_be_labelled_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML)
    (tmp_path / "row.jsonl").write_text(json.dumps(messages(USER, {**ANSWER, "train": False}, AGAIN, LAST)))
    (row,) = read_rows(tmp_path / "row.jsonl")
    with pytest.raises(DataError, match="a turn that is not to be trained, with"):
        label_rows([row], tokenizer, "all")
    (tmp_path / "row.jsonl").write_text(json.dumps(messages({**USER, "reasoning_content": "R"}, ANSWER)))
    with pytest.raises(DataError, match="message 1: reasoning in a message of role user"):
        read_rows(tmp_path / "row.jsonl")
    (tmp_path / "row.jsonl").write_text(json.dumps(messages(USER, {**ANSWER, "train": False})))
    assert label_rows(read_rows(tmp_path / "row.jsonl"), tokenizer).unsupervised == 1
