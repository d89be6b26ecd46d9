"""Messages of a script's data set that TRL would train as something else."""

from __future__ import annotations

from typing import Any

import pyarrow
import pyarrow.compute
from datasets import Dataset

from pronghorn.data.messages import REASONING
from pronghorn.errors import DataError


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


def check_calls(name: str, dataset: Dataset, tokenizer: Any) -> None:
    """Refuse tool calls that the chat template leaves out: empty answers would be trained."""
    if not getattr(tokenizer, "chat_template", None) or "messages" not in dataset.column_names:
        return
    for messages in dataset.select(range(min(len(dataset), 1000)))["messages"]:
        turns = [{key: value for key, value in turn.items() if value is not None} for turn in messages or () if turn]
        calls = [call for turn in turns for call in turn.get("tool_calls", ())]
        names = [(call.get("function") or call).get("name") for call in calls if isinstance(call, dict)]
        if not names or not isinstance(names[0], str):
            continue
        try:
            written = tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # a template is a program; TRL meets the same error
            return
        if names[0] not in written:
            raise DataError(
                f"{name}: the chat template leaves the tool call {names[0]!r} out, and empty answers would be trained",
                "use a model whose template renders tools, or pronghorn.chat_templates.get_chat_template(tokenizer, "
                '"qwen-2.5")',
            )
        return


def check_parts(name: str, row: dict[str, Any], tokenizer: Any) -> None:
    """Refuse contents that are lists of parts, where the chat template leaves their text out or writes the list."""
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value if isinstance(turn, dict)]
    if not any(isinstance(turn.get("content"), list) for turn in turns) or not getattr(tokenizer, "chat_template", ""):
        return
    try:
        parts = [{"type": "text", "text": "pronghorn"}]
        written = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    except Exception:  # a template is a program; TRL meets the same error at the first row
        return
    lists = any(mark in written for mark in ("'type'", '"type"'))
    if lists or "pronghorn" not in written:
        raise DataError(
            f"{name}: contents are lists of parts, and the chat template "
            + ("writes such a list as it is" if lists else "leaves their text out"),
            'join the texts by dataset.map: "".join(part["text"] for part in message["content"])',
        )
