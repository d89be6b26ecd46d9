"""Models of the hub where it can't be reached."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from pronghorn.data import downloads
from pronghorn.errors import DataError
from pronghorn.loading.load import find_model


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host has an address, and nothing waits for one."""

    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(downloads, "getproxies", dict)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))


@pytest.mark.usefixtures("nobody")
def test_a_cached_model_loads_without_waiting_for_the_hub(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--owner--name"
    shutil.copytree(stories, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    found = find_model("owner/name", max_seq_length=64)
    assert len(found.tokenizer()) and found.model(torch.float32, torch.device("cpu")).config.vocab_size
    with pytest.raises(DataError, match="owner/other is neither a folder here nor to be had from the hub"):
        find_model("owner/other", max_seq_length=64)


@pytest.mark.usefixtures("nobody")
def test_who_asks_the_hub_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert downloads.only_cached("owner/name") and not downloads.only_cached(tmp_path)
    monkeypatch.setattr(downloads, "getproxies", lambda: {"https": "http://proxy:3128"})
    assert not downloads.only_cached("owner/name")
    monkeypatch.undo()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert not downloads.only_cached("owner/name")
