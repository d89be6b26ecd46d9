"""What a row of training data is once it is read: one frozen class a kind, each knowing where it was read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


def where(path: str | PurePath, line: int) -> str:
    """How errors name a row: "train.jsonl line 3"; "train.parquet row 3" where a file or a hub set has no lines."""
    unit = "line" if str(path).endswith((".jsonl", ".json", ".txt")) else "row"
    return f"{path} {unit} {line}"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is one of ROLES.

    `extra` holds what templates know besides: `tool_calls` (a list of {"type": "function", "function": {"name": str,
    "arguments": dict}}, with "id" where the data has one), `name`, `tool_call_id`.
    """

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_dict(self) -> dict[str, Any]:
        """The message as a chat template gets it."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    path: str
    line: int

    @property
    def source(self) -> str:
        """Where the row was read: "train.jsonl line 3"."""
        return where(self.path, self.line)


@dataclass(frozen=True, slots=True)
class Conversation(_Row):
    """A chat: at most one system message, first, and then turns of which the first is the user's.

    `tools` are the functions that it may call, each {"type": "function", "function": {"name": str, ...}}.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)

    @property
    def characters(self) -> int:
        """About how long the row's text is."""
        return sum(len(message.content) for message in self.messages)


@dataclass(frozen=True, slots=True)
class PromptCompletion(_Row):
    """A prompt and the completion to learn."""

    prompt: str
    completion: str

    @property
    def characters(self) -> int:
        """How long the row's text is."""
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True)
class TextDocument(_Row):
    """A text that is learned whole."""

    text: str

    @property
    def characters(self) -> int:
        """How long the row's text is."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Preference(_Row):
    """A conversation that ends with the user's (or a tool's) turn, and two different answers to it, one preferred."""

    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)


Row = Conversation | PromptCompletion | TextDocument
"""What supervised fine-tuning trains on; `Preference` is none of it."""
