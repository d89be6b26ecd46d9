"""What begins the turns of a user and of an assistant, read off the tokenizer's chat template."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.data.template import special_tokens
from pronghorn.errors import ConfigError
from pronghorn.train.response_markers import Markers, response_labels

ASKED: dict[str, Any] = {"role": "user", "content": "Alpha"}
CALL = {"id": "call12345", "type": "function", "function": {"name": "golf", "arguments": {"x": "Hotel"}}}
TOOLS = [{"type": "function", "function": {"name": "golf", "description": "India.", "parameters": {
    "type": "object", "properties": {"x": {"type": "string", "description": "Juliett"}}, "required": ["x"],
}}}]  # fmt: skip
THOUGHT: list[dict[str, Any]] = [
    {"role": "user", "content": "Kilo"}, {"role": "assistant", "content": "Lima"},
    ASKED, {"role": "assistant", "content": "Bravo", "reasoning_content": "Golf", "thinking": "Golf"},
]  # fmt: skip
CALLED: list[dict[str, Any]] = [
    ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "golf", "tool_call_id": "call12345", "content": "Charlie"},
    {"role": "assistant", "content": "Delta"}, {"role": "user", "content": "Echo"},
]  # fmt: skip


def template_parts(tokenizer: Any) -> tuple[str, str] | tuple[None, None]:
    """Return what begins a user's turn and what begins an assistant's, as the chat template writes them between turns;
    None for both where labels by them wouldn't train two answers with the tokens that end them, and nothing else."""
    words, end = ("Alpha", "Bravo", "Charlie", "Delta", "Echo"), str(getattr(tokenizer, "eos_token", None))
    turns = [{"role": ("user", "assistant")[at % 2], "content": word} for at, word in enumerate(words)]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        between = [text.partition(before)[2].partition(after)[0] for before, after in pairwise(words)]
        response, instruction = (part.rpartition(end)[2].lstrip("\n") for part in between[:2])
        markers = Markers.of([instruction], [response], tokenizer)
    except Exception:  # a template is a program
        return None, None
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    trained = [label for label in response_labels(ids, markers, tokenizer) if label != IGNORE_INDEX]
    said = str(tokenizer.decode(trained)).replace(end, " ").split()
    exact = said == [words[1], words[3]] and trained.count(tokenizer.eos_token_id) == 2
    return (instruction, response) if exact else (None, None)


def markers_of(instruction: str, response: str, given: bool, tokenizer: Any) -> Markers:
    """Return the markers of both parts and of what else begins and ends answers, as the chat template writes it.

    A tool's result may follow a call within the assistant's turn, and the answer behind it begin without `response`
    (Mistral, Gemma 4). Where the template told the parts (not `given`), reasoning and calls may begin with less than
    `response`, which has an empty block of reasoning, or what is before answers alone.
    """
    eos = tokenizer.eos_token
    if given and eos and eos != tokenizer.bos_token and instruction.strip().startswith(eos):
        raise ConfigError(
            f"instruction_part {instruction!r} begins with {eos}, the end of answers, which would not be trained",
            f"leave {eos} out of it",
        )
    control, ids = special_tokens(tokenizer), tokenizer(response, add_special_tokens=False)["input_ids"]
    starts = [str(tokenizer.decode(list(ids[:end]))) for end in range(len(ids), 0, -1)]
    begin, end, end_said = [response], [instruction], list[str]()
    if not given:
        for chat, word in ((THOUGHT, "Golf"), (CALLED[:2], "golf")):
            written = _between(chat, "Alpha", word, tokenizer)
            begin += next(([start] for start in starts if start in written), [])
    ends = _between(THOUGHT, "Lima", "Alpha", tokenizer)
    behind = _between(CALLED, "Charlie", "Delta", tokenizer)
    if behind and response not in behind and response in _between(THOUGHT, "Kilo", "Lima", tokenizer):
        begin += [part for part in _last(behind, control) if part not in ends]  # results may be written as answers
    if called := _between(CALLED[:2], "Hotel", "", tokenizer):
        end_said = [token for token in _last(called, control) if called.rstrip().endswith(token)]
        before = _between(CALLED, "Hotel", "Charlie", tokenizer)
        known = called + ends + response
        new = {before.index(token): token for token in control if token in before and token not in known}
        end += [token for _, token in sorted(new.items())[:1]]
    end_said = [token for token in end_said if token not in response and token != eos]
    return Markers.of(dict.fromkeys(end), dict.fromkeys(begin), tokenizer, end_said)


def unclear_results(markers: Markers, tokenizer: Any) -> list[int]:
    """Return the tokens before a tool's result in the chat template's conversations, if labels by the markers would
    train results or leave out the answers behind them; none if labels are right, or it renders no results."""
    before, said = _between(CALLED, "Hotel", "Charlie", tokenizer), _said(CALLED, markers, tokenizer)
    left_out = "Delta" not in said and "Lima" in _said(THOUGHT, markers, tokenizer)
    if not before or not ("Charlie" in said or left_out):
        return []
    begun = next(iter(_last(before, special_tokens(tokenizer))), before)
    tokens = list(tokenizer(begun, add_special_tokens=False)["input_ids"])
    return tokens[:-1] or tokens  # the last one may be one with the result's beginning


def _said(chat: list[dict[str, Any]], markers: Markers, tokenizer: Any) -> str:
    """Return what labels by the markers train of a conversation."""
    ids = list(tokenizer(_written(chat, tokenizer), add_special_tokens=False)["input_ids"])
    labels = response_labels(ids, markers, tokenizer)
    return str(tokenizer.decode([label for label in labels if label != IGNORE_INDEX]))


def _last(text: str, control: set[str]) -> list[str]:
    """Return what a text ends with, from its last control token on; nothing without one."""
    at = max((text.rfind(token) for token in control), default=-1)
    return [text[at:].rstrip()] if at >= 0 else []


def _between(chat: list[dict[str, Any]], before: str, after: str, tokenizer: Any) -> str:
    """Return what the chat template writes between two words of a conversation, "" where it doesn't write both."""
    text = _written(chat, tokenizer)
    if before not in text or after not in text:
        return ""
    behind = text.rpartition(before)[2]
    return behind.partition(after)[0] if after else behind


def _written(chat: list[dict[str, Any]], tokenizer: Any) -> str:
    """Return a conversation as the chat template writes it, "" where it refuses."""
    tools = TOOLS if any("tool_calls" in message for message in chat) else None
    try:
        return str(tokenizer.apply_chat_template(chat, tools=tools, tokenize=False))
    except Exception:  # a template is a program
        return ""
