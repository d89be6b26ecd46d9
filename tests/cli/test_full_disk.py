"""A full disk under what commands write: nothing half-written stays, and the remedy is to make room."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
import typer
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from typer.testing import CliRunner

from pronghorn.cli.console import Console
from pronghorn.cli.errors import plain_errors
from pronghorn.cli.main import app
from pronghorn.config.recipe import Source
from pronghorn.data.sources import fingerprint
from pronghorn.errors import ConfigError, DataError
from pronghorn.loading.load import find_model
from pronghorn.records.page import check_writable, write_text

AXOLOTL = "base_model: a/b\nsequence_len: 64\nadapter: lora\ndatasets:\n  - {path: a.jsonl, type: alpaca}\n"
RECIPE = "model: {name: a/b, max_seq_length: 64}\ndata: {train: a.jsonl}\ntrain: {output: out}\n"


def fails(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "says", "remedy"),
    [
        (errno.ENOSPC, "No space left on device", "free some space and try again"),
        (errno.EDQUOT, "Disk quota exceeded", "free some space and try again"),
        (errno.EFBIG, "File too large", "raise the quota, ulimit -f or"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["convert", "a.yml", "--output", "new"],
        ["init", "new", "--recipe", "texts"],
        ["launch", "--slurm", "r.yaml", "--gpus", "1", "--output", "new"],
    ],
)
def test_no_half_written_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], number: int, says: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text(AXOLOTL)
    Path("r.yaml").write_text(RECIPE)
    Path("a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    opened = Path.open

    def open_full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file: Any = opened(path, mode, *args, **options)
        if path.name == "new":
            file.write("half")
            file.write = fails(number)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and f"new can't be written ({says})" in result.output, result.output
    assert f"remedy: {remedy}" in result.output and not Path("new").exists(), result.output
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and Path("new").read_text(), result.output


def test_a_full_disk_elsewhere_is_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of temporary files, and of the file that a shell sends the output to."""
    monkeypatch.setattr("pronghorn.cli.docs.typer.echo", fails(errno.ENOSPC))
    result = CliRunner().invoke(app, ["docs", "recipe"])
    assert result.exit_code == 1 and "disk space ran out: [Errno 28]" in result.output, result.output
    assert "free some space where files, temporary ones (TMPDIR) and this output go" in result.output


@pytest.mark.parametrize("command", [["--help"], [], ["--version"], ["train", "--help"], ["docs", "-h"], ["data"]])
def test_a_full_disk_under_help_is_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115  what it can't write fails at its end again
    monkeypatch.setattr("sys.stdout", full)
    with pytest.raises(SystemExit) as left:
        app(command)
    told = capsys.readouterr().err.splitlines()
    assert left.value.code == 1 and len(told) == 2 and "disk space ran out: [Errno 28]" in told[0], told
    with contextlib.suppress(OSError):
        full.close()


def test_pages_name_the_remedy_of_their_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "a.html"
    for number, remedy in ((errno.ENOSPC, "free some space and try again"), (errno.EACCES, "fix its folder and")):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=remedy):
            patch.setattr("pronghorn.state.os.fsync", fails(number))
            write_text(page, "text")
        assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="in a folder that you may write to"):
        check_writable(Path("/proc/pronghorn/a.html"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"),
        OSError("Not enough disk space. Needed: 2.00 GiB"),
    ],
)
@pytest.mark.parametrize("part", ["configuration", "tokenizer", "weights", "weights, by the house's loader", "data"])
def test_a_disk_without_room_for_a_download(
    monkeypatch: pytest.MonkeyPatch, stories: Path, part: str, error: Any
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    name = "owner/name"
    found = replace(find_model(str(stories), max_seq_length=64), name=name)
    calls: dict[str, tuple[Any, str, Callable[[], Any]]] = {
        "configuration": (PretrainedConfig, "get_config_dict", lambda: find_model(name, max_seq_length=64)),
        "tokenizer": (AutoTokenizer, "from_pretrained", found.tokenizer),
        "weights, by the house's loader": (
            huggingface_hub,
            "snapshot_download",
            lambda: replace(found, load_in_4bit=True).model(torch.float32, torch.device("cpu")),
        ),
        "weights": (AutoModelForCausalLM, "from_pretrained", lambda: found.model(torch.float32, torch.device("cpu"))),
        "data": (datasets, "load_dataset", lambda: fingerprint(Source(path=Path(name)))),
    }
    holder, function, call = calls[part]
    monkeypatch.setattr(holder, function, fail)
    with pytest.raises(DataError, match=r"the disk of .* is full, where owner/name is downloaded to: free some space"):
        call()


def test_a_terminal_of_no_width_shows_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    shown = io.StringIO()
    Console(file=shown).print("held-out loss")
    assert shown.getvalue() == "held-out loss\n"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, os.strerror(errno.EIO)),
        OSError(errno.EROFS, os.strerror(errno.EROFS)),
        OSError(errno.EFBIG, os.strerror(errno.EFBIG)),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "adapter/config.json"),
        SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"),
        RuntimeError("[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/0"),
    ],
    ids=str,
)
def test_a_disk_that_fails_anywhere_is_two_lines(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), plain_errors(debug=False):
        raise error
    told = capsys.readouterr().err
    assert "error: a file can't be read or written: " in told and "remedy: look at the rights" in told
    assert " ".join(str(error).split()) in told
    with pytest.raises(type(error)), plain_errors(debug=True):
        raise error


def test_a_full_disk_under_safetensors_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), plain_errors(debug=False):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "error: disk space ran out" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ConnectionRefusedError(errno.ECONNREFUSED, "refused"), ValueError("5")], ids=str)
def test_what_is_no_disk_s_stays_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)), plain_errors(debug=False):
        raise error
