"""Reading training rows: `.jsonl` (an object a line) and `.json` (a list of objects), as written, nothing tokenised.

Three formats, told apart by their keys, one format a file:

    {"messages": [{"role": "system" | "user" | "assistant", "content": str}, ...]}   → Conversation
    {"prompt": str, "completion": str}                                               → PromptCompletion
    {"text": str}                                                                    → TextDocument

`columns` renames ({"prompt": "question", "completion": "answer"}); the columns that it doesn't name are then ignored.
Without it a key too many is an error: columns like "label" or "rejected" change what the others mean.

A new format is one more row class, its keys in `FORMATS` and its reader in `_READERS`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.errors import DataError

ROLES = ("system", "user", "assistant")
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
ACCEPTED = '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}'


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is one of ROLES."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    path: str
    line: int

    @property
    def source(self) -> str:
        """Where the row was read: "train.jsonl line 3"."""
        return f"{self.path} line {self.line}"


@dataclass(frozen=True, slots=True)
class Conversation(_Row):
    """A chat: at most one system message, first, and then turns of which the first is the user's."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PromptCompletion(_Row):
    """A prompt and the completion to learn."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class TextDocument(_Row):
    """A text that is learned whole."""

    text: str


Row = Conversation | PromptCompletion | TextDocument


def read_rows(path: str | Path, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Reads every row of a `.jsonl` or `.json` file (UTF-8), in the file's order.

    `columns` maps this library's keys to the file's: {"prompt": "question", "completion": "answer"}.

    Raises DataError, naming file and line, for a missing or empty file, bytes that aren't UTF-8, malformed JSON, keys
    that are no known format, two formats in one file, a wrong role, a value that isn't a string, and nothing to learn
    (an empty completion, assistant message or text).
    """
    path = Path(path)
    columns = dict(columns or {})
    wanted = _format_of(columns) if columns else None
    if not path.is_file():
        raise DataError(f"{path}: no such file", "mend data.train or data.eval; paths start at the current directory")
    rows: list[Row] = []
    found_at = 0
    for line, value in _objects(path):
        where = f"{path} line {line}"
        found = _recognise(value, wanted, columns, where)
        if wanted is None:
            wanted, found_at = found, line
        elif found != wanted:
            raise DataError(
                f"{where}: a row with {_keys(FORMATS[found])}, but line {found_at} has {_keys(FORMATS[wanted])}",
                "keep one format a file: split it in two",
            )
        fields = {name: value[columns.get(name, name)] for name in FORMATS[found]}
        rows.append(_READERS[found](fields, path, line))
    if not rows:
        raise DataError(f"{path}: no rows in it", f"give a file with at least one row: {ACCEPTED}")
    return rows


def _format_of(columns: Mapping[str, str]) -> str:
    for name, keys in FORMATS.items():
        if set(columns) <= set(keys):
            return name
    raise DataError(
        f"data.columns renames {_keys(columns)}, which belong to no one format",
        f"rename keys of one format: {ACCEPTED}",
    )


def _recognise(value: Any, wanted: str | None, columns: Mapping[str, str], where: str) -> str:
    if not isinstance(value, dict):
        raise DataError(f"{where}: {type(value).__name__} instead of an object", f"write each row as {ACCEPTED}")
    if columns and wanted is not None:
        needed = [columns.get(name, name) for name in FORMATS[wanted]]
        missing = [key for key in needed if key not in value]
        if missing:
            raise DataError(
                f"{where}: no {_keys(missing)} among its keys {_keys(value)}",
                "mend data.columns (our key: the file's key) or the row",
            )
        return wanted
    for name, keys in FORMATS.items():
        if set(keys) == set(value):
            return name
    near = next((keys for keys in FORMATS.values() if set(keys) < set(value)), None)
    if near is not None:
        extra = [key for key in value if key not in near]
        same = ", ".join(f"{key}: {key}" for key in near)
        raise DataError(
            f"{where}: keys {_keys(extra)} beside {_keys(near)}",
            f"delete them, or set data.columns to {{{same}}} to ignore every other key",
        )
    raise DataError(
        f"{where}: keys {_keys(value)} are no known format",
        f"write each row as {ACCEPTED}, or name the columns in data.columns",
    )


