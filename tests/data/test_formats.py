"""Formats of rows and preference pairs: every data file there is, and what each format's rows become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.files import read_file
from pronghorn.data.formats import RowReader
from pronghorn.data.rows import Conversation, Message, TextDocument
from pronghorn.errors import DataError
from support.data_files import FILES, PAIRS, read_rows


@pytest.mark.parametrize(("file", "format", "columns", "name", "count", "kind"), FILES)
def test_every_data_file(
    file: str, format: Any, columns: dict[str, str], name: str, count: int, kind: type, shared: Path
) -> None:
    path, bad = shared / "data" / file, list[DataError]()
    reader = RowReader(format, columns, bad.append)
    rows = list(reader.read(str(path), read_file(path)))
    assert reader.shape is not None and reader.shape.name == name
    assert len(rows) == count and {type(row) for row in rows} == {kind}
    assert not bad


def test_every_data_file_is_in_the_table_or_no_data(shared: Path) -> None:
    data, named = shared / "data", {*PAIRS, *(file for file, *_ in FILES)}
    for path in sorted(data.rglob("*")):
        name = path.relative_to(data).as_posix()
        if path.suffix in (".json", ".jsonl") and name not in named:
            with pytest.raises(DataError, match=r"int instead of an object|dict instead of a list"):
                read_rows(path)


def test_values_of_the_data_files(shared: Path) -> None:
    folder = shared / "data"
    raw = json.loads((folder / "llamafactory/glaive_toolcall_en_demo.json").read_bytes())
    first, row = raw[0], read_rows(folder / "llamafactory/glaive_toolcall_en_demo.json")[0]
    assert isinstance(row, Conversation)
    assert [tool["function"] for tool in row.tools] == json.loads(first["tools"])
    call = row.messages[3].extra["tool_calls"]
    assert call == [{"type": "function", "function": json.loads(first["conversations"][3]["value"])}]
    assert [message.role for message in row.messages[:6]] == [
        "user", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert row.messages[4].content == first["conversations"][4]["value"]

    stories = read_rows(folder / "tinystories/tinystories_10k.txt")
    texts = (folder / "tinystories/tinystories_10k.txt").read_text().split("\n<|endoftext|>\n")
    assert [story.text for story in stories if isinstance(story, TextDocument)] == texts


ASKED, ANSWERED = Message("user", "Hi"), Message("assistant", "Hello")
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ADDED = (Message("user", "1?"), Message("assistant", "", {"tool_calls": [ADD]}), Message("tool", "1"))
TOOL = {"type": "function", "function": {"name": "add"}}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
SYSTEM = Message("system", "Be brief")
WHERE: Mapping[str, Any] = {"path": "", "line": 1}
OPENAI_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

ROWS: dict[str, tuple[dict[str, Any], tuple[Message, ...], tuple[dict[str, Any], ...]]] = {
    "openai tools": (
        {
            "messages": [
                {"role": "user", "content": "1?", "name": None},
                {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL], "weight": 1},
                {"role": "tool", "content": "1", "tool_call_id": "c1"},
            ],
            "tools": [TOOL],
        },
        (
            ADDED[0],
            Message("assistant", "", {"tool_calls": [{"id": "c1", **ADD}]}),
            Message("tool", "1", {"tool_call_id": "c1"}),
        ),
        (TOOL,),
    ),
    "content parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "value": "i"}]}]},
        (ASKED,),
        (),
    ),
    "sharegpt": (
        {"id": "x", "system": "Be brief", "conversations": [HUMAN, GPT], "tools": ""},
        (SYSTEM, ASKED, ANSWERED),
        (),
    ),
    "sharegpt weights": (
        {"conversations": [HUMAN | {"weight": 0.0}, GPT | {"weight": 1.0}, HUMAN | {"weight": None}]},
        (ASKED, ANSWERED, ASKED),
        (),
    ),
    "sharegpt calls": (
        {
            "conversations": [
                {"from": "human", "value": "1?"},
                {"from": "function_call", "value": '[{"name": "add", "arguments": {"a": 1}}]'},
                {"from": "observation", "value": "1"},
            ],
            "tools": '[{"name": "add"}]',
        },
        ADDED,
        (TOOL,),
    ),
    "alpaca": ({"instruction": "Add", "input": "1", "output": "Hello"}, (Message("user", "Add\n1"), ANSWERED), ()),
    "alpaca, all of it": (
        {"instruction": "Hi", "input": "", "output": "Hello", "system": "Be brief", "history": [["Hi", "Hello"]]},
        (SYSTEM, ASKED, ANSWERED, ASKED, ANSWERED),
        (),
    ),
    "dolly": (
        {"instruction": "Add", "context": "1", "response": "Hello", "category": "sums"},
        (Message("user", "Add\n1"), ANSWERED),
        (),
    ),
}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("value", "messages", "tools"), ROWS.values(), ids=ROWS)
def test_conversations(value: dict[str, Any], messages: Any, tools: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", value)
    assert read_rows(path) == [Conversation(messages, tools, path=str(path), line=1)]


def test_a_message_as_templates_get_it() -> None:
    assert ASKED.as_dict() == {"role": "user", "content": "Hi"}
    assert ADDED[1].as_dict() == {"role": "assistant", "content": "", "tool_calls": [ADD]}
    assert hash(ADDED[1]) == hash(Message("assistant", ""))


def test_a_named_format_ignores_other_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"text": "a", "prompt": "b", "completion": "c"})
    assert read_rows(path, format="text") == [TextDocument("a", path=str(path), line=1)]
    with pytest.raises(
        DataError, match=r"line 1: no 'instruction', 'output' among its keys 'text', .*fix data\.format"
    ):
        read_rows(path, format="alpaca")
    with pytest.raises(DataError, match=r"line 1: no 'question' among its keys"):  # a typo is not an absent input
        read_rows(write(path, {"instruction": "a", "output": "b"}), {"input": "question"})
    with pytest.raises(DataError, match=r"renames 'text', which are not all keys of data\.format alpaca: .*'instr"):
        read_rows(path, {"text": "prompt"}, format="alpaca")


OPENAI_USER = {"role": "user", "content": "Hi"}
BOTH = {"chosen": "Hello", "rejected": "Go away"}
PREFERENCES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "Hi"} | BOTH,
    "alpaca": {"instruction": "Hi", "input": "", "output": "ignored"} | BOTH,
    "sharegpt": {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "Go away"}},
    "messages": {"messages": [OPENAI_USER]} | BOTH,
    "prompt of messages": {"prompt": [OPENAI_USER]} | BOTH,
    "no prompt": BOTH,
    "prompt repeated": {"chosen": [HUMAN, GPT], "rejected": [HUMAN, GPT]},
    "prompt under another key": {"question": "Hi", "score": 1} | BOTH,
    "equal sides": {"chosen": "a", "rejected": "a"},
    "side null": {"chosen": None, "rejected": "a"},
}  # fmt: skip


@pytest.mark.parametrize("value", PREFERENCES.values(), ids=PREFERENCES)
@pytest.mark.parametrize("drop", [False, True])
def test_preference_pairs_are_refused_as_such_whatever_else_is_wrong(
    value: dict[str, Any], drop: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "pairs.jsonl", value)
    with pytest.raises(DataError, match=r"pairs\.jsonl line 1: a preference pair, .*train on pairs by TRL's DPOTr"):
        read_rows(path, on_bad=list[DataError]().append if drop else None)


def test_one_side_of_pairs_is_trained_where_columns_name_it(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", {"prompt": "Hi"} | BOTH)
    assert [row.completion for row in read_rows(path, {"completion": "chosen"})] == ["Hello"]  # type: ignore[union-attr]


@pytest.mark.parametrize("file", PAIRS)
def test_files_of_preference_pairs_are_refused_as_such(file: str, shared: Path) -> None:
    with pytest.raises(DataError, match="row 1: a preference pair"):
        read_rows(shared / "data" / file)


@pytest.mark.parametrize(
    ("row", "columns", "unread"),
    [
        (
            {"question": "Why?", "context": "Told.", "answer": "So."},
            "instruction: question, output: answer, input: context",
            "",
        ),
        (
            {"instruction": "Why?", "input": "Told.", "response": "So."},
            "instruction: instruction, output: response",
            "",
        ),
        (
            {"system_prompt": "Be brief.", "question": "Why?", "response": "So.", "id": 1},
            "instruction: question, output: response, system: system_prompt",
            "",
        ),
        ({"prompt": "Why?", "completion": "So.", "system": "Be brief."}, "instruction: prompt, output: completion", ""),
        (
            {"question": "Why?", "answer": "So.", "cot": "Hm."},
            "prompt: question, completion: answer",
            ", which leaves 'cot'",
        ),
    ],
)
def test_the_columns_that_an_error_names_leave_nothing_out_unsaid(row: Any, columns: str, unread: str) -> None:
    reader = RowReader()
    with pytest.raises(DataError) as told:
        list(reader.read("a.jsonl", [(1, row)]))
    assert f"set data.columns: {{{columns}}}{unread}" in str(told.value)
    named = dict(pair.split(": ") for pair in columns.split(", "))
    [read] = RowReader(columns=named).read("a.jsonl", [(1, row)])
    assert all(value in str(read) for key, value in row.items() if key not in ("id", "cot"))


def test_bad_rows_are_dropped_and_told_where_asked(tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b"}
    path, dropped = write(tmp_path / "train.jsonl", good, good | {"completion": ""}, good), list[DataError]()
    assert [row.line for row in read_rows(path, on_bad=dropped.append)] == [1, 3]
    assert [error.problem for error in dropped] == [f"{path} line 2: an empty completion"]
    path.write_text(
        '{"text": "a"}\n{"text": "b", "text": "c"}\n{"text": ' + "[" * 3000 + "]" * 3000 + '}\n{"text": "d"}\n'
    )
    assert [row.line for row in read_rows(path, on_bad=dropped.append)] == [1, 4]
    assert "key 'text' twice" in dropped[1].problem and "100 brackets" in dropped[2].problem
    as_list = path.with_suffix(".json")
    as_list.write_text('[{"text": "a"},\n{"text": "b", "text": "c"},\n{"text": "d"}]')
    assert [row.line for row in read_rows(as_list, on_bad=dropped.append)] == [1, 3] and len(dropped) == 4
    with pytest.raises(DataError, match="line 2: a row with 'text'"):  # what isn't of the format is never a dropped row
        read_rows(write(path, good, {"text": "x"}), on_bad=dropped.append)
    with pytest.raises(DataError, match="each of its rows was dropped"):
        read_rows(write(path, good | {"completion": ""}), on_bad=dropped.append)


def test_a_column_that_is_read_under_another_name_is_not_read_twice() -> None:
    """The question would stand there twice."""
    reader = RowReader("alpaca", {"instruction": "input", "output": "target"})
    [row] = reader.read("a.jsonl", [(1, {"input": "Who?", "target": "A cat."})])
    assert isinstance(row, Conversation) and [turn.content for turn in row.messages] == ["Who?", "A cat."]
