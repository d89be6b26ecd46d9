"""Messages of a script's data set that TRL would train as something else."""

from __future__ import annotations

import warnings
from typing import Any

import pyarrow
import pyarrow.compute
from datasets import Dataset

from pronghorn.data.messages import REASONING
from pronghorn.data.reasoning import THINK
from pronghorn.errors import DataError

FIRST = 1000
"""Rows of a data set that are rendered to be looked at."""


def check_turns(name: str, dataset: Dataset, column: str) -> None:
    """Refuse rows without messages, and messages without content, which most templates write as None.

    Args:
        column: one that holds lists of messages.
    """
    rows = dataset.data.column(column)
    kind = rows.type.value_type if pyarrow.types.is_list(rows.type) or pyarrow.types.is_large_list(rows.type) else None
    if kind is None or not pyarrow.types.is_struct(kind) or kind.get_field_index("content") < 0:
        return
    turns = pyarrow.compute.list_flatten(rows)
    empty = pyarrow.compute.min(pyarrow.compute.list_value_length(rows)).as_py() == 0
    if not empty and not pyarrow.compute.struct_field(turns, "content").null_count:
        return
    for number, messages in enumerate(dataset[column], 1):
        wrong = "is empty" if not messages else None
        for index, message in enumerate(messages or (), 1):
            said = ("content", "tool_calls", "function_call", *REASONING)
            if message is None or all(message.get(key) is None for key in said):
                wrong = f"has no content in message {index}"
        if wrong is not None:
            raise DataError(
                f"{name} row {number}: {column} {wrong}", "fill it in, or leave such rows out by dataset.filter"
            )


def check_roles(name: str, row: dict[str, Any], tokenizer: Any) -> None:
    """Refuse what TRL or a template makes no messages of: ShareGPT's keys and its roles, which most templates write as
    they are (no model knows a turn of "human"), JSON, and a text beside messages."""
    if isinstance(row.get("messages"), str):
        raise DataError(
            f"{name}: messages is a text, and TRL reads a list of turns",
            'dataset.map(lambda row: {"messages": json.loads(row["messages"])}), or to train a text of another column '
            'dataset.remove_columns("messages")',
        )
    template = str(getattr(tokenizer, "chat_template", None) or "human gpt")
    lists = [column for column in ("messages", "prompt", "completion") if isinstance(row.get(column), list)]
    for column in lists:
        turns = [turn for turn in row[column] if isinstance(turn, dict)]
        wrong = next(
            (
                f"keys {', '.join(turn)}, and TRL reads role and content"
                for turn in turns
                if {*turn} >= {"from", "value"}
            ),
            "",
        )
        roles = [str(turn["role"]) for turn in turns if turn.get("role") in ("human", "gpt")]
        if roles and roles[0] not in template:
            wrong = f"the role {roles[0]!r}, which the chat template doesn't know"
        if wrong:
            raise DataError(
                f"{name}: {column} of {wrong}",
                "call the roles user and assistant: pronghorn.chat_templates.standardize_sharegpt(dataset) does it "
                "in `messages`",
            )
    for text, other, role in (("prompt", "completion", "user"), ("completion", "prompt", "assistant")):
        if isinstance(row.get(text), str) and other in lists:
            made = f"{{{text!r}: [{{'role': {role!r}, 'content': row[{text!r}]}}]}}"
            raise DataError(f"{name}: {text} is a text, and {other} messages", f"dataset.map(lambda row: {made})")


def check_rendered(name: str, dataset: Dataset, tokenizer: Any, marked: bool) -> None:
    """Refuse rows that the chat template makes something else of (`check_calls`, `check_completions`), and tell what it
    leaves out of last answers; not if answers are `marked`, which TRL does by a template of its own."""
    if getattr(tokenizer, "chat_template", None):
        check_calls(name, dataset, tokenizer)
        check_completions(name, dataset, tokenizer)
        if not marked:
            check_answers(name, dataset, tokenizer)


def check_calls(name: str, dataset: Dataset, tokenizer: Any) -> None:
    """Refuse tool calls that the chat template leaves out, all or the second of two at once: empty answers would be
    trained, or results of no call be seen. The first row with calls is looked at, and the first with two at once."""
    if "messages" not in dataset.column_names:
        return
    most = 0
    for messages in dataset.select(range(min(len(dataset), FIRST)))["messages"]:
        turns = [_given(turn) for turn in messages or () if turn]
        calls = [turn["tool_calls"] for turn in turns if isinstance(turn.get("tool_calls"), list)]
        at_once = max(map(len, calls), default=0)
        names = [
            (call.get("function") or call).get("name") for each in calls for call in each if isinstance(call, dict)
        ]
        if min(at_once, 2) <= most or not all(isinstance(each, str) for each in names):
            continue
        try:
            written = tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # a template is a program; TRL meets the same error
            return
        left_out = next((each for each in names if written.count(each) < names.count(each)), None)
        if left_out is not None:
            instead = "" if at_once > 1 and left_out in written else ", and empty answers would be trained"
            raise DataError(
                f"{name}: the chat template leaves the tool call {left_out!r} out{instead}",
                "use a model whose template renders tools, or pronghorn.chat_templates.get_chat_template(tokenizer, "
                '"qwen-2.5")',
            )
        most = min(at_once, 2)
        if most == 2:
            return