def _conversation(fields: dict[str, Any], path: Path, line: int) -> Conversation:
    where = f"{path} line {line}"
    items = fields["messages"]
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: messages is {_show(items)}", "give a list of at least one message")
    messages: list[Message] = []
    for number, item in enumerate(items, 1):
        at = f"{where} message {number}"
        if not isinstance(item, dict) or set(item) != {"role", "content"}:
            found = f"keys {_keys(item)}" if isinstance(item, dict) else _show(item)
            raise DataError(f"{at}: {found}", 'write a message as {"role": ..., "content": ...}')
        role, content = item["role"], _string(item["content"], "content", at)
        if role not in ROLES:
            raise DataError(f"{at}: role {_show(role)}", f"use one of {', '.join(ROLES)}")
        if role == "system" and messages:
            raise DataError(f"{at}: a system message that is not the first", "move it to the front")
        if role == "assistant" and (not messages or messages[-1].role == "system"):
            raise DataError(f"{at}: an assistant message with no user message before it", "start with the user's turn")
        if role == "assistant":
            _not_empty(content, "assistant message", at)
        messages.append(Message(role, content))
    return Conversation(tuple(messages), path=str(path), line=line)


def _prompt_completion(fields: dict[str, Any], path: Path, line: int) -> PromptCompletion:
    where = f"{path} line {line}"
    prompt, completion = (_string(fields[name], name, where) for name in ("prompt", "completion"))
    return PromptCompletion(prompt, _not_empty(completion, "completion", where), path=str(path), line=line)


def _text(fields: dict[str, Any], path: Path, line: int) -> TextDocument:
    where = f"{path} line {line}"
    return TextDocument(_not_empty(_string(fields["text"], "text", where), "text", where), path=str(path), line=line)


_READERS: dict[str, Callable[[dict[str, Any], Path, int], Row]] = {
    "messages": _conversation,
    "prompt": _prompt_completion,
    "text": _text,
}


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (line number from 1, parsed value) for each row of the file; blank lines are skipped."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:  # lines end at \n only: U+2028 and the like are text
            for line, raw in enumerate(file, 1):
                text = _decode(raw, path, line)
                if text.strip():
                    yield line, _parse(text, path, line)
    elif path.suffix == ".json":
        raw = path.read_bytes()
        text = _decode(raw, path, 1)
        if text.strip():
            yield from _list_items(text, path)
    else:
        raise DataError(f"{path}: unknown file type {path.suffix or '(no suffix)'}", "give a .jsonl or .json file")


def _list_items(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """The items of a JSON list with the lines that they start on, which `json.loads` would not tell."""
    values = _parse(text, path, 1)  # the whole text first: a malformed tail is found before any row is used
    if not isinstance(values, list):
        raise DataError(f"{path}: {type(values).__name__} instead of a list", f"write a list of {ACCEPTED}")
    scan = json.JSONDecoder().raw_decode
    position, counted, line = text.index("[") + 1, 0, 1
    for _ in values:
        while text[position] in " \t\r\n,":
            position += 1
        line += text.count("\n", counted, position)
        counted = position
        value, position = scan(text, position)
        yield line, value


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path} line {line}: byte 0x{raw[error.start]:02x} is not UTF-8 ({error.reason})", "save the file as UTF-8"
        ) from error


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} line {line + error.lineno - 1}: not valid JSON ({error.msg}, column {error.colno})",
            "mend or delete that line",
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of nested brackets
        raise DataError(f"{path} line {line}: JSON that can't be read ({error})", "mend or delete it") from error


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {_show(value)}, not a string", f"give {name} as a string")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{where}: {name} holds half a surrogate pair, which is no text", "mend its \\u escapes")
    return value


def _not_empty(value: str, name: str, where: str) -> str:
    if not value.strip():
        raise DataError(f"{where}: an empty {name}", "fill it in or delete the row")
    return value


def _keys(keys: Any) -> str:
    return ", ".join(map(repr, keys)) or "(none)"


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
