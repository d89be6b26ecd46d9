"""What the assistant thinks before it speaks: where a chat template takes it, and where it is in what a model wrote."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.data.rows import Conversation, Message
from pronghorn.data.template import is_open, render
from pronghorn.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
"""Reasoning at the beginning of an assistant's text."""
_CHANNEL = re.compile(
    r"<\|channel\|>\s*(\w*)(?:(?!<\|message\|>).)*<\|message\|>((?:(?!<\|(?:end|start|return|call)\|>).)*)", re.DOTALL
)
"""A message of gpt-oss: its channel, and what it says."""
_LOOKED_AT, _TOKENS = 500, 16
"""Documents, and tokens before an answer, that tell whether reasoning is trained."""
_OPENS, _TITLE, _CLOSES = "<|channel>", "thought", "<channel|>"
"""Gemma 4's tokens around what it thinks, which decoding leaves out, and the word that is written behind the first."""


class Reasoning:
    """How a tokenizer's chat template takes the assistant's reasoning."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def placed(self, row: Conversation) -> Conversation:
        """Give the assistant's reasoning to the template in the way that it knows: in a field of its own, or within
        <think> at the beginning of the text."""
        if not any(message.reasoning or THINK.match(message.content) for message in row.messages):
            return row
        messages = tuple(apart(m) if self._has_field["tool_calls" in m.extra] else _joined(m) for m in row.messages)
        return replace(row, messages=messages)

    def remembered(self, row: Conversation) -> Conversation:
        """Place what a model itself thought, as `placed`. Where it marks that otherwise than by <think> (Gemma 4) and
        the template takes it in no field, it is left out: <think> would be something that it never wrote."""
        if not _marks_thoughts(self._tokenizer):
            return self.placed(row)
        return replace(row, messages=tuple(map(apart, row.messages)))

    @cached_property
    def _has_field(self) -> dict[bool, bool]:
        """Whether the chat template renders the reasoning of a turn, by whether the turn has calls: Gemma 4's first
        templates do so of calls alone."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        of_text = self._renders_reasoning({})
        return {False: of_text, True: of_text or self._renders_reasoning({"tool_calls": [call]})}

    def _renders_reasoning(self, extra: dict[str, Any]) -> bool:
        """Tell whether the chat template renders `reasoning_content` (or gpt-oss's `thinking`) beside `extra`."""
        said = Message("assistant", "" if extra else "b", {"reasoning_content": "pronghorn", **extra})
        try:
            return "pronghorn" in render([Message("user", "a"), said], (), self._tokenizer, "a probe", answer=False)
        except DataError:
            return False


def apart(message: Message) -> Message:
    """Take reasoning out of the assistant's text into its field."""
    written = THINK.match(message.content) if message.role == "assistant" and not message.reasoning else None
    if written is None:
        return message
    reasoning = {"reasoning_content": written[1].strip("\n")} if written[1].strip() else {}
    return replace(message, content=message.content[written.end() :], extra={**message.extra, **reasoning})


def _joined(message: Message) -> Message:
    """Put the assistant's reasoning at the beginning of its text."""
    if not message.reasoning:
        return message
    extra = {name: value for name, value in message.extra.items() if name != "reasoning_content"}
    return replace(message, content=f"<think>\n{message.reasoning}\n</think>\n\n{message.content}", extra=extra)


def is_trained(documents: Any, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> bool:
    """Tell whether documents train reasoning where the generation prompt opens it (Qwen3.5): by `_LOOKED_AT` of them.
    True where no prompt opens any, and where the labels don't show where an answer begins.

    Args:
        documents: a `datasets.Dataset` of input_ids and labels.
    """
    if loss_on == "all" or not tokenizer.chat_template:
        return True
    try:
        prompt = render([Message("user", "a")], (), tokenizer, "a probe", answer=True)
    except DataError:
        return True
    if not is_open(prompt):
        return True
    chosen = documents.with_format("numpy")[:: max(1, len(documents) // _LOOKED_AT)]
    answers = 0
    for ids, labels in zip(chosen["input_ids"], chosen["labels"], strict=True):
        learned = labels[1:] != IGNORE_INDEX  # what is learned from the first token on is a text, or a piece
        for begin in np.flatnonzero(learned[1:] & ~learned[:-1]) + 2:
            answers += 1
            if is_open(str(tokenizer.decode(ids[max(0, begin - _TOKENS) : begin].tolist()))):
                return True
    return not answers


def said(tokenizer: PreTrainedTokenizerBase, ids: list[int], prompt: str) -> str:
    """Return the text of what a model wrote behind a prompt; reasoning is within <think>, also where the prompt opens
    it (Qwen3.5) or channels tell it from the answer (gpt-oss, Gemma 4)."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
    if "<|channel|>" in str(tokenizer.chat_template):
        messages = _CHANNEL.findall(str(tokenizer.decode(ids, skip_special_tokens=False)))
        if not messages:
            return text
        thought = "".join(each for channel, each in messages if channel == "analysis").strip()
        answer = "".join(each for channel, each in messages if channel != "analysis").strip()
        return _thinking(thought, answer)
    if _marks_thoughts(tokenizer):
        return _thinking(*_thoughts(tokenizer, ids))
    if "</think>" in text and prompt.rstrip().endswith("<think>"):
        return f"<think>\n{text}"
    return text


def _thinking(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}" if thought else answer


def _marks_thoughts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a tokenizer has Gemma 4's tokens around thoughts."""
    return {_OPENS, _CLOSES} <= tokenizer.get_added_vocab().keys()


def _thoughts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, str]:
    """Return what Gemma 4 thought, and what it said."""
    opens, closes = (tokenizer.get_added_vocab()[token] for token in (_OPENS, _CLOSES))
    thoughts, answer, thinks = list[list[int]](), list[int](), False
    for token in ids:
        if token == opens:
            thoughts.append([])
        if token in (opens, closes):
            thinks = token == opens
        else:
            (thoughts[-1] if thinks else answer).append(token)
    texts = (str(tokenizer.decode(each, skip_special_tokens=True)).lstrip() for each in thoughts)
    thought = "".join(text.removeprefix(_TITLE) for text in texts)
    return thought.strip(), str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
