"""Recognise the format of rows by their keys, and read a row of each.

    messages            {"messages": [{"role", "content", ...}], "tools"?}                 → Conversation
    sharegpt            {"conversations": [{"from", "value"}], "system"?, "tools"?}        → Conversation
    alpaca              {"instruction", "output", "input"?, "system"?, "history"?}         → Conversation
    prompt_completion   {"prompt", "completion"}: two texts                                → PromptCompletion
                        or two lists of messages, of which the second is supervised, "tools"?  → Conversation
    text                {"text"}                                                           → TextDocument

Rows with {"chosen", "rejected"} are preference pairs, which supervised fine-tuning doesn't train on: refused as such.
A new format is one more line in `FORMATS` and its reader in `READERS`. A key that its format doesn't know is an error:
columns like "label" or "rejected" change what the others mean. Where `format` or `columns` names what to read, every
other key is ignored.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from pronghorn.config.sections import Format
from pronghorn.data.media import REMEDY, TEXT_ONLY, media_in
from pronghorn.data.messages import (
    in_order,
    keys,
    not_empty,
    openai_message,
    read_tools,
    read_turns,
    sharegpt_message,
    show,
    string,
)
from pronghorn.data.rows import (
    Conversation,
    Message,
    OnBad,
    PromptCompletion,
    Row,
    TextDocument,
    dropping,
    where,
)
from pronghorn.errors import DataError

FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # name: needed keys, optional keys
    "messages": (("messages",), ("tools", "functions")),
    "sharegpt": (("conversations",), ("system", "tools")),
    "alpaca": (("instruction", "output"), ("input", "system", "history")),
    "prompt_completion": (("prompt", "completion"), ("tools",)),
    "text": (("text",), ()),
}
PAIR = ("chosen", "rejected")
"""Keys of a preference pair."""
_JUDGED = ("label", "kto_tag")
"""TRL's and LLaMA-Factory's keys for whether an answer is good."""
SPELLINGS = {("instruction", "context", "response"): ("alpaca", {"input": "context", "output": "response"})}
"""Keys of well-known sets that are a format under other names (Dolly's): these keys, the format, its `columns`."""

PROVENANCE = frozenset({"id", "idx", "index", "category", "source", "", "Unnamed: 0", "__index_level_0__"})
"""Keys that say where a row comes from and don't change what the others mean: left aside; the last three are a pandas
index that was written, too."""

PROMPTS = ("question", "query", "instruction", "input", "prompt", "problem", "user", "human")
COMPLETIONS = ("answer", "response", "output", "completion", "solution", "assistant", "gpt")
"""Columns that are asked, and that answer, in sets of no known format."""
TEXTS = ("text", "content", "body", "document", "story")
"""Columns that are trained whole in sets of no known format."""
BESIDE = {"input": ("input", "context"), "system": ("system", "system_prompt", "system_message")}
"""Columns that belong to a question, by Alpaca's keys."""

ACCEPTED = (
    '{"messages": [...]}, {"prompt": ..., "completion": ...}, {"text": ...} or another of the formats of data.format'
)


class RowReader:
    """Turns values into rows, all of one format: the one that is named, or the first row's.

    Args:
        format: one of FORMATS, or "auto" for the first row's.
        columns: our keys to the file's: {"prompt": "question", "completion": "answer"}.
        on_bad: called with the error of each row that its format refuses, which is then left out; None raises it. Rows
            of another format, and lines that aren't JSON, are raised always.
    """

    def __init__(self, format: Format = "auto", columns: Mapping[str, str] | None = None, on_bad: OnBad | None = None):
        self.shape = Shape.named(format, columns or {})
        self._on_bad = on_bad
        self._first = ""

    def read(self, path: str, values: Iterable[tuple[int, Any]]) -> Iterator[Row]:
        """Yield the rows of one file (or hub set), in its order.

        Raises:
            DataError: no row, keys that are no known format, two formats in one source, preference pairs, a wrong role
                or order of roles, a value that isn't a string, nothing to supervise (an empty completion, assistant
                message or text).
        """
        any_value = any_row = False
        for line, value in values:
            any_value = True
            row = None
            if not isinstance(value, DataError):
                shape = self._shape_of(value, where(path, line))
            with dropping(self._on_bad):
                if isinstance(value, DataError):
                    raise value
                row = read_row(shape, value, path, line)
            if row is not None:
                any_row = True
                yield row
        if not any_row:
            what = "each of its rows was dropped" if any_value else "no rows in it"
            raise DataError(f"{path}: {what}", f"give a file with at least one row: {ACCEPTED}")

    def _shape_of(self, value: Any, at: str) -> "Shape":
        if not isinstance(value, dict):
            remedy = f"write each row as {ACCEPTED}"
            if isinstance(value, list) and at.endswith(".jsonl line 1"):
                remedy = "name the file .json: it is a list of rows"
            kind = "null" if value is None else type(value).__name__
            raise DataError(f"{at}: {kind} instead of an object", remedy)
        if self.shape is not None and self.shape.given:
            missing = [key for key in self.shape.needed if key not in value]
            if missing:
                raise DataError(
                    f"{at}: no {keys(missing)} among its keys {keys(value)}",
                    "fix data.format, data.columns (our key: the file's key) or the row",
                )
            return self.shape
        shape = recognise(value, at)
        if self.shape is None:
            self.shape, self._first = shape, at
        elif shape != self.shape:
            raise DataError(
                f"{at}: a row with {keys(shape.needed)}, but {self._first} has {keys(self.shape.needed)}",
                "keep one format a file or folder; others are sources of their own (data.train: [{path: ...}, ...])",
            )
        return shape


@dataclass(frozen=True, slots=True)
class Shape:
    """A format and the file's names for its keys; `given` where the user named either: other keys are then ignored."""

    name: str
    columns: Mapping[str, str]
    given: bool = False

    @classmethod
    def named(cls, format: str, columns: Mapping[str, str]) -> "Shape | None":
        """Return what the user's settings say, None where the rows must.

        Raises:
            DataError: columns of no one format.
        """
        if format == "auto" and not columns:
            return None
        if twice := next((name for name in columns.values() if list(columns.values()).count(name) > 1), None):
            raise DataError(f"data.columns reads {twice!r} as two keys", "name a column of the file for each")
        names = FORMATS if format == "auto" else (format,)
        for name in names:
            if set(columns) <= _all_keys(name):
                return cls(name, columns, given=True)
        possible = sorted(set().union(*map(_all_keys, names)))
        turned = {value: key for key, value in columns.items()}
        if any(set(turned) <= _all_keys(name) for name in names):
            written = ", ".join(f"{key}: {_quoted(value)}" for key, value in turned.items())
            raise DataError(
                f"data.columns renames {keys(columns)}, but the file's keys stand last",
                f"write data.columns: {{{written}}}",
            )
        for column in columns:
            if column not in possible and (near := get_close_matches(column, possible, n=1)):
                raise DataError(f"data.columns renames {column!r}, which is not a key", f"did you mean {near[0]!r}?")
        what, which = "belong to no one format", ""
        if format != "auto":
            what, which = f"are not all keys of data.format {format}", f" ({keys(sum(FORMATS[format], ()))})"
        raise DataError(f"data.columns renames {keys(columns)}, which {what}", f"rename keys of one format{which}")

    @property
    def needed(self) -> list[str]:
        """The file's names of the keys that each row must have: the format's, and every one that `columns` names."""
        return [self.columns.get(name, name) for name in dict.fromkeys((*FORMATS[self.name][0], *self.columns))]


def _all_keys(format: str) -> set[str]:
    needed, optional = FORMATS[format]
    return {*needed, *optional}


def recognise(value: Mapping[str, Any], at: str) -> Shape:
    """Return the format that a row's keys are.

    Raises:
        DataError: they are none, one too many may change the meaning, or they are those of a preference pair.
    """
    names = {key for key in value if key not in PROVENANCE}
    if names.issuperset(PAIR):
        raise DataError(
            f"{at}: a preference pair, and supervised fine-tuning would not know its rejected side",
            "train on pairs by TRL's DPOTrainer (pronghorn docs preference-training), or write the chosen answers "
            "as conversations",
        )
    for spelling, (name, columns) in SPELLINGS.items():
        if names == set(spelling):
            return Shape(name, columns)
    near = [name for name, (needed, _) in FORMATS.items() if names.issuperset(needed)]
    for name in near:
        if names <= _all_keys(name):
            return _by_turns(name, value)
    if near:
        extra = [key for key in value if key in names - _all_keys(near[0])]
        if media := media_in(extra):
            raise DataError(f"{at}: {keys(media)} beside {keys(FORMATS[near[0]][0])}: {TEXT_ONLY}", REMEDY)
        remedy = f"delete them, or set data.format to {' or '.join(near)} to ignore every other key"
        if near[0] == "messages" and "system" in extra:
            remedy = 'put it first among the messages: {"role": "system", "content": …}'
        elif judged := next((key for key in extra if key in _JUDGED and isinstance(value[key], bool)), None):
            remedy += f"; of KTO's rows keep those whose {judged} is true, or use TRL's KTOTrainer (pronghorn docs "
            remedy += "preference-training)"
        elif near[0] in ("alpaca", "prompt_completion") and (likely := likely_columns(value)):
            remedy = f"set {_columns(value, likely)}" if {*extra} & {*beside(value, likely).values()} else remedy
        raise DataError(f"{at}: keys {keys(extra)} beside {keys(FORMATS[near[0]][0])}", remedy)
    remedy = f"write each row as {ACCEPTED}, or name the columns in data.columns"
    if likely := likely_columns(value):
        remedy = f"set {_columns(value, likely)}"
    for ours, key in turns_column(value).items():
        remedy = f"set data.columns: {{{ours}: {_quoted(key)}}}"
    if at.endswith(".csv row 1"):
        remedy += "; a .csv file's first line names its columns"
    raise DataError(f"{at}: keys {keys(value)} are no known format", remedy)


def likely_columns(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Return which keys of a row seem to be a prompt and its answer, or a text: ours to the row's; None where none."""
    keys_of = {key.lower().strip(): key for key in row}
    prompt, answer = (next((name for name in names if name in keys_of), None) for names in (PROMPTS, COMPLETIONS))
    if prompt and answer:
        return {"prompt": keys_of[prompt], "completion": keys_of[answer]}
    text = next((name for name in TEXTS if name in keys_of), None)
    return {"text": keys_of[text]} if text and len(row.keys() - PROVENANCE) == 1 else None


def turns_column(row: Mapping[str, Any]) -> dict[str, str]:
    """Return which key of a row holds a conversation's turns: ours to the row's; {} where none does."""
    for key, turns in row.items():
        first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
        for part, ours in (("role", "messages"), ("from", "conversations")):
            if part in first:
                return {ours: key}
    return {}


def beside(row: Mapping[str, Any], columns: Mapping[str, str] | None) -> dict[str, str]:
    """Return the row's keys that belong to a question and are not among its `likely_columns`: Alpaca's to the row's."""
    if not columns or "prompt" not in columns:
        return {}
    left = {key.lower().strip(): key for key in row if key not in columns.values()}
    found = {ours: next((left[name] for name in names if name in left), None) for ours, names in BESIDE.items()}
    return {ours: key for ours, key in found.items() if key is not None}


def columns_to_write(row: Mapping[str, Any], likely: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return data.columns for rows whose `likely_columns` are these, and the keys that nothing reads then.

    A question with its context or a system message is a row of Alpaca's, so that both are trained behind.
    """
    more = beside(row, likely)
    # rows may lack what Alpaca's may lack, unless it is named
    named = {ours: key for ours, key in more.items() if ours != key}
    columns = {"instruction": likely["prompt"], "output": likely["completion"], **named} if more else dict(likely)
    read = {*likely.values(), *more.values()}
    return columns, [key for key in row if key not in read | PROVENANCE]


def _columns(row: Mapping[str, Any], likely: Mapping[str, str]) -> str:
    """Return the line of a recipe that names the columns, and what is left out by it."""
    columns, unread = columns_to_write(row, likely)
    written = ", ".join(f"{name}: {_quoted(key)}" for name, key in columns.items())
    return f"data.columns: {{{written}}}" + (f", which leaves {keys(unread)} out" if unread else "")


def _quoted(key: str) -> str:
    """Return a key as YAML takes it as it is: a number or a truth value in quotes."""
    plain = re.fullmatch(r"(?!(?i:true|false|yes|no|on|off|null)$)[^\W\d][\w-]*", key)
    return key if plain else "'{}'".format(key.replace("'", "''"))


def _by_turns(name: str, value: Mapping[str, Any]) -> Shape:
    """Return the format that the turns' own keys say, where the list has the other format's name."""
    other, column, key = {
        "sharegpt": ("messages", "conversations", "role"),
        "messages": ("sharegpt", "messages", "from"),
    }.get(name, ("", "", ""))
    turns = value.get(column)
    if other and isinstance(turns, list) and turns and isinstance(turns[0], dict) and key in turns[0]:
        [own], _ = FORMATS[other]
        if value.keys() - PROVENANCE - {column} <= _all_keys(other):
            return Shape(other, {own: column})
    return Shape(name, {})


def read_row(shape: Shape, value: Mapping[str, Any], path: str, line: int) -> Row:
    """Read a row of a known format: its values under our names, optional ones only where the row has them.

    Raises:
        DataError: whatever in it can't be trained on.
    """
    taken = {column for name, column in shape.columns.items() if name != column}  # read under another name
    names = [name for name in _all_keys(shape.name) if name in shape.columns or name not in taken]
    columns = {name: shape.columns.get(name, name) for name in names}
    fields = {name: value[column] for name, column in columns.items() if column in value}
    return READERS[shape.name](fields, where(path, line), path=path, line=line)


def _messages(fields: dict[str, Any], at: str, **place: Any) -> Conversation:
    turns = read_turns(openai_message, fields["messages"], "messages", at)
    tools = fields.get("tools") or fields.get("functions")
    return Conversation(in_order(turns, at), read_tools(tools, at), **place)


def _sharegpt(fields: dict[str, Any], at: str, **place: Any) -> Conversation:
    turns = read_turns(sharegpt_message, fields["conversations"], "conversations", at)
    system = _system(fields, at)
    if system and turns[0].role == "system":
        raise DataError(f"{at}: a system message in system, and one in conversations", "keep one of the two")
    messages = in_order([*system, *turns], at, first=1 - len(system))  # numbers are those of conversations
    return Conversation(messages, read_tools(fields.get("tools"), at), **place)


def _alpaca(fields: dict[str, Any], at: str, **place: Any) -> Conversation:
    messages = _system(fields, at)
    history = fields.get("history") or []
    remedy = "write each turn as [the user's text, the answer]"
    if not isinstance(history, list):
        raise DataError(f"{at}: history is {show(history)}, not a list", remedy)
    for number, pair in enumerate(history, 1):
        at_turn = f"{at} history {number}"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{at_turn}: {show(pair)}", remedy)
        question, answer = (string(text, "history", at_turn) for text in pair)
        messages += [Message("user", question), Message("assistant", not_empty(answer, "answer", at_turn))]
    messages += [_instruction(fields, at), Message("assistant", not_empty(fields["output"], "output", at))]
    return Conversation(in_order(messages, at), **place)


def _prompt_completion(fields: dict[str, Any], at: str, **place: Any) -> PromptCompletion | Conversation:
    if isinstance(fields["prompt"], list) or isinstance(fields["completion"], list):
        prompt_turns, completion = (
            read_turns(
                openai_message, [{"role": role, "content": value}] if isinstance(value, str) else value, name, at
            )
            for name, role, value in (
                ("prompt", "user", fields["prompt"]),
                ("completion", "assistant", fields["completion"]),
            )
        )
        context = [replace(message, supervised=message.role != "assistant") for message in prompt_turns]
        return Conversation(in_order([*context, *completion], at), read_tools(fields.get("tools"), at), **place)
    if fields.get("tools"):
        raise DataError(f"{at}: tools beside a prompt that is a text", "write prompt and completion as messages")
    prompt = string(fields["prompt"], "prompt", at)
    return PromptCompletion(prompt, not_empty(fields["completion"], "completion", at), **place)


def _text(fields: dict[str, Any], at: str, **place: Any) -> TextDocument:
    return TextDocument(not_empty(fields["text"], "text", at), **place)


def _system(fields: Mapping[str, Any], at: str) -> list[Message]:
    text = fields.get("system")
    return [Message("system", string(text, "system", at))] if text not in (None, "") else []


def _instruction(fields: Mapping[str, Any], at: str) -> Message:
    """Read Alpaca's instruction and input as one user's message, joined by a line's end."""
    given = "" if fields.get("input") is None else string(fields["input"], "input", at)
    parts = [string(fields["instruction"], "instruction", at), given]
    return Message("user", not_empty("\n".join(filter(None, parts)), "instruction", at))


READERS: dict[str, Callable[..., Row]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "text": _text,
}
