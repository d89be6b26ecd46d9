"""Files of every kind, folders, hub sets and mixtures."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pronghorn.config.recipe import Data, Recipe, Source
from pronghorn.data import files
from pronghorn.data.cache import Prepared, SourceCount, documents
from pronghorn.data.formats import RowReader
from pronghorn.data.labels import label_rows
from pronghorn.data.rows import Conversation, Message, PromptCompletion, Row, TextDocument
from pronghorn.data.sources import count_rows, fingerprint, mixture, read_source
from pronghorn.errors import ConfigError, DataError
from support.chats import byte_level, trained
from support.data_files import FILES, read_rows
from support.templates import CALLS as CALLS_TEMPLATE

PAIR = {"prompt": "Hi", "completion": "Hello"}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALLS = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "1"},
]


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(path: Path, *rows: Any) -> Path:
    import pyarrow
    from pyarrow import parquet as writer

    writer.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def read(path: str | Path) -> list[Row]:
    return list(read_source(Source(path=Path(path)), RowReader()))


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('\ufeffprompt,completion\n"two\nlines, ""quoted""",007\n1,null\n', encoding="utf-8")
    first = PromptCompletion('two\nlines, "quoted"', "007", path=str(path), line=1)  # a number stays as it is written
    assert read_rows(path) == [first, PromptCompletion("1", "null", path=str(path), line=2)]
    assert first.source == f"{path} row 1"
    path.write_text("prompt,completion,,\n1,null,,\n")
    assert read_rows(path, format="prompt_completion") == [PromptCompletion("1", "null", path=str(path), line=1)]


def test_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "train.parquet", {"messages": TURNS, "tools": None}, {"messages": CALLS, "tools": "[]"})
    first, second = read_rows(path)
    assert first == Conversation((Message("user", "Hi"), Message("assistant", "Hello")), path=str(path), line=1)
    assert isinstance(second, Conversation) and second.source == f"{path} row 2"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert second.messages[1] == Message("assistant", "", {"tool_calls": [call]})


def test_txt(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("one\n\ntwo <|endoftext|>\n")  # a separator stands on a line of its own
    assert read_rows(path) == [TextDocument("one\n\ntwo <|endoftext|>\n", path=str(path), line=1)]
    assert read_rows(path)[0].source == f"{path} line 1"
    path.write_text("<|endoftext|>\none\n<|endoftext|>\r\n \n<|endoftext|>\ntwo\n")
    assert [(row.text, row.line) for row in read_rows(path) if isinstance(row, TextDocument)] == [
        ("one", 2),
        ("two\n", 6),
    ]
    path.write_bytes(b"one\r\ntwo\r\n<|endoftext|>\r\nthree\r\n")  # Windows' line ends aren't trained
    assert [row.text for row in read_rows(path) if isinstance(row, TextDocument)] == ["one\ntwo", "three\n"]
    path.write_text("one\n<|endoftext|> \t\ntwo\n")  # white space beside a separator, which nobody sees
    assert [row.text for row in read_rows(path) if isinstance(row, TextDocument)] == ["one", "two\n"]


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "csv not utf-8": ("t.csv", b"prompt,completion\na,b\nc,\xe9\n", "t.csv line 3: byte 0xe9 is not UTF-8"),
    "csv ragged": ("t.csv", b"prompt,completion\na,b,c\n", "t.csv: not valid CSV .*Expected 2 columns, got 3"),
    "csv of a header": ("t.csv", b"prompt,completion\n", "t.csv: no rows in it"),
    "csv empty": ("t.csv", b"", "t.csv: no rows in it"),
    "csv with an empty completion": ("t.csv", b"prompt,completion\na,b\nc,\n", "t.csv row 2: an empty completion"),
    "csv of unknown columns": ("t.csv", b"a,b\n1,2\n", "t.csv row 1: keys 'a', 'b' are no known format"),
    "parquet cut short": ("t.parquet", b"PAR1 and no more", "t.parquet: not a whole Parquet file"),
    "parquet empty": ("t.parquet", b"", "t.parquet: not a whole Parquet file"),
    "txt not utf-8": ("t.txt", b"one\n\xff", "t.txt line 2: byte 0xff is not UTF-8"),
    "txt of separators": ("t.txt", b"<|endoftext|>\n\n<|endoftext|>\n", "t.txt: no rows in it"),
    "JSON lines as txt": (
        "t.txt",
        b'{"text": "a"}\n\n{"text": "b"}\n',
        "t.txt line 1: a JSON object, not text: rename",
    ),
    "csv with backslashes before quotes": (
        "t.csv",
        b'prompt,completion\na,b\n"say \\"hi\\"",c\n',
        "t.csv line 3: a quoted value that goes on behind its closing quote, .* twice",
    ),
    "csv with a quote that is left open": (
        "t.csv",
        b'prompt,completion\na,"b\nc,d\ne,f\n',
        "t.csv line 2: .* never closed",
    ),
    "csv that ends in a quote": ("t.csv", b'\xef\xbb\xbf"text"\r\n"a\r\nb"\r\n"c', "t.csv line 4: .* never closed"),
    "csv by semicolons": ("t.csv", b"prompt;completion\na;b\n", "t.csv: a header without a comma, .* by ';': save"),
    "csv by semicolons, with commas": ("t.csv", b'\xef\xbb\xbf"prompt";"completion"\na, b;c\n', "delimited by ';'"),
    "csv by tabs": ("t.csv", b"prompt\tcompletion\na, b\tc\n", "delimited by tabs"),
    "unknown": ("t.arrow", b"x", "t.arrow: unknown file type .arrow: give the whole folder"),
}