def check_completions(name: str, dataset: Dataset, tokenizer: Any) -> None:
    """Refuse prompts that the chat template renders otherwise once the completion follows: TRL trains all behind what
    both have in common, and so what the user or a tool says there. Of the first rows."""
    if not {"prompt", "completion"} <= {*dataset.column_names}:
        return
    for number, row in enumerate(dataset.select(range(min(len(dataset), FIRST))), 1):
        prompt, completion = row["prompt"], row["completion"]
        if not (isinstance(prompt, list) and prompt and isinstance(completion, list)):
            return
        said, answers = [_given(turn) for turn in prompt], [_given(turn) for turn in completion]
        last = said[-1].get("content")
        if not isinstance(last, str) or not last.strip():
            continue
        options: dict[str, Any] = {"tools": row.get("tools"), **(row.get("chat_template_kwargs") or {})}
        try:
            begun = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **options)
            whole = tokenizer.apply_chat_template([*said, *answers], tokenize=False, **options)
            if whole.startswith(begun):
                continue
            asked = tokenizer.apply_chat_template(said, tokenize=False, **options)
        except Exception:  # a template is a program; TRL meets the same error
            return
        if whole.startswith(asked) and begun.startswith(asked):  # what is trained begins behind it
            continue
        differ = (at for at, (one, other) in enumerate(zip(begun, whole, strict=False)) if one != other)
        trained = whole[next(differ, min(len(begun), len(whole))) :]
        own = [str(value) for turn in answers for key, value in turn.items() if key != "role"]
        if trained.count(last.strip()) > sum(value.count(last.strip()) for value in own):
            raise DataError(
                f"{name} row {number}: the chat template renders the prompt otherwise before its completion, and the "
                "prompt's last message would be trained",
                "leave the system message and earlier reasoning out of prompts of several turns, or train by a recipe "
                "(pronghorn train), whose turns are labelled each behind its own prompt",
            )


def check_answers(name: str, dataset: Dataset, tokenizer: Any) -> None:
    """Tell if the chat template writes no token behind the first row's last answer that ends it, or leaves out what the
    assistant thinks before it, in the first row with reasoning there."""
    columns = next(
        (each for each in (["messages"], ["prompt", "completion"]) if {*each} <= {*dataset.column_names}), []
    )
    tools, ended = "tools" in dataset.column_names, False
    for row in dataset.select(range(min(len(dataset), FIRST))) if columns else ():
        if not all(isinstance(row[column], list) for column in columns):
            return
        turns = [_given(turn) for column in columns for turn in row[column]]
        last = turns[-1] if turns else {}
        thought = _thought(last)
        if last.get("role") != "assistant" or (ended and not thought):
            continue
        try:
            more = {"tools": row["tools"]} if tools else {}
            written = str(tokenizer.apply_chat_template(turns, tokenize=False, **more)).rstrip()
        except Exception:  # a template is a program; TRL meets the same error
            return
        ends = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        if not ended and not written.endswith(tuple(ends)):
            warnings.warn(
                f"{name}: the chat template ends a conversation's last answer with none of the tokenizer's special "
                "tokens, and the model is not trained to stop: set tokenizer.chat_template to one that does",
                stacklevel=5,
            )
        if thought and thought not in written:
            warnings.warn(
                f"{name}: the chat template leaves out what the assistant thinks, and it is not trained: set "
                "tokenizer.chat_template to one that writes it",
                stacklevel=5,
            )
        ended = True
        if thought:
            return


def _thought(turn: dict[str, Any]) -> str:
    """Return what the assistant thinks before it speaks, in a field or in its text, "" for nothing."""
    fields = [turn[key] for key in REASONING if isinstance(turn.get(key), str)]
    written = THINK.match(turn["content"]) if isinstance(turn.get("content"), str) else None
    return next((each.strip() for each in [*fields, *(written.groups() if written else ())] if each.strip()), "")


def _given(turn: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in turn.items() if value is not None}


def check_parts(name: str, row: dict[str, Any], tokenizer: Any) -> None:
    """Refuse contents that are lists of parts, where the chat template leaves their text out or writes the list, and
    texts that it leaves out."""
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value if isinstance(turn, dict)]
    contents = [turn["content"] for turn in turns if turn.get("content") and "role" in turn]
    if not contents or not getattr(tokenizer, "chat_template", ""):
        return
    of_parts = any(isinstance(content, list) for content in contents)
    said = [{"type": "text", "text": "pronghorn"}] if of_parts else "pronghorn"
    try:
        written = tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False)
    except Exception:  # a template is a program; TRL meets the same error at the first row
        return
    if not of_parts:
        if "pronghorn" not in written:
            raise DataError(
                f"{name}: contents are texts, and the chat template leaves them out",
                'make them parts by dataset.map: [{"type": "text", "text": message["content"]}]',
            )
        return
    lists = any(mark in written for mark in ("'type'", '"type"'))
    if lists or "pronghorn" not in written:
        raise DataError(
            f"{name}: contents are lists of parts, and the chat template "
            + ("writes such a list as it is" if lists else "leaves their text out"),
            'join the texts by dataset.map: "".join(part["text"] for part in message["content"])',
        )
