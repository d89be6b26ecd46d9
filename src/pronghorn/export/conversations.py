"""The conversations that a served or exported model must render to the same token ids: tools, turns, thinking, letters.

They lie beside this file, a JSON object a line, in the format `messages` of training data and with a name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from pronghorn.data.messages import openai_message, read_tools
from pronghorn.data.rows import Conversation


class Named(NamedTuple):
    """A conversation that ends with a turn of the user or a tool, and the name that reports call it by."""

    name: str
    conversation: Conversation


def built_in() -> list[Named]:
    """Read the conversations. Roles aren't checked for order: what a template refuses is skipped where it is used."""
    path = Path(__file__).with_suffix(".jsonl")
    conversations = []
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(text)
        messages = tuple(openai_message(item, row["name"]) for item in row["messages"])
        tools = read_tools(row.get("tools"), row["name"])
        conversations.append(Named(row["name"], Conversation(messages, tools, path=path.name, line=line)))
    return conversations
