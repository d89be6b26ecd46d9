"""Tokenising once: hits and misses, resuming, damage, several processes, and the same documents as without a cache."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import struct
import time
import traceback
from collections.abc import Callable
from io import StringIO
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from pronghorn.config.recipe import Data
from pronghorn.data import cache as cache_module
from pronghorn.data.cache import Prepared, documents
from pronghorn.data.labels import label_rows
from pronghorn.data.packed_rows import PackedRows
from pronghorn.data.parts import Tokenising
from pronghorn.errors import ConfigError, DataError
from pronghorn.state import digest
from pronghorn.train.progress import RowsProgress
from support.data_files import read_rows
from support.overflow import fit_reference

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture
def tokenizer(stories: Path) -> Any:
    loaded = AutoTokenizer.from_pretrained(stories)
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Data]:
    """Data of 50 rows in `train.jsonl`, or what is asked for, with a cache of its own."""

    def make(rows: int = 50, **changes: Any) -> Data:
        path = tmp_path / "train.jsonl"
        if not path.exists():
            table = [{"prompt": f"Say {i}!", "completion": f"It is {i}." + " So." * (i % 7)} for i in range(rows)]
            path.write_text("".join(json.dumps(row) + "\n" for row in table))
        return Data.model_validate({"train": path, "cache": tmp_path / "cache", "workers": 1, **changes})

    return make


def prepare(data: Data, tokenizer: Any, length: int = 512, part_rows: int = 20, **more: Any) -> Prepared:
    return documents(data, "train", tokenizer, length, seed=0, part_rows=part_rows, **more)


def entries(data: Data) -> list[Path]:
    return sorted(Path(str(data.cache)).iterdir())


def content(prepared: Prepared) -> list[tuple[list[int], list[int], str]]:
    return [(row["input_ids"], row["labels"], row["source"]) for row in prepared.dataset]


def test_the_same_documents_as_without_a_cache(settings: Any, tokenizer: Any) -> None:
    data = settings()
    expected = label_rows(read_rows(data.train), tokenizer).documents
    seen: list[tuple[str, int, int | None]] = []
    prepared = prepare(data, tokenizer, progress=lambda *each: seen.append(each))
    assert content(prepared) == [(d.input_ids, d.labels, d.source) for d in expected]
    assert [count.rows for count in prepared.counts] == [50] and prepared.counts[0].used == 50
    assert seen == [(str(data.train), done, 50) for done in (0, 20, 40, 50)]
    assert [part.name for part in sorted(entries(data)[0].glob("part*.arrow"))] == [
        f"part-0000{i}.arrow" for i in range(3)
    ]


def test_a_second_time_nothing_is_tokenised(settings: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(settings(), tokenizer)
    monkeypatch.setattr(Tokenising, "write", lambda *args: pytest.fail("tokenised again"))
    second = prepare(settings(), tokenizer)
    assert content(first) == content(second) and first.key == second.key


def _more_text(data: Data, tokenizer: Any) -> None:
    with Path(str(data.train)).open("a") as file:
        file.write('{"prompt": "a", "completion": "b"}\n')


def _other_template(data: Data, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE.replace("[", "(").replace("]", ")")


def _new_token(data: Data, tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})


def _special_tokens_as_text(data: Data, tokenizer: Any) -> None:
    tokenizer.split_special_tokens = True


CHANGES: dict[str, Any] = {
    "special tokens as text": (_special_tokens_as_text, {"format": "prompt_completion", "loss_on": "all"}),
    "a row more": (_more_text, {}),
    "another template": (_other_template, {}),
    "a new token": (_new_token, {}),
    "the last turn": (None, {"loss_on": "last"}),
    "all tokens": (None, {"loss_on": "all"}),
    "a system prompt": (None, {"system_prompt": "Be kind."}),
    "bad rows dropped": (None, {"bad_rows": "drop"}),
    "a format named": (None, {"format": "prompt_completion"}),
    "control tokens": (None, {"control_tokens": "allow"}),
    "columns": (None, {"columns": {"prompt": "completion", "completion": "prompt"}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_the_tokens_is_in_the_key(settings: Any, tokenizer: Any, change: str) -> None:
    data = settings()
    first = prepare(data, tokenizer)
    act, changes = CHANGES[change]
    if act is not None:
        act(data, tokenizer)
    changed = settings(**changes)
    assert prepare(changed, tokenizer).key != first.key and len(entries(data)) == 2


@pytest.mark.parametrize("half_a_row", [b"", b'{"prompt": "Sa'])
def test_a_file_that_changes_while_it_is_tokenised(settings: Any, tokenizer: Any, half_a_row: bytes) -> None:
    """Its parts are of no one content: none is kept under the hash of the first."""
    data = settings()
    path = Path(str(data.train))
    before = path.read_bytes()

    def write(name: str, done: int, total: int | None) -> None:
        if done == 0:
            path.write_bytes(before.replace(b"It is", b"It was") + half_a_row)

    with pytest.raises(DataError, match=r"train\.jsonl changed while it was tokenised: run again"):
        prepare(data, tokenizer, progress=write)
    path.write_bytes(before)
    rows = read_rows(path)
    assert [row["input_ids"] for row in prepare(data, tokenizer).dataset] == [
        document.input_ids for document in label_rows(rows, tokenizer).documents
    ]


def test_what_does_not_decide_the_tokens_is_not(settings: Any, tokenizer: Any) -> None:
    """Row length and overflow rule come after the cache; a tokenizer's own truncation is not used."""
    whole = prepare(settings(), tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    short = prepare(settings(overflow="drop"), tokenizer, length=40)
    other = [prepare(settings(overflow=rule), tokenizer, length=n) for rule, n in (("truncate", 40), ("drop", 41))]
    other.append(documents(settings(), "train", tokenizer, 512, seed=1, part_rows=20))
    assert len(entries(settings())) == 1 and short.dropped > 0
    assert len({prepared.key for prepared in (whole, short, *other)}) == 5


@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
def test_the_overflow_rule_on_cached_documents(settings: Any, tokenizer: Any, overflow: Any) -> None:
    data = settings(overflow=overflow)
    whole = label_rows(read_rows(data.train), tokenizer).documents
    expected, count = fit_reference(whole, 44, overflow)
    prepared = prepare(data, tokenizer, length=44)
    assert sorted(content(prepared)) == sorted((d.input_ids, d.labels, d.source) for d in expected)
    assert (prepared.dropped, prepared.fitted.truncated, prepared.fitted.split) == (
        count["dropped"],
        count["truncated"],
        count["split"],
    )
    assert prepared.dropped + prepared.fitted.truncated + prepared.fitted.split > 0
    fitting = [(d.input_ids, d.labels, d.source) for d in whole if len(d) <= 44]
    assert content(prepared)[: len(fitting)] == fitting  # what is cut stands at the end
    with pytest.raises(DataError, match=r"train\.jsonl line \d+ has \d+ tokens > max_seq_length 44"):
        prepare(settings(overflow="error"), tokenizer, length=44)


def test_rows_of_the_packer_come_in_one_read(settings: Any, tokenizer: Any) -> None:
    prepared = prepare(settings(), tokenizer)
    listed = [dict(row) for row in prepared.dataset]
    rows, expected = PackedRows(prepared.dataset, 128), PackedRows(listed, 128)
    assert len(rows) > 3 and [rows[i] for i in range(len(rows))] == [expected[i] for i in range(len(expected))]
    for format in ({"type": "torch"}, {"type": "torch", "columns": ["input_ids"]}, {"type": "arrow"}):
        formatted = PackedRows(prepared.dataset.with_format(**format), 128)[0]
        assert formatted == expected[0] and {type(token) for token in formatted["input_ids"]} == {int}


def test_killed_while_tokenising(settings: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 after two parts of five: those two are not made again, and the cache ends up the same to the byte."""
    data = settings(rows=100)
    reference = prepare(settings(rows=100, cache=data.cache.parent / "reference"), tokenizer)
    write = Tokenising.write

    def slow(self: Any, path: Path, *args: Any) -> Any:
        if path.name == "part-00002.arrow":
            time.sleep(60)
        return write(self, path, *args)

    process = os.fork()
    if not process:
        try:
            monkeypatch.setattr(Tokenising, "write", slow)
            prepare(data, tokenizer)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while not list(Path(str(data.cache)).glob("*/part-00001.json")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert not (entries(data)[0] / "manifest.json").exists()
    made: list[str] = []
    monkeypatch.setattr(Tokenising, "write", lambda self, path, *a: (made.append(path.name), write(self, path, *a))[1])
    seen: list[int] = []
    resumed = prepare(data, tokenizer, progress=lambda _, done, total: seen.append(done))
    assert made == [f"part-0000{i}.arrow" for i in (2, 3, 4)] and seen == [0, 20, 40, 60, 80, 100]
    assert content(resumed) == content(reference)
    for name in (
        "manifest.json",
        "part-00001.arrow",
    ):  # as workers that were killed may leave it: a later part is there
        (entries(data)[0] / name).unlink()
    assert content(prepare(data, tokenizer)) == content(reference) and made[3:] == ["part-00001.arrow"]
    for part in entries(data)[0].glob("part-*"):
        assert part.read_bytes() == (next((data.cache.parent / "reference").iterdir()) / part.name).read_bytes()


def _cut(folder: Path) -> None:
    part = folder / "part-00001.arrow"
    part.write_bytes(part.read_bytes()[:-40])


def _flip(folder: Path) -> None:
    """One bit of a token, which Arrow can't notice."""
    part = folder / "part-00001.arrow"
    with pyarrow.memory_map(str(part)) as file, pyarrow.ipc.open_stream(file) as stream:
        tokens = stream.read_next_batch()["input_ids"].flatten().buffers()[1].to_pybytes()
    content = bytearray(part.read_bytes())
    content[content.index(tokens) + 8] ^= 1
    part.write_bytes(content)


def _edit(name: str, **changes: Any) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**table, **changes}))

    return edit


