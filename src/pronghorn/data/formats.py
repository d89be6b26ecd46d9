"""The formats of rows: how each is recognised by its keys, and how a row of it is read.

    messages            {"messages": [{"role", "content", ...}], "tools"?}                 → Conversation
    sharegpt            {"conversations": [{"from", "value"}], "system"?, "tools"?}        → Conversation
    alpaca              {"instruction", "output", "input"?, "system"?, "history"?}         → Conversation
    prompt_completion   {"prompt", "completion"}                                           → PromptCompletion
    text                {"text"}                                                           → TextDocument
    preference          {"chosen", "rejected"} and a prompt in one of the ways above       → Preference

A new format is one more line in `FORMATS` and its reader in `READERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pronghorn.data.messages import in_order, openai_message, sharegpt_message, tools
from pronghorn.data.row_types import Conversation, Message, Preference, PromptCompletion, Row, TextDocument, where
from pronghorn.data.values import keys, not_empty, show, string
from pronghorn.errors import DataError

FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # name: needed keys, optional keys
    "messages": (("messages",), ("tools",)),
    "sharegpt": (("conversations",), ("system", "tools")),
    "alpaca": (("instruction", "output"), ("input", "system", "history")),
    "prompt_completion": (("prompt", "completion"), ()),
    "text": (("text",), ()),
    "preference": (
        ("chosen", "rejected"),
        ("prompt", "messages", "conversations", "instruction", "input", "output", "system", "tools"),
    ),
}
SPELLINGS = {("instruction", "context", "response"): ("alpaca", {"input": "context", "output": "response"})}
"""Keys of well-known sets that are a format under other names (Dolly's): these keys, the format, its `columns`."""

PROVENANCE = frozenset({"id", "idx", "index", "category", "source"})
"""Keys that say where a row comes from and don't change what the others mean: left aside."""

ACCEPTED = (
    '{"messages": [...]}, {"prompt": ..., "completion": ...}, {"text": ...} or another of the formats of data.format'
)
ALPACA_JOIN = "\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """A format and the file's names for its keys; `given` where the user named either: other keys are then ignored."""

    name: str
    columns: Mapping[str, str]
    given: bool = False

    @classmethod
    def named(cls, format: str, columns: Mapping[str, str]) -> "Shape | None":
        """What the user's settings say, None where the rows must; DataError for columns of no one format."""
        if format == "auto" and not columns:
            return None
        for name in FORMATS if format == "auto" else (format,):
            needed, optional = FORMATS[name]
            if set(columns) <= {*needed, *optional}:
                return cls(name, columns, given=True)
        all_names = {name for needed, optional in FORMATS.values() for name in (*needed, *optional)}
        names = all_names if format == "auto" else {*FORMATS[format][0], *FORMATS[format][1]}
        for name in columns:
            if name not in names and (near := get_close_matches(name, sorted(names), n=1)):
                raise DataError(f"data.columns renames {name!r}, which is no key", f"did you mean {near[0]!r}?")
        what = "belong to no one format" if format == "auto" else f"are not all keys of data.format {format}"
        known = "" if format == "auto" else f" ({keys((*FORMATS[format][0], *FORMATS[format][1]))})"
        raise DataError(f"data.columns renames {keys(columns)}, which {what}", f"rename keys of one format{known}")

    @property
    def needed(self) -> list[str]:
        """The file's names of the keys that each row must have: the format's, and every one that `columns` names."""
        return [self.columns.get(name, name) for name in dict.fromkeys((*FORMATS[self.name][0], *self.columns))]

    def fields(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """The row's values under our names; optional ones only where the row has them."""
        names = {name: self.columns.get(name, name) for name in (*FORMATS[self.name][0], *FORMATS[self.name][1])}
        return {name: value[key] for name, key in names.items() if key in value}

    def check(self, value: Mapping[str, Any], at: str) -> None:
        """Raises DataError where a needed key, or one that `columns` names, is missing."""
        missing = [key for key in self.needed if key not in value]
        if missing:
            raise DataError(
                f"{at}: no {keys(missing)} among its keys {keys(value)}",
                "mend data.format, data.columns (our key: the file's key) or the row",
            )


def recognise(value: Mapping[str, Any], at: str) -> Shape:
    """The format that a row's keys are; DataError where they are none, or one too many may change the meaning."""
    found = {key for key in value if key not in PROVENANCE}
    for spelling, (name, columns) in SPELLINGS.items():
        if found == set(spelling):
            return Shape(name, columns)
    near = [name for name, (needed, _) in FORMATS.items() if set(needed) <= found]
    for name in near:
        if found <= {*FORMATS[name][0], *FORMATS[name][1]}:
            return Shape(name, {})
    if near:
        needed, optional = FORMATS[near[0]]
        extra = [key for key in value if key in found - {*needed, *optional}]
        raise DataError(
            f"{at}: keys {keys(extra)} beside {keys(needed)}",
            f"delete them, or set data.format to {' or '.join(near)} to ignore every other key",
        )
    raise DataError(
        f"{at}: keys {keys(value)} are no known format",
        f"write each row as {ACCEPTED}, or name the columns in data.columns",
    )


def read_row(shape: Shape, value: Mapping[str, Any], path: str, line: int) -> Row | Preference:
    """A row of a known format; DataError for whatever in it can't be trained on."""
    return READERS[shape.name](shape.fields(value), path, line)


def _turns(read: Callable[[Any, str], Message], items: Any, name: str, at: str) -> list[Message]:
    if not isinstance(items, list) or not items:
        raise DataError(f"{at}: {name} is {show(items)}", "give a list of at least one message")
    return [read(item, f"{at} message {number}") for number, item in enumerate(items, 1)]


def _system(fields: Mapping[str, Any], at: str) -> list[Message]:
    text = fields.get("system")
    return [Message("system", string(text, "system", at))] if text not in (None, "") else []


def _messages(fields: dict[str, Any], path: str, line: int) -> Conversation:
    at = where(path, line)
    messages = in_order(_turns(openai_message, fields["messages"], "messages", at), at)
    return Conversation(messages, tools(fields.get("tools"), at), path=path, line=line)


def _sharegpt(fields: dict[str, Any], path: str, line: int) -> Conversation:
    at = where(path, line)
    messages = [*_system(fields, at), *_turns(sharegpt_message, fields["conversations"], "conversations", at)]
    return Conversation(in_order(messages, at), tools(fields.get("tools"), at), path=path, line=line)


def _alpaca_prompt(fields: Mapping[str, Any], at: str) -> str:
    """Instruction and input as one user's text, joined by a line's end."""
    parts = [string(fields["instruction"], "instruction", at)]
    if fields.get("input") is not None:
        parts.append(string(fields["input"], "input", at))
    return not_empty(ALPACA_JOIN.join(part for part in parts if part), "instruction", at)


def _alpaca(fields: dict[str, Any], path: str, line: int) -> Conversation:
    at = where(path, line)
    messages = _system(fields, at)
    history = fields.get("history") or []
    if not isinstance(history, list):
        raise DataError(
            f"{at}: history is {show(history)}, not a list", "write each turn as [the user's text, the answer]"
        )
    for number, pair in enumerate(history, 1):
        here = f"{at} history {number}"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{here}: {show(pair)}", "write each as [the user's text, the answer]")
        asked, answered = (string(text, "history", here) for text in pair)
        messages += [Message("user", asked), Message("assistant", not_empty(answered, "answer", here))]
    output = not_empty(string(fields["output"], "output", at), "output", at)
    messages += [Message("user", _alpaca_prompt(fields, at)), Message("assistant", output)]
    return Conversation(in_order(messages, at), path=path, line=line)


def _prompt_completion(fields: dict[str, Any], path: str, line: int) -> PromptCompletion:
    at = where(path, line)
    prompt, completion = (string(fields[name], name, at) for name in ("prompt", "completion"))
    return PromptCompletion(prompt, not_empty(completion, "completion", at), path=path, line=line)


def _text(fields: dict[str, Any], path: str, line: int) -> TextDocument:
    at = where(path, line)
    return TextDocument(not_empty(string(fields["text"], "text", at), "text", at), path=path, line=line)


def _preference(fields: dict[str, Any], path: str, line: int) -> Preference:
    at = where(path, line)
    contexts, answers = [], {}
    asked = _preference_prompt(fields, at)
    for side in ("chosen", "rejected"):
        context, answers[side] = _answer(fields[side], side, at)
        contexts.append(context or asked)
        if asked and context not in ([], asked):
            raise DataError(f"{at}: {side} repeats a prompt other than the row's", "delete one of the two prompts")
    if contexts[0] != contexts[1]:
        raise DataError(f"{at}: chosen and rejected answer different prompts", "write one prompt for both")
    prompt = contexts[0]
    if not prompt or prompt[-1].role not in ("user", "tool"):
        found = f"ends with a message of role {prompt[-1].role}" if prompt else "is missing"
        raise DataError(f"{at}: the prompt of the pair {found}", "end the prompt with the user's turn")
    if answers["chosen"] == answers["rejected"]:
        raise DataError(
            f"{at}: chosen and rejected are equal ({show(answers['chosen'].content)})",
            "delete the row, or set data.bad_rows to drop",
        )
    for side, answer in answers.items():
        in_order([*prompt, answer], f"{at} prompt and {side}")
    tool_list = tools(fields.get("tools"), at)
    return Preference(tuple(prompt), answers["chosen"], answers["rejected"], tool_list, path=path, line=line)


def _preference_prompt(fields: Mapping[str, Any], at: str) -> list[Message]:
    """The prompt by whichever one key the row has it; [] where chosen and rejected repeat it."""
    ways = [name for name in ("messages", "conversations", "instruction", "prompt") if fields.get(name) is not None]
    if len(ways) > 1:
        raise DataError(f"{at}: a pair with {keys(ways)}, each of which is a prompt", "keep one of them")
    system = _system(fields, at)
    if not ways:
        return system
    way, value = ways[0], fields[ways[0]]
    if way == "instruction":
        return [*system, Message("user", _alpaca_prompt(fields, at))]
    if way == "prompt" and isinstance(value, str):
        return [*system, Message("user", not_empty(string(value, "prompt", at), "prompt", at))]
    return [*system, *_turns(sharegpt_message if way == "conversations" else openai_message, value, way, at)]


def _answer(value: Any, side: str, at: str) -> tuple[list[Message], Message]:
    """One side of a pair, a string, a message or a conversation that ends with it: (what comes before, the answer)."""
    if isinstance(value, str):
        messages = [Message("assistant", string(value, side, at))]
    else:
        items = value if isinstance(value, list) else [value]
        sharegpt = bool(items) and isinstance(items[-1], dict) and "from" in items[-1]
        messages = _turns(sharegpt_message if sharegpt else openai_message, items, side, f"{at} {side}")
    answer = messages[-1]
    if answer.role != "assistant":
        raise DataError(f"{at}: {side} ends with a message of role {answer.role}", "end it with the assistant's answer")
    if "tool_calls" not in answer.extra:
        not_empty(answer.content, f"{side} answer", at)
    return messages[:-1], answer


READERS: dict[str, Callable[[dict[str, Any], str, int], Row | Preference]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "text": _text,
    "preference": _preference,
}
