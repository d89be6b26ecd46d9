"""`pronghorn data inspect`: what training will see, readable without colours, and inert as HTML."""

from __future__ import annotations

import errno
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.data.cache import documents
from pronghorn.data.packing import Document
from pronghorn.diagnose.inspect import (
    Example,
    Inspection,
    clip,
    figures,
    histogram,
    inspect,
    pieces_of,
    show,
    visible,
    write_report,
)
from pronghorn.errors import ConfigError
from pronghorn.loading.load import FoundModel
from pronghorn.records.page import write_text
from support.run_records import HOSTILE, Page

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


def chat(*texts: str) -> dict[str, Any]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


@pytest.fixture
def recipe(stories: Path, tmp_path: Path) -> Any:
    """Writes rows and a recipe file for them; gives the file."""

    def make(rows: list[Any], **changes: dict[str, Any]) -> Path:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "chat.jinja").write_text(TEMPLATE)
        table: dict[str, dict[str, Any]] = {
            "model": {"name": str(stories), "max_seq_length": 128},
            "data": {"train": str(tmp_path / "train.jsonl"), "chat_template": str(tmp_path / "chat.jinja")},
            "train": {"output": str(tmp_path / "run")},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({key: {**table.get(key, {}), **changes.get(key, {})} for key in {*table, *changes}}))
        return path

    return make