def _far_offsets(folder: Path) -> None:
    """A part that matches its digest, with a document that begins far outside of the file."""
    part = folder / "part-00001.arrow"
    with pyarrow.memory_map(str(part)) as file, pyarrow.ipc.open_stream(file) as stream:
        offsets = stream.read_next_batch()["labels"].offsets.to_numpy().tobytes()
    content = part.read_bytes()
    assert offsets in content
    part.write_bytes(content.replace(offsets, struct.pack("i", 2**30) * (len(offsets) // 4)))
    _believed(part)


def _other_columns(folder: Path) -> None:
    part = folder / "part-00001.arrow"
    table = pyarrow.table({"input_ids": ["a"] * 20})
    with part.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    _believed(part)


def _believed(part: Path) -> None:
    _edit("part-00001.json", bytes=part.stat().st_size, xxh3_128=digest(part))(part.parent)


def _unfinished(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def spoil(folder: Path) -> None:
        damage(folder)
        (folder / "manifest.json").unlink()

    return spoil


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a part cut short": (_cut, r"part-00001\.arrow: [\d,]+ bytes instead of [\d,]+: delete"),
    "a flipped bit": (_flip, r"part-00001\.arrow: its contents changed since it was written"),
    "offsets outside of the file": (_far_offsets, r"part-00001\.arrow: not a whole part of a token cache .*ffset"),
    "other columns": (_other_columns, r"part-00001\.arrow: other columns than a token cache has"),
    "a part gone": (lambda f: (f / "part-00000.arrow").unlink(), r"part-00000\.arrow: missing: delete"),
    "another version": (
        _edit("manifest.json", schema="pronghorn-tokens-v9"),
        "schema 'pronghorn-tokens-v9', not 'pronghorn-tokens-v3': delete",
    ),
    "the manifest cut short": (
        lambda f: (f / "manifest.json").write_text('{"schema'),
        r"manifest\.json: not valid JSON",
    ),
    "a manifest without counts": (_edit("manifest.json", dropped=None), r"manifest\.json: not whole"),
    "a part cut short before the end": (_unfinished(_cut), r"part-00001\.arrow: [\d,]+ bytes instead of"),
    "a flipped bit before the end": (_unfinished(_flip), r"part-00001\.arrow: its contents changed"),
    "fewer documents than told before the end": (
        _unfinished(_edit("part-00001.json", documents=21)),
        r"part-00001\.arrow: 20 documents instead of 21",
    ),
    "a part's table without names": (
        lambda f: (_edit("part-00001.json", more=1)(f), (f / "manifest.json").unlink()),
        r"part-00001\.json: not whole .*more",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache(settings: Any, tokenizer: Any, damage: str) -> None:
    prepare(settings(), tokenizer)
    spoil, message = DAMAGES[damage]
    spoil(entries(settings())[0])
    with pytest.raises(DataError, match=message) as refused:
        prepare(settings(), tokenizer)
    assert f"delete {entries(settings())[0]}" in refused.value.remedy


def test_planted_links_are_not_followed(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    """An earlier version wrote through `.part-00000.arrow.<process id>` and `.meta.json`."""
    prepare(settings(), tokenizer)
    (folder,) = entries(settings())
    (folder / "manifest.json").unlink()
    for part in folder.glob("part-*"):
        part.unlink()
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in (f".part-00000.arrow.{os.getpid()}", ".meta.json", ".manifest.json"):
        (folder / name).symlink_to(mine)
    prepare(settings(), tokenizer)
    assert mine.read_text() == "mine"


def _no_room(bytes_: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_and_what_is_whole_is_used_again(settings: Any, tokenizer: Any, workers: int) -> None:
    data = settings(workers=workers)
    process = os.fork()
    if not process:
        status = 9
        try:
            _no_room(8000)  # a part has more
            prepare(data, tokenizer)
        except ConfigError as error:
            status = 0 if "can't be written (File too large)" in str(error) and "make room" in str(error) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(process, 0)[1] == 0
    assert not list(entries(data)[0].glob(".*tmp")) and len(prepare(settings(), tokenizer).dataset) == 50


def test_two_processes_at_once(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    """One tokenises, the other waits and finds it done."""
    data, write = settings(rows=100), Tokenising.write

    def counted(self: Any, path: Path, *args: Any) -> Any:
        with (tmp_path / "made").open("a") as file:
            file.write(path.name + "\n")
        return write(self, path, *args)

    processes = []
    for _ in range(2):
        process = os.fork()
        if not process:
            status = 9
            try:
                Tokenising.write = counted  # type: ignore[method-assign]
                status = 0 if len(prepare(data, tokenizer).dataset) == 100 else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        processes.append(process)
    assert [os.waitpid(process, 0)[1] for process in processes] == [0, 0]
    assert len((tmp_path / "made").read_text().splitlines()) == 5


@pytest.mark.slow
def test_workers_end_with_a_killed_run(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    """They would wait for rows for ever; and what they had begun to write is cleared by the next run."""
    data = settings(rows=100, workers=2, cache=tmp_path / "cache")
    process = os.fork()
    if not process:
        try:
            prepare(data, tokenizer, part_rows=1)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("*/part-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = psutil.Process(process).children()
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert len(workers) >= 2
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (entries(data)[0] / ".part-00009.arrow.0123456789abcdef.tmp").write_bytes(b"begun")
    assert len(prepare(settings(), tokenizer, part_rows=1).dataset) == 100
    assert not list(entries(data)[0].glob(".part*"))


@pytest.mark.slow
def test_an_interrupted_run_ends_at_once(settings: Any, tokenizer: Any) -> None:
    """Who waits while workers end their parts is interrupted once more, and then Python waited for them for ever."""

    def interrupt(_: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    data = settings(rows=16_000, workers=2)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, tokenizer, progress=interrupt, part_rows=4000)
    assert not active_children()
    (folder,) = entries(data)
    assert (folder / "part-00000.json").exists() and not (folder / "part-00003.arrow").exists()
    assert not list(folder.glob(".part*"))
    assert len(prepare(data, tokenizer, part_rows=4000).dataset) == 16_000


def test_a_row_refused_before_a_line_that_cannot_be_read(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The file's first error is told, and what was whole before it stays."""
    settings(rows=50)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[30] = "{"
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"train\.jsonl line 31: not valid JSON"):
        prepare(settings(), tokenizer)
    assert [part.name for part in entries(settings())[0].glob("part-*.arrow")] == ["part-00000.arrow"]
    lines[5] = '{"prompt": "a", "completion": "b </s> c"}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"train\.jsonl line 6: the assistant's text holds the control token"):
        prepare(settings(), tokenizer)


def test_a_cache_that_cannot_be_written(settings: Any, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Others' cache may be read; where something must be made, the remedy is a folder of one's own."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/cache/\w+ can't be written \(.*set data\.cache"):
        prepare(settings(cache=tmp_path / "file" / "cache"), tokenizer)
    first = prepare(settings(), tokenizer)
    monkeypatch.setattr("filelock.FileLock.acquire", lambda self: pytest.fail("locks what is whole"))
    assert content(prepare(settings(), tokenizer)) == content(first)


def test_parts_of_long_rows_hold_fewer(settings: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "PART_CHARACTERS", 150)
    data = settings()
    long = prepare(data, tokenizer)
    [folder] = entries(data)
    rows = [json.loads(path.read_text())["rows"] for path in folder.glob("part-*.json")]
    assert sum(rows) == 50 and 2 < max(rows) < 15
    monkeypatch.undo()
    assert content(prepare(data, tokenizer)) == content(long) and len(entries(data)) == 2
    prepare(data, tokenizer, part_rows=10)
    monkeypatch.setattr(cache_module, "LABELLING", 0)
    prepare(data, tokenizer)
    assert len(entries(data)) == 4


@pytest.mark.slow
def test_worker_processes(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The same parts, counts and errors from two workers as from this process."""
    settings(rows=90)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[30], lines[70] = '{"prompt": "a", "completion": ""}', '{"prompt": "a", "completion": "b </s> c"}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    alone = prepare(settings(bad_rows="drop", cache=tmp_path / "alone"), tokenizer)
    both = prepare(settings(bad_rows="drop", workers=2), tokenizer)
    assert content(both) == content(alone) and (both.counts, both.errors) == (alone.counts, alone.errors)
    assert [error.partition("jsonl ")[2].partition(":")[0] for error in both.errors] == ["line 31", "line 71"]


@pytest.mark.slow
def test_the_first_error_is_told(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A row that a worker refuses comes before a later line that can't be read; what was whole stays."""
    settings(rows=90)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[50], lines[80] = '{"prompt": "a", "completion": "b </s> c"}', "{"
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"train\.jsonl line 51: the assistant's text holds the control token"):
        prepare(settings(workers=2), tokenizer)
    [folder] = entries(settings())
    assert not (folder / "manifest.json").exists() and {p.name for p in folder.glob("*")} >= {"part-00000.arrow"}
    assert not list(folder.glob(".part*"))


def test_a_mixture_takes_shares_of_documents(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    settings()
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"Story {i}."}) + "\n" for i in range(10)))
    mixture = [{"path": tmp_path / "train.jsonl", "weight": 1}, {"path": tmp_path / "b.jsonl", "weight": 3}]
    prepared = prepare(settings(train=mixture), tokenizer)
    assert [(count.format, count.rows, count.used) for count in prepared.counts] == [
        ("prompt_completion", 50, 15),
        ("text", 10, 45),
    ]
    sources = [source for *_, source in content(prepared)]
    assert sum("b.jsonl" in source for source in sources) == 45
    assert sources.count(f"{tmp_path / 'b.jsonl'} line 1") in (4, 5)
    assert prepare(settings(train=mixture), tokenizer).key == prepared.key
    mixture[0]["weight"] = 2
    assert prepare(settings(train=mixture), tokenizer).key != prepared.key and len(entries(settings())) == 2


def test_dropped_and_unsupervised_rows_are_counted_once_and_remembered(
    settings: Any, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "wizard", "content": "a"}]}]
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, good]))
    for _ in range(2):
        prepared = prepare(settings(bad_rows="drop"), tokenizer)
        assert (prepared.dropped, len(prepared.dataset), prepared.counts[0].dropped) == (2, 1, 1)
        assert "line 2" in prepared.errors[0] and "wizard" in prepared.errors[0]


def test_rows_that_cannot_be_labelled_are_dropped_like_others(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Wherever what is wrong with a row is found: at its keys, by the template, at its tokens."""
    settings()
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[3] = '{"prompt": "a", "completion": "b </s> c"}'
    lines[30] = '{"prompt": "a", "completion": ""}'
    lines[45] = '{"prompt": "no", "completion": "b"}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    tokenizer.chat_template = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    for _ in range(2):
        prepared = prepare(settings(bad_rows="drop"), tokenizer)
        assert (prepared.dropped, len(prepared.dataset)) == (3, 47)
        assert (prepared.counts[0].rows, prepared.counts[0].dropped, prepared.counts[0].used) == (47, 3, 47)
        assert [error.partition("jsonl ")[2].partition(":")[0] for error in prepared.errors] == [
            "line 4",
            "line 31",
            "line 46",
        ]
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    (tmp_path / "text.jsonl").write_text('{"text": "a cat"}')
    for sources in ([], [{"path": tmp_path / "text.jsonl"}]):
        train = [{"path": tmp_path / "train.jsonl"}, *sources]
        with pytest.raises(DataError, match=r"train\.jsonl: of 50 rows each was dropped, .*line 1: .*never"):
            prepare(settings(train=train, bad_rows="drop"), tokenizer)
    with pytest.raises(DataError, match=r"line 1: .*never"):
        prepare(settings(), tokenizer)


def test_a_share_of_nothing(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    settings()
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    mixture = [{"path": tmp_path / "train.jsonl", "weight": 1}, {"path": tmp_path / "b.jsonl", "weight": 1}]
    with pytest.raises(DataError, match=r"b\.jsonl: none of its rows has a token to train, and it has a share"):
        prepare(settings(train=mixture), tokenizer)
    unweighted = [{"path": each["path"]} for each in mixture]
    assert [count.used for count in prepare(settings(train=unweighted), tokenizer).counts] == [50, 0]


def test_nothing_to_train(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    with pytest.raises(DataError, match="of 1 row none has a token to train"):
        prepare(settings(), tokenizer)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match=r"data\.system_prompt is set"):
        prepare(settings(system_prompt="Be kind."), tokenizer)


def test_a_set_larger_than_memory_is_streamed(settings: Any, tokenizer: Any, monkeypatch: Any) -> None:
    """Rows are read two parts ahead of what is tokenised, however many there are."""
    read, write = cache_module.read_source, Tokenising.write
    waiting, most = 0, 0

    def counting(*args: Any) -> Any:
        nonlocal waiting, most
        for row in read(*args):
            waiting += 1
            most = max(most, waiting)
            yield row

    def counted(self: Any, path: Path, rows: Any) -> Any:
        nonlocal waiting
        waiting -= len(rows)
        return write(self, path, rows)

    monkeypatch.setattr(cache_module, "read_source", counting)
    monkeypatch.setattr(Tokenising, "write", counted)
    assert len(prepare(settings(rows=100), tokenizer, part_rows=10).dataset) == 100
    assert most == 20 and waiting == 0


def test_without_a_terminal_a_line_now_and_then_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.train.progress._SECONDS", -1)
    written = StringIO()
    with RowsProgress(Console(file=written, width=100)) as progress:
        for done in (0, 50, 100):
            progress("a.jsonl", done, 200)
    first, *others, last = written.getvalue().splitlines()
    assert first == "a.jsonl: 0 of 200 rows tokenised" and last.startswith("a.jsonl: 100 rows tokenised in ")
    assert re.fullmatch(r"a.jsonl: 100 of 200 rows tokenised, about .* left", others[-1])
