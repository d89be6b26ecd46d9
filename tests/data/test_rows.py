"""Reading rows: the three formats, and an error with file and line for everything else."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.data.rows import Conversation, Message, PromptCompletion, Row, TextDocument, in_chunks
from pronghorn.errors import DataError
from support.data_files import read_rows

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
GOOD = json.dumps({"prompt": "Hi", "completion": "Hello"})


def write(folder: Path, content: str | bytes, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_formats(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"messages": TURNS}) + "\n")
    turns = (Message("user", "Hi"), Message("assistant", "Hello"))
    assert read_rows(path) == [Conversation(turns, path=str(path), line=1)]

    path = write(tmp_path, f"\ufeff{GOOD}\r\n\n  \n{GOOD}")  # a byte-order mark, blank lines, no newline at the end
    assert [row.line for row in read_rows(path)] == [1, 4]
    assert read_rows(path)[1] == PromptCompletion("Hi", "Hello", path=str(path), line=4)
    assert read_rows(str(path))[1].source == f"{path} line 4"

    path = write(tmp_path, '{"text": "one\u2028two"}\n')
    assert read_rows(path) == [TextDocument("one\u2028two", path=str(path), line=1)]


def test_columns_rename_and_ignore_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "2 + 2?", "answer": "4", "level": 1}\n')
    columns = {"prompt": "question", "completion": "answer"}
    assert read_rows(path, columns) == [PromptCompletion("2 + 2?", "4", path=str(path), line=1)]
    path = write(tmp_path, '{"prompt": "2 + 2?", "answer": "4"}\n')
    assert read_rows(path, {"completion": "answer"}) == [PromptCompletion("2 + 2?", "4", path=str(path), line=1)]


rows_as_json = st.lists(st.fixed_dictionaries({"text": st.text(min_size=1).filter(str.strip)}), min_size=1, max_size=8)


@settings(deadline=None)
@given(values=rows_as_json, indent=st.sampled_from([None, 1, "\t"]), ascii_only=st.booleans())
def test_a_json_list_reads_as_the_same_rows_with_their_numbers(
    values: list[dict[str, str]], indent: int | str | None, ascii_only: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = "\n" + json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    rows = read_rows(write(tmp_path_factory.mktemp("rows"), text, "train.json"))
    assert [row.text for row in rows if isinstance(row, TextDocument)] == [value["text"] for value in values]
    assert [row.line for row in rows] == list(range(1, len(values) + 1))


def message(*turns: object) -> str:
    return json.dumps({"messages": turns})


def row(**fields: object) -> str:
    return json.dumps(fields)


def shared_gpt(*turns: object) -> str:
    return row(conversations=turns)


def calls(*tool_calls: object) -> str:
    return message(USER, {"role": "assistant", "content": None, "tool_calls": tool_calls})


USER, ASSISTANT = TURNS
HUMAN = {"from": "human", "value": "Hi"}
CALL = {"name": "add", "arguments": {"a": 1}}
BAD = {
    "empty": ("", "train.jsonl: no rows in it"),
    "blank": ("\n \n", "no rows in it"),
    "malformed": (f"{GOOD}\n{{'prompt': 1}}\n", r"line 2: not valid JSON \(Expecting property name.*, column 2\)"),
    "cut short": (
        f'{GOOD}\n{GOOD}\n{{"prompt": "a',
        r"line 3: not valid JSON \(Unterminated string starting at column 12\): the row breaks off there",
    ),
    "huge number": ('{"text": ' + "1" * 5000 + "}", "line 1: JSON that can't be read"),
    "nested": ("[" * 200_000, "line 1: JSON that can't be read: more than 100 brackets open at a time"),
    "nested in a key aside": (
        '{"text": "a", "id": ' + "[" * 101 + "]" * 101 + "}",
        "line 1: .* more than 100 brackets",
    ),
    "nested in JSON in a string": (
        row(messages=TURNS, tools="[" * 3000 + "]" * 3000),
        "line 1: tools .* is not valid JSON .more than 100 brackets",
    ),
    "a key twice": (
        '{"text": "a"}\n{"text": "a", "text": "b"}',
        "line 2: JSON that can't be read: the key 'text' twice in one object",
    ),
    "a key of a message twice": (
        '{"messages": [{"role": "user", "content": "a", "role": "assistant"}]}',
        "line 1: JSON that can't be read: the key 'role' twice",
    ),
    "a key of arguments twice": (
        calls({"name": "add", "arguments": '{"a": 1, "a": 2}'}),
        "line 1 message 2 tool call 1: arguments .*the key 'a' twice",
    ),
    "not an object": (f"{GOOD}\n[1]\n", "line 2: list instead of an object: write each row as"),
    "not utf-8": (f"{GOOD}\n".encode() + b'{"text": "caf\xe9"}\n', "line 2: byte 0xe9 is not UTF-8"),
    "half a surrogate in a call": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": '
        '[{"name": "f", "arguments": {"q": "\\ud83d"}}]}]}',
        "line 1 message 2 tool call 1: its JSON holds half a surrogate pair",
    ),
    "half a surrogate in a tool": (
        '{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "description": "\\ud83d"}]}',
        "line 1 tool 1: its JSON holds half a surrogate pair",
    ),
    "half a surrogate": ('{"text": "\\ud83d"}', "line 1: text holds half a surrogate pair"),
    "unknown keys": ('{"question": "a", "answer": "b"}', "line 1: keys 'question', 'answer' are no known format"),
    "no keys": ("{}", r"line 1: keys \(none\) are no known format"),
    "half a format": ('{"prompt": "a"}', "line 1: keys 'prompt' are no known format: write each row as"),
    "a key too many": (
        '{"messages": [], "label": true}',
        "line 1: keys 'label' beside 'messages': delete them, or set data.format to messages to ignore",
    ),
    "mixed": (
        f'{GOOD}\n\n{{"text": "a"}}',
        r"line 3: a row with 'text', but .*train\.jsonl line 1 has 'prompt', 'completion'",
    ),
    "prompt not a string": ('{"prompt": 4, "completion": "b"}', "line 1: prompt is int 4, not a string"),
    "completion null": ('{"prompt": "a", "completion": null}', "line 1: completion is null, not a string"),
    "completion empty": ('{"prompt": "a", "completion": " \\n"}', "line 1: an empty completion"),
    "text empty": ('{"text": ""}', "line 1: an empty text"),
    "no messages": ('{"messages": []}', r"line 1: messages is list \[\]"),
    "messages a string": ('{"messages": "hi"}', "line 1: messages is 'hi'"),
    "message a string": (message("hi"), "line 1 message 1: 'hi'"),
    "message with more": (message(USER | {"mood": "x"}), "message 1: keys 'mood': delete them"),
    "message without role": (message({"content": "x"}), "message 1: keys 'content': write a message as"),
    "role unknown": (message(USER, ASSISTANT | {"role": "gpt"}), "message 2: role 'gpt': use one of system, user"),
    "role a number": (message(USER | {"role": 3}), "message 1: role int 3"),
    "content a list": (message(USER | {"content": [1]}), "message 1: content part int 1, not a text"),
    "content a number": (message(USER | {"content": 1}), "message 1: content is int 1, not a string"),
    "an image": (
        message(USER | {"content": [{"type": "image_url", "image_url": {}}]}),
        "message 1: content part 'image_url': training is text only for now: leave out the rows and parts",
    ),
    "a sound": (message(USER | {"content": [{"type": "audio"}]}), "content part 'audio': training is text only"),
    "an unknown part": (message(USER | {"content": [{"type": "smell"}]}), "content part dict .*not a text"),
    "a column of images": (
        '{"messages": [], "images": ["a.png"]}',
        "line 1: 'images' beside 'messages': training is text only for now",
    ),
    "content part without text": (message(USER | {"content": [{"type": "text"}]}), "content is null, not a s"),
    "two user turns": (message(USER, USER), "message 2: two user messages in a row"),
    "tool without call": (message(USER, {"role": "tool", "content": "1"}), "message 2: a tool's result with no call"),
    "user calls": (message(USER | {"tool_calls": [CALL]}), "message 1: tool_calls in a message of role user"),
    "call without name": (calls({"function": {"arguments": "{}"}}), "message 2 tool call 1: no name, but keys 'argu"),
    "call of a string": (calls("add"), "message 2 tool call 1: 'add'"),
    "calls no list": (message(USER, {"role": "assistant", "tool_calls": CALL}), "tool_calls is dict .*, not a list"),
    "arguments not json": (
        calls({"name": "add", "arguments": "{"}),
        "tool call 1: arguments '{' is not valid JSON",
    ),
    "arguments a list": (calls({"name": "add", "arguments": "[1]"}), r"tool call 1: arguments is list \[1\]"),
    "arguments missing": (calls({"name": "add"}), "tool call 1: arguments is null"),
    "tools no list": (row(messages=TURNS, tools="{}"), r"line 1: tools is dict \{\}, not a list"),
    "tools not json": (row(messages=TURNS, tools="add"), "line 1: tools 'add' is not valid JSON"),
    "tool without name": (row(messages=TURNS, tools=[{"description": "x"}]), "line 1 tool 1: dict .* has no name"),
    "weight against the role": (
        message(USER | {"weight": 1}, ASSISTANT),
        "message 1: weight int 1 on a message of role user",
    ),
    "unknown from": (
        shared_gpt(HUMAN, {"from": "bing", "value": "x"}),
        "message 2: from 'bing': use one of system",
    ),
    "from a list": (shared_gpt({"from": [], "value": "x"}), r"message 1: from list \[\]"),
    "turn without from": (shared_gpt({"value": "x"}), "message 1: keys 'value': write a turn as"),
    "value null": (shared_gpt({"from": "human", "value": None}), "message 1: value is null, not a string"),
    "gpt empty": (shared_gpt(HUMAN, {"from": "gpt", "value": ""}), "message 2: an empty assistant message"),
    "two humans": (shared_gpt(HUMAN, HUMAN), "message 2: two user messages in a row"),
    "function_call not json": (
        shared_gpt(HUMAN, {"from": "function_call", "value": "add(1)"}),
        "function_call 'add",
    ),
    "two formats in a row": (
        row(instruction="a", input="", output="b", text="Below is"),
        "line 1: keys 'text' beside 'instruction', 'output': .* set data.format to alpaca or text to ignore",
    ),
    "sharegpt weight against the role": (
        shared_gpt(HUMAN, {"from": "gpt", "value": "b", "weight": 0.5}),
        "message 2: weight float 0.5 on a message of role assistant",
    ),
    "observation first": (shared_gpt({"from": "observation", "value": "1"}), "message 1: a tool's result with no call"),
    "two systems": (
        row(system="a", conversations=[{"from": "system", "value": "b"}, HUMAN]),
        "line 1: a system message in system, and one in conversations: keep one of the two",
    ),
    "two humans behind a system": (
        row(system="a", conversations=[HUMAN, HUMAN]),
        "line 1 message 2: two user messages in a row",
    ),
    "output empty": (row(instruction="a", output=""), "line 1: an empty output"),
    "instruction empty": (row(instruction=" ", input="", output="b"), "line 1: an empty instruction"),
    "instruction null": (row(instruction=None, input="a", output="b"), "line 1: instruction is null, not a"),
    "history a string": (row(instruction="a", output="b", history="c"), "line 1: history is 'c', not a list"),
    "history of ones": (row(instruction="a", output="b", history=[["c"]]), r"line 1 history 1: list \['c'\]"),
    "history unanswered": (row(instruction="a", output="b", history=[["c", ""]]), "line 1 history 1: an empty answer"),
    "spelled two ways": (
        row(instruction="a", input="b", output="c") + "\n" + row(instruction="a", context="b", response="c"),
        "line 2: a row with 'instruction', 'response', 'context', but .* line 1 has 'instruction', 'output'",
    ),
    "a pair": (row(prompt="a", chosen="b", rejected="c"), "line 1: a preference pair, and supervised fine-tuning"),
    "assistant first": (message(ASSISTANT), "message 1: an assistant message with no user message before it"),
    "late system": (message(USER, {"role": "system", "content": "x"}), "message 2: a system message that is not the"),
    "assistant empty": (message(USER, ASSISTANT | {"content": ""}), "message 2: an empty assistant message"),
}


@pytest.mark.parametrize(("content", "error"), BAD.values(), ids=BAD)
def test_bad_lines(content: str | bytes, error: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=error) as caught:
        read_rows(path)
    assert str(path) in caught.value.problem
    assert caught.value.remedy


BAD_LISTS = {
    "empty": (" \n", "train.json: no rows in it"),
    "no items": ("[]", "train.json: no rows in it"),
    "an object": (GOOD, "train.json: dict instead of a list"),
    "json lines": (f"{GOOD}\n{GOOD}\n", r"line 2: not valid JSON \(Extra data, column 1\): name the file \.jsonl"),
    "malformed": (f"[\n{GOOD},\n{GOOD}\n,]", r"line 4: not valid JSON \(.*, column [12]\)"),
    "an item that is none": (f"[\n{GOOD},\n7]", "row 2: int instead of an object"),
    "a key twice": (f'[\n{GOOD},\n{{"text": "a", "text": "b"}}]', "row 2: .* the key 'text' twice in one object"),
    "nested": ("[" * 200_000, "row 1: JSON that can't be read"),
    "an item nested": (f"[{GOOD},\n" + "[" * 200 + "]" * 201, "row 2: .*more than 100 brackets open at a time"),
    "not utf-8": (f"[\n{GOOD},\n".encode() + b'"\xff"]', "line 3: byte 0xff is not UTF-8"),
    "not utf-8 after a mark": (b'\xef\xbb\xbf["\xff"]', "line 1: byte 0xff is not UTF-8"),
}


@pytest.mark.parametrize(("content", "error"), BAD_LISTS.values(), ids=BAD_LISTS)
def test_bad_lists(content: str | bytes, error: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=error):
        read_rows(write(tmp_path, content, "train.json"))


def test_bad_paths_and_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file: fix data\.train"):
        read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="no data in this folder"):
        read_rows(tmp_path)
    with pytest.raises(DataError, match=r"unknown file type \.xml: give a \.jsonl, \.json, \.csv"):
        read_rows(write(tmp_path, "<a/>", "train.xml"))
    path = write(tmp_path, GOOD)
    turned = r"'question', but the file's keys stand last: write data\.columns: \{prompt: question\}"
    with pytest.raises(DataError, match=turned):
        read_rows(path, {"question": "prompt"})
    with pytest.raises(DataError, match=r"data\.columns renames 'promt', which is not a key: did you mean 'prompt'\?"):
        read_rows(path, {"promt": "question"})
    with pytest.raises(DataError, match="line 1: no 'answer' among its keys 'prompt', 'completion': fix data"):
        read_rows(path, {"completion": "answer"})


def test_long_numbers_and_many_brackets_side_by_side_are_fine(tmp_path: Path) -> None:
    tool = {"name": "f", "parameters": [{"n": 10**400}] * 300}
    (read,) = read_rows(write(tmp_path, row(messages=TURNS, tools=[tool])))
    assert isinstance(read, Conversation) and read.tools[0]["function"] == tool


def test_chunks_end_by_rows_or_characters() -> None:
    texts: list[Row] = [TextDocument(text, path="t.txt", line=line) for line, text in enumerate("abc", 1)]
    pair = PromptCompletion("ab", "cd", path="t.jsonl", line=4)
    said = Conversation((Message("user", "a"), Message("assistant", "bc")), path="t.jsonl", line=5)
    rows = [
        *texts,
        pair,
        said,
        *(TextDocument(text, path="t.txt", line=line) for line, text in ((6, "d"), (7, "efgh"), (8, "i"))),
    ]
    assert [[row.line for row in chunk] for chunk in in_chunks(rows, 3, 4)] == [[1, 2, 3], [4], [5, 6], [7], [8]]
    assert not list(in_chunks([], 3, 4))
