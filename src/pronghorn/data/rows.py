"""What a row of training data is once it is read: one frozen class a kind, each knowing where it was read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from pronghorn.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
OnBad = Callable[[DataError], None]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is one of ROLES.

    `extra` holds what templates know besides: `tool_calls` (a list of {"type": "function", "function": {"name": str,
    "arguments": dict}}, with "id" where the data has one), `name`, `tool_call_id`, and `reasoning_content`, what the
    assistant thinks before it speaks. `supervised` is False for an assistant's turn that the data excepts.
    """

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    supervised: bool = True

    @property
    def reasoning(self) -> str:
        """Return what the assistant thinks before it speaks, "" for nothing."""
        return str(self.extra.get("reasoning_content", ""))

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a chat template gets it; gpt-oss's knows the reasoning by another name."""
        thinking = {"thinking": self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **self.extra, **thinking}


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


@dataclass(frozen=True, slots=True)
class PromptCompletion(_Row):
    """A prompt and its completion, which is supervised."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class TextDocument(_Row):
    """A text that is supervised whole."""

    text: str


Row = Conversation | PromptCompletion | TextDocument
"""What supervised fine-tuning trains on."""


def where(path: str | PurePath, line: int) -> str:
    """Return how errors name a row: "train.jsonl line 3", or "train.json row 3" where rows are no lines."""
    unit = "line" if str(path).endswith((".jsonl", ".txt")) else "row"
    return f"{path} {unit} {line}"


def texts_of(value: Any) -> Iterator[str]:
    """Yield every string in a value of JSON, the keys of its objects too, each as it is: written as JSON, a token with
    quotes in it (Gemma 4's <|"|>) would be another text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_of([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)


@contextmanager
def dropping(on_bad: OnBad | None) -> Iterator[None]:
    """Give a DataError of the block to `on_bad` instead of raising it; None raises it."""
    try:
        yield
    except DataError as error:
        if on_bad is None:
            raise
        on_bad(error)


def in_chunks(rows: Iterable[Row], most: int, characters: int) -> Iterator[list[Row]]:
    """Yield consecutive rows in lists of at most `most`; a list ends with the row that brings it to so many
    `characters`."""
    chunk: list[Row] = []
    length = 0
    for row in rows:
        chunk.append(row)
        if isinstance(row, Conversation):
            length += sum(len(message.content) for message in row.messages)
        else:
            length += len(row.text) if isinstance(row, TextDocument) else len(row.prompt) + len(row.completion)
        if len(chunk) == most or length >= characters:
            yield chunk
            chunk, length = [], 0
    if chunk:
        yield chunk