@pytest.fixture
def tokenizer(stories: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(stories)


def printed(inspection: Inspection, **options: Any) -> str:
    out = io.StringIO()
    show(inspection, Console(file=out, width=100, **options))
    return out.getvalue()


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", "inspect", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_it_shows_what_training_sees(recipe: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same documents and counts, and not one weight."""

    def refuse(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(FoundModel, "model", refuse)
    rows = [chat("Hi", "Hello"), chat("A", "B", "C", "D"), chat("Long " * 100, "No"), chat("Why?", "So. " * 9)]
    settings = Recipe.load(recipe(rows, data={"overflow": "drop"}))
    found = inspect(settings, "train", 9)
    tokenizer.chat_template = TEMPLATE
    trained = documents(settings.data, "train", tokenizer, 128, settings.train.seed)
    assert found.prepared == trained or found.prepared.key == trained.key
    ids = [row["input_ids"] for row in trained.dataset]
    assert [[i for piece in example.pieces for i in piece.ids] for example in found.examples] == ids
    assert found.lengths == sorted(map(len, ids)) and found.packing.tokens == sum(map(len, ids))
    assert found.supervised == sum(label != -100 for row in trained.dataset for label in row["labels"])
    table = dict(figures(found))
    assert table["Documents"] == "3" and table["Without a label or too long, dropped"] == "1"
    assert "25.0%" in found.warnings[0] and "(1 without a label or too long: " in found.warnings[0]


def test_the_supervised_text_is_the_answer_and_its_end(recipe: Any) -> None:
    found = inspect(Recipe.load(recipe([chat("Once", "upon\na time", "And", "then 🦌")])))
    (example,) = found.examples
    assert "".join(piece.text for piece in example.pieces if piece.supervised) == "upon\na time</s>then 🦌</s>"
    ends = [piece for piece in example.pieces if piece.text == "</s>"]
    assert [piece.supervised for piece in ends] == [False, True, False, True] and all(piece.special for piece in ends)
    text = printed(found)
    assert "⟦upon↵\na time</s>⟧ ↵\n" in text and "⟦then 🦌</s>⟧" in text and "\x1b" not in text
    coloured = printed(found, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured and "⟦" not in coloured


@pytest.mark.parametrize(
    "text", ["Once upon a time", " two  spaces ", "日本語 🦌🏽 é\tx", "a\ufffdb", "a\n\n b", "\ufffdﷺ🦌a\ufffd日本"]
)
def test_pieces_are_the_decoded_text(tokenizer: Any, text: str) -> None:
    """Characters of several tokens are one piece; nothing is lost or doubled."""
    ids = tokenizer(text)["input_ids"]
    pieces = pieces_of(ids, [-100] * len(ids), tokenizer)
    assert [i for piece in pieces for i in piece.ids] == ids
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece.text for piece in pieces) or "\ufffd" in text


def test_pieces_of_single_bytes_are_the_decoded_text() -> None:
    """Where every byte is a token, what is unfinished looks like the replacement character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend)
    for text in ("a\ufffd", "\ufffd日本\ufffd\n\ufffd", "🦌\ufffd\ufffd𝔘é"):
        test_pieces_are_the_decoded_text(tokenizer, text)


def test_a_character_cut_in_two_is_shown_as_such(tokenizer: Any) -> None:
    ids = tokenizer("🦌", add_special_tokens=False)["input_ids"]
    cut = ids[:-1]
    pieces = pieces_of(cut, [-100] * len(cut), tokenizer)
    assert [i for piece in pieces for i in piece.ids] == cut and "\ufffd" in pieces[-1].text
    labels = [-100] * (len(ids) - 1) + ids[-1:]
    assert [piece.supervised for piece in pieces_of(ids, labels, tokenizer)][-2:] == [False, True]


def test_what_commands_a_terminal_is_spelled_out(recipe: Any) -> None:
    found = inspect(Recipe.load(recipe([chat("a\u202eb\x1b[2Jc\r", "[red]no markup[/] \x07")])))
    text = printed(found, force_terminal=True, color_system="standard", no_color=True)
    for shown in ("a\\u202eb", "\\x1b[2Jc\\r", "\\x07", "[red]no markup[/]"):
        assert shown in text
    assert "\u202e" not in text and "\x1b[2J" not in text
    assert visible("a\tb\n👩\u200d🚀") == "a⇥\tb↵\n👩\u200d🚀"


def test_the_page_is_inert_and_whole(recipe: Any, tmp_path: Path) -> None:
    rows = [chat(HOSTILE, f"\"'{HOSTILE}"), {"messages": [{"role": HOSTILE, "content": "x"}]}]
    found = inspect(Recipe.load(recipe(rows, data={"bad_rows": "drop"})))
    path = write_report(found, tmp_path / "new" / "page.html")
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "img", "iframe", "object", "link"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "://" not in text and "@import" not in text and "default-src 'none'" in text
    assert "max_seq_length 128" in text
    bars = [attributes for tag, attributes in page.tags if tag == "i"]
    assert len(bars) == len(histogram(found.lengths, 40))
    assert [bar["style"] for bar in bars if bar.get("class") == "some"] == ["height: 100.0%"]
    assert f"\"'{HOSTILE}</s>" in page.text and "first dropped row" in page.text
    titles = [attributes["title"] or "" for tag, attributes in page.tags if tag == "span" and "title" in attributes]
    assert len(titles) == len(found.examples[0].pieces)
    assert sum(title.endswith("· supervised") for title in titles) > 10
    assert re.search(r"^id 2 · special · supervised$", "\n".join(titles), re.MULTILINE)


def test_long_examples_lose_their_middle(tokenizer: Any, recipe: Any) -> None:
    ids = tokenizer("word " * 300)["input_ids"]
    labels = [-100, *ids[1:]]
    example = Example(Document(ids, labels, "x"), pieces_of(ids, labels, tokenizer))
    shown = clip(example, 100)
    kept = sum(len(piece.ids) for piece in shown.head + shown.tail)
    assert kept + shown.left_out == len(ids) and 98 <= kept <= 102 and shown.left_out_supervised == shown.left_out
    assert clip(example, len(ids)).left_out == 0
    found = inspect(Recipe.load(recipe([chat("Hi", "word " * 140)], model={"max_seq_length": 512})))
    assert re.search(r"… [\d,]+ tokens left out, [\d,]+ of them supervised …", printed(found))


@pytest.mark.parametrize(
    ("rows", "changes", "warning"),
    [
        ([chat("word " * 150, "a")] * 3, {"model": {"max_seq_length": 512}}, "of the tokens are supervised"),
        (
            [chat("Hi", "Yes"), chat("Hi", "")] * 3,
            {"data": {"bad_rows": "drop"}},
            "50.0% of the rows are dropped (3 refused",
        ),
        ([chat("Hi", "Yes")], {}, "Packed rows are only"),
        (
            [chat(f"word {n} " * 8, f"answer {n} " * 4) for n in range(40)] * 2,
            {},
            "50.0% of the documents repeat earlier",
        ),
        ([chat(f"word {n} " * 8, "answer " * 8) for n in range(40)], {}, "tokens of all documents are the same"),
        (
            [chat(f"word {n} " * 4, f"answer {n}") for n in range(40)],
            {"packing": {"enabled": False}, "data": {"loss_on": "all"}},
            None,
        ),
        ([chat(f"word {n} " * 5, "yes" if n % 3 else "no") for n in [*range(40), 0, 1, 2]], {}, None),
        ([chat(f"word {n} " * 5, f"answer {n}") for n in range(40)], {}, None),
        ([chat("Hi", "Yes")], {"packing": {"enabled": False}}, None),
    ],
)
def test_warnings(recipe: Any, rows: list[Any], changes: Any, warning: str | None) -> None:
    found = inspect(Recipe.load(recipe(rows, **changes)))
    if warning is None:
        assert found.warnings == []
    else:
        assert any(warning in each for each in found.warnings), found.warnings
        assert "warning: " in printed(found)


def test_lengths() -> None:
    assert histogram([1, 10, 11, 95], 10) == [
        (i * 10 + 1, i * 10 + 10, n) for i, n in enumerate([2, 1] + [0] * 7 + [1])
    ]
    assert histogram([3], 16) == [(3, 3, 1)]
    assert histogram([52, 58, 55, 52], 4) == [(51, 52, 2), (53, 54, 0), (55, 56, 1), (57, 58, 1)]
    tail = histogram([*range(1, 199), 5000, 9000], 5)  # the longest hundredth doesn't crush the rest
    assert tail == [(1, 100, 100), (101, 200, 98), (201, 300, 0), (301, 400, 0), (401, 9000, 2)]
    for longest in (1, 2, 7, 99, 100, 101, 8192, 131_072):
        bins = histogram([1, longest], 16)
        assert len(bins) <= 16 and bins[-1][0] <= longest <= bins[-1][1] and sum(n for *_, n in bins) == 2


def test_percentiles_are_by_nearest_rank(recipe: Any) -> None:
    found = inspect(Recipe.load(recipe([chat("Hi", "Yes " * n) for n in range(1, 11)])), examples=0)
    n = found.lengths
    assert len(n) == 10 and found.examples == []
    assert found.percentiles == {"min": n[0], "median": n[4], "90 %": n[8], "99 %": n[9], "max": n[9]}


def test_the_command(recipe: Any, tmp_path: Path) -> None:
    path = recipe([chat("Hi", "Hello"), chat("Oh", "Ah")], data={"eval": str(tmp_path / "train.jsonl"), "eval_rows": 1})
    page = tmp_path / "page.html"
    result = invoke(str(path), "model.max_seq_length=32", "--rows", "1", "--split", "eval", "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "⟦Hello</s>⟧" in result.stdout and "Ah" not in result.stdout
    assert "the first 1 packed rows" in result.stdout and f"Page: {page}" in result.stdout and page.is_file()
    assert not (tmp_path / "run").exists()


def test_errors_are_those_of_training(recipe: Any, tmp_path: Path) -> None:
    path = recipe([chat("Hi", "Hello"), chat("word " * 200, "No")])
    result = invoke(str(path), "--split", "eval")
    assert result.exit_code == 1 and "data.eval is not set" in result.stderr
    result = invoke(str(path), "model.name=no/such/folder")
    assert result.exit_code == 1 and "does not exist" in result.stderr
    found = inspect(Recipe.load(path, ["data.overflow=drop"]))
    with pytest.raises(ConfigError, match="can't be written"):
        write_report(found, tmp_path / "recipe.yaml" / "page.html")


def test_a_document_that_is_too_long_does_not_stop_it(recipe: Any) -> None:
    path = recipe([chat("Hi", "Hello"), chat("word " * 200, "No"), chat("Hi", "word " * 200)])
    result = invoke(str(path))
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "Too long 2 (66.7%); the longest has" in told
    assert "With overflow: drop 2 dropped" in told
    assert "With overflow: truncate 1 document loses its end, 1 dropped" in told
    assert "With overflow: split 2 documents become" in told
    assert "warning: 2 documents (66.7%) are longer than model.max_seq_length 128: training stops there" in told
    found = inspect(Recipe.load(path))
    assert len(found.lengths) == 3 and found.lengths[-1] > 128


def test_a_page_is_not_written_over_another_file(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip of the keyboard would cost a recipe or a data set; a page that is there is replaced, whole."""
    path, page = recipe([chat("Hi", "Hello")]), tmp_path / "page.html"
    before = path.read_text()
    result = invoke(str(path), "--html", str(path))
    assert result.exit_code == 1 and "is not an HTML page" in result.stderr and path.read_text() == before
    assert "tokenised" not in result.output, "told before the work"
    assert invoke(str(path), "--html", str(page)).exit_code == 0
    assert invoke(str(path), "--html", str(page)).exit_code == 0
    first = page.read_bytes()

    def full(self: Path, target: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_text(page, "half")
    assert page.read_bytes() == first and not list(tmp_path.glob(".page*"))