@pytest.mark.parametrize(("name", "content", "error"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files(name: str, content: bytes, error: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=error):
        read_rows(tmp_path / name)


def test_parquet_that_is_not_utf_8(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet as writer

    values = pyarrow.array([b"good", b"caf\xe9"]).view(pyarrow.string())
    writer.write_table(pyarrow.table({"text": values}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet row 2: bytes that are not UTF-8"):
        read_rows(tmp_path / "t.parquet")


def test_parquet_with_a_column_twice(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet as writer

    texts = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    writer.write_table(pyarrow.table(texts, names=["text", "text"]), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: the column 'text' twice"):
        read_rows(tmp_path / "t.parquet")


def test_parquet_with_a_date_that_python_has_not(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet as writer

    dates = pyarrow.array([0, -(2**53)], pyarrow.timestamp("ms"))
    writer.write_table(pyarrow.table({"text": ["a", "b"], "index": dates}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet row 2: a date or time span out of Python's range"):
        read_rows(tmp_path / "t.parquet")


def save(folder: Path, *texts: str, **more: Any) -> Source:
    """A data set as `save_to_disk` writes it."""
    from datasets import Dataset, Image

    saved = Dataset.from_dict({"text": list(texts), **more})
    (saved.cast_column("source", Image()) if "source" in more else saved).save_to_disk(folder)
    return Source(path=folder)


def test_a_saved_set_that_was_made_alike_and_holds_other_rows(tmp_path: Path) -> None:
    """`datasets` names a set by how it was made: of a file that changed it is called the same."""
    source = save(tmp_path / "saved", "a cat")
    before = fingerprint(source)
    assert fingerprint(source) == before
    name = json.loads((tmp_path / "saved/state.json").read_text())["_fingerprint"]
    save(tmp_path / "saved", "a dog")
    state = json.loads((tmp_path / "saved/state.json").read_text())
    (tmp_path / "saved/state.json").write_text(json.dumps(state | {"_fingerprint": name}))
    assert fingerprint(source) != before


@pytest.mark.parametrize("form", [None, "numpy", "pandas", "arrow", "torch"])
def test_a_saved_set_is_read_alike_whatever_its_format(form: str | None, tmp_path: Path) -> None:
    from datasets import Dataset

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]
    saved = Dataset.from_list([{"messages": turns, "more": 1}])
    saved.set_format(form, columns=["messages"])
    saved.save_to_disk(tmp_path / "saved")
    (row,) = read_source(Source(path=tmp_path / "saved"), RowReader())
    assert isinstance(row, Conversation) and [message.content for message in row.messages] == ["a", "b"]


def test_saved_sets_that_are_damaged_or_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="saved: no rows in it"):
        fingerprint(save(tmp_path / "saved"))
    (tmp_path / "saved/state.json").write_text("[]")
    with pytest.raises(DataError, match="saved: not a whole saved data set"):
        fingerprint(Source(path=tmp_path / "saved"))
    image = save(tmp_path / "images", "a", source=[{"path": None, "bytes": b"no image"}])
    with pytest.raises(DataError, match=r"images can't be read \(cannot identify image file"):
        list(read_source(image, RowReader()))


def test_a_column_that_datasets_can_not_decode_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Audio, Dataset, config

    monkeypatch.setattr(config, "TORCHCODEC_AVAILABLE", False)
    sound = {"text": "a", "source": {"path": None, "bytes": b"no sound"}}
    Dataset.from_list([sound]).cast_column("source", Audio()).save_to_disk(tmp_path / "sounds")
    with pytest.raises(
        DataError, match=r"sounds: a column that is no text can't be read \(.*'torchcodec'.*: give a set"
    ):
        list(read_source(Source(path=tmp_path / "sounds"), RowReader()))


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_lines_over_the_limit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.LINE_LIMIT == 64 * 2**20
    monkeypatch.setattr(files, "LINE_LIMIT", 60)
    row = {"text": "x" * 40}
    rows = [row, row, {"text": "x" * 200}]
    text = lines(*rows) if name == "t.jsonl" else "text\n" + "".join(f"{each['text']}\n" for each in rows)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=r"t\.jsonl line 3: a line of more than 60 bytes|t\.csv: not valid CSV"):
        read_rows(tmp_path / name)
    (tmp_path / name).write_text(text[: text.rindex("\n", 0, -1) + 1])
    assert len(read_rows(tmp_path / name)) == 2


def test_a_line_over_the_limit_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_LIMIT", 2**20)
    path = tmp_path / "t.jsonl"
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(2**36)  # a hole of 64 GiB without a line's end
    tracemalloc.start()
    with pytest.raises(
        DataError, match=r"t\.jsonl line 1: a line of more than 1,048,576 bytes .*: end each row's line"
    ):
        read_rows(path)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.jsonl")
    return folder


def _loop(folder: Path) -> Path:
    (folder / "a.jsonl").symlink_to(folder / "a.jsonl")
    return folder


def _not_utf_8(folder: Path) -> Path:
    (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text(lines(PAIR))
    return folder


def _disk_error(folder: Path) -> Path:
    return Path("/proc/self/mem")  # opens, and gives an input/output error


UNREADABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a link to itself": (_loop, r"a\.jsonl: no file that can be read: a pipe, or a link that leads nowhere"),
    "a pipe": (_pipe, r"a\.jsonl: no file that can be read"),
    "a name that is not UTF-8": (_not_utf_8, r"caf\\udce9\.jsonl: a file name that is not UTF-8: rename it"),
    "an error of the disk": (_disk_error, r"/proc/self/mem can't be read \(Input/output error\)"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_files_that_can_not_be_read_are_errors_by_name(case: str, tmp_path: Path) -> None:
    make, error = UNREADABLE[case]
    source = Source(path=make(tmp_path))
    with pytest.raises(DataError, match=error) as caught:
        fingerprint(source)
        read(source.path)
    assert len(str(caught.value)) < 600 and str(caught.value).encode()


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "part-2.jsonl").write_text(lines(PAIR | {"prompt": "3"}))
    (tmp_path / "part-1.json").write_text(json.dumps([PAIR | {"prompt": "1"}, PAIR | {"prompt": "2"}]))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.csv").write_text("prompt,completion\n4,b\n")
    for name in ("README.md", "LICENSE", "LICENSE.txt", ".hidden.jsonl"):
        (tmp_path / name).write_text("not data")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "state.json").write_text("not data")
    assert count_rows(Source(path=tmp_path)) == 5  # lines of CSV, its header's too
    assert [row.prompt for row in read(tmp_path) if isinstance(row, PromptCompletion)] == ["1", "2", "3", "4"]

    (tmp_path / "part-3.jsonl").write_text(lines({"text": "x"}))
    with pytest.raises(
        DataError, match=r"part-3\.jsonl line 1: a row with 'text', but .*part-1\.json row 1 has 'prompt"
    ):
        read(tmp_path)
    (tmp_path / "text.txt").write_text("x")
    assert count_rows(Source(path=tmp_path)) is None
    (tmp_path / "text.txt").unlink()
    (tmp_path / "part-3.jsonl").rename(tmp_path / "part-3.jsonl.gz")
    with pytest.raises(DataError, match=r"part-3\.jsonl\.gz: unknown file type \.gz"):
        read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: no data in this folder"):
        read(tmp_path / "empty")


def test_hub_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, str]] = []
    named: list[tuple[str | None, str | None]] = []

    def load(name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, split))
        named.append((config, revision))
        if name == "owner/script":
            raise RuntimeError("Dataset scripts are no longer supported, but found script.py")
        if name == "owner/mixed":
            raise datasets.exceptions.DatasetGenerationError("All the data files must have the same columns")
        if name != "owner/chats-v1.0":
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        return datasets.Dataset.from_list([{"messages": TURNS}, {"messages": CALLS}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [row.source for row in read("owner/chats-v1.0")] == ["owner/chats-v1.0 row 1", "owner/chats-v1.0 row 2"]
    with pytest.raises(DataError, match="owner/chat: no such file or folder here, and the hub gives no split `train`"):
        read("owner/chat")
    with pytest.raises(DataError, match=r"owner/script: .*scripts are no longer supported"):
        read("owner/script")
    with pytest.raises(DataError, match=r"owner/mixed: .*must have the same columns"):
        read("owner/mixed")
    assert asked == [(f"owner/{name}", "train") for name in ("chats-v1.0", "chat", "script", "mixed")]
    for name in ("chats", "owner/chats.jsonl", "/owner/chats"):  # nothing that a hub set can be called
        with pytest.raises(DataError, match="no such file"):
            read(name)
    assert len(asked) == 4
    assert count_rows(Source(path=Path("owner/chats-v1.0"))) == 2
    some = Source(path=Path("owner/chats-v1.0"), config="main", split="test", revision="v2", max_samples=1)
    assert count_rows(some) == 1
    assert [row.source for row in read_source(some, RowReader())] == ["owner/chats-v1.0 row 1"]
    assert asked[-1] == ("owner/chats-v1.0", "test") and named[-1] == ("main", "v2")


@pytest.mark.matrix(5)
@pytest.mark.parametrize(("file", "format", "columns"), [each[:3] for each in FILES])
def test_data_files_come_back_from_their_tokens(file: str, format: Any, columns: dict[str, str], shared: Path) -> None:
    """Decoding the trained tokens gives the assistant's texts (and calls), of many rows at a time as of one."""
    rows = read_rows(shared / "data" / file, columns, format)[:100]
    tokenizer = byte_level("{{ tools | tojson if tools }}" + CALLS_TEMPLATE)
    for row, document in zip(rows, label_rows(rows, tokenizer, verify_rows=len(rows)).documents, strict=True):
        if isinstance(row, TextDocument):
            assert tokenizer.decode(document.input_ids) == row.text + "<|im_end|>"
            continue
        if isinstance(row, PromptCompletion):
            row = Conversation((Message("user", row.prompt), Message("assistant", row.completion)), path="", line=1)
        answers = [message for message in row.messages if message.role == "assistant"]
        for answer, text in zip(answers, trained(document, tokenizer), strict=True):
            calls = [json.dumps(call, ensure_ascii=False) for call in answer.extra.get("tool_calls", ())]
            assert text == answer.content + "".join(f"<call>{call}</call>" for call in calls) + "<|im_end|>"


@given(
    sources=st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 100)), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_mixtures_keep_their_shares(sources: list[tuple[int, float]], seed: int) -> None:
    lengths, weights = [length for length, _ in sources], [weight for _, weight in sources]
    taken = mixture(lengths, weights, seed)
    assert taken == mixture(lengths, weights, seed)
    assert sum(map(len, taken)) == sum(lengths)
    for length, weight, indices in zip(lengths, weights, taken, strict=True):
        assert abs(len(indices) - sum(lengths) * weight / sum(weights)) < 1 + 1e-9
        seen = Counter(indices)
        assert set(seen) <= set(range(length))
        assert max(seen.values(), default=0) - min((seen[i] for i in range(length)), default=0) <= 1


def test_a_mixture_draws_by_its_seed(tmp_path: Path) -> None:
    assert mixture([100, 100], [1, 3], 1) != mixture([100, 100], [1, 3], 2)
    first, second, _ = mixture([100, 100, 100], [1, 1, 4], 1)
    assert first != second and first == sorted(first)
    for lengths, weights, shares in (([1, 1, 1], [6, 3, 1], [2, 1, 0]), ([1, 2], [1, 1], [2, 1])):
        assert [len(indices) for indices in mixture(lengths, weights, 0)] == shares
    (tmp_path / "a.jsonl").write_text(lines(*({"text": f"a{i}"} for i in range(6))))
    (tmp_path / "b.jsonl").write_text(lines({"question": "b", "answer": "c"}, {"question": "d", "answer": ""}))
    parts = [
        {"path": tmp_path / "a.jsonl", "weight": 1, "columns": {"text": "text"}},
        {"path": tmp_path / "b.jsonl", "weight": 6},
    ]
    unweighted = [{key: value for key, value in part.items() if key != "weight"} for part in parts]

    def prepared(train: Any, split: Literal["train", "eval"] = "train", bad_rows: str = "drop") -> Prepared:
        settings = {"train": train, "cache": tmp_path / "cache", "workers": 1, "bad_rows": bad_rows}
        columns = {"prompt": "question", "completion": "answer"}
        data = Data.model_validate({**settings, "columns": columns}, strict=False)
        return documents(data, split, byte_level(None), max_seq_length=64, seed=3)

    drawn = prepared(parts)
    assert drawn.counts == [
        SourceCount(str(tmp_path / "a.jsonl"), "text", 6, 0, 1),
        SourceCount(str(tmp_path / "b.jsonl"), "prompt_completion", 1, 1, 6),
    ]
    assert ["a.jsonl" in row["source"] for row in drawn.dataset] == [True] + 6 * [False]
    assert "line 2: an empty completion" in drawn.errors[0]
    assert [count.used for count in prepared(unweighted).counts] == [6, 1]
    with pytest.raises(DataError, match=r"b\.jsonl line 2: an empty completion"):
        prepared(parts, bad_rows="error")
    with pytest.raises(ConfigError, match=r"data\.train: 1 of 2 sources has a weight: give every source one, or none"):
        prepared([parts[0], unweighted[1]])
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        prepared(parts, "eval")


RECIPE = "model: {name: m, max_seq_length: 8}\ntrain: {output: out}\ndata: {train: TRAIN}\n"
BAD_MIXTURES = {
    "[{path: t.jsonl, wieght: 1}]": "unknown key data.train.0.wieght: did you mean data.train.0.weight?",
    "[{weight: 1}]": "data.train.0.path is missing",
    "[{path: t.jsonl, weight: 0}]": "data.train.0.weight = 0: input should be greater than 0",
    "[{path: t.jsonl, format: chat}]": "data.train.0.format = 'chat': input should be 'auto', 'messages'",
    "[{path: t.jsonl, weight: 1}, {path: t.jsonl}]": "data.train: 1 of 2 sources has a weight",
    "[{path: t.jsonl}, {path: u.jsonl}]": "data.train: u.jsonl does not exist",
    "[]": "data.train = []",
    "5": "data.train = 5",
}


@pytest.mark.parametrize(("train", "error"), BAD_MIXTURES.items())
def test_recipes_of_bad_mixtures(train: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text(lines(PAIR))
    Path("r.yaml").write_text(RECIPE.replace("TRAIN", train))
    with pytest.raises(ConfigError) as caught:
        Recipe.load("r.yaml")
    assert error in str(caught.value)


def test_recipes_of_mixtures_folders_and_hub_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text(lines(PAIR))
    for train in ("t.jsonl", ".", "owner/set", "[{path: t.jsonl, weight: 1}, {path: owner/set, weight: 2.5}]"):
        Path("r.yaml").write_text(RECIPE.replace("TRAIN", train))
        recipe = Recipe.load("r.yaml")
        assert Recipe.model_validate(recipe.to_dict()) == recipe


@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_texts_and_tables_are_streamed(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_LIMIT", 2**18)
    path, rows = tmp_path / f"big{suffix}", 2000
    between, head = {".txt": ("\n<|endoftext|>\n", ""), ".csv": ("\n", "text\n")}[suffix]
    path.write_text(head + between.join(f"{number} " + "é" * 1000 for number in range(rows)))
    tracemalloc.start()
    try:
        numbers = [int(value["text"].split()[0]) for _, value in files.read_file(path)]
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 2
    finally:
        tracemalloc.stop()
    assert numbers == [*range(rows)]


def test_a_table_is_not_closed_while_a_thread_may_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its number, which the next file gets, Arrow's thread took that one's first bytes, and so the names."""
    closed = []

    class Watched(pyarrow.OSFile):  # type: ignore[misc]
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(files, "LINE_LIMIT", 2**16)
    monkeypatch.setattr(pyarrow, "OSFile", Watched)
    path = tmp_path / "big.csv"
    path.write_text("text\n" + "\n".join(f"{number} " + "a" * 1000 for number in range(2000)))
    rows = files.read_file(path)
    assert next(rows) == (1, {"text": "0 " + "a" * 1000})
    rows.close()  # type: ignore[attr-defined]
    assert closed == []


def test_a_text_that_never_ends_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LINE_LIMIT", 100)
    path = tmp_path / "book.txt"
    path.write_text("short\n<|endoftext|>\n" + "a line\n" * 20)
    rows = files.read_file(path)
    assert next(rows) == (1, {"text": "short"})
    with pytest.raises(DataError, match=r"book.txt line 3: a text of more than 100 bytes .* a line of <\|endoftext\|>"):
        next(rows)
