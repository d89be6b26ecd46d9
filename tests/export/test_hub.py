"""Exports are pushed to a hub: here a stub of its HTTP interface. The token is in the requests' headers only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pronghorn.api import FastLanguageModel
from pronghorn.errors import ConfigError, PronghornError, ServerError
from pronghorn.export.hub import push_folder
from support.hub import TOKEN, Hub, serving_hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Mine")
    (folder / ".lock").write_text("")
    return folder


def test_a_folder_is_pushed_whole_into_a_private_repository(folder: Path, tmp_path: Path, capfd: Any) -> None:
    with serving_hub(Hub()) as hub:
        address = push_folder(folder, "me/mine", token=TOKEN, endpoint=hub.url)
    assert address == f"{hub.url}/me/mine"
    assert hub.made[0]["visibility"] == "private" and hub.made[0]["name"] == "mine"
    names = {"config.json", "model.safetensors", "README.md"}
    assert hub.files == {name: (folder / name).read_bytes() for name in names}
    assert hub.tokens <= {f"Bearer {TOKEN}", None} and f"Bearer {TOKEN}" in hub.tokens
    assert not any(TOKEN.encode() in body for body in hub.bodies)
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN not in "".join(capfd.readouterr())


def test_the_token_of_the_environment_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving_hub(Hub()) as hub:
        push_folder(folder, "me/mine", endpoint=hub.url, private=False)
    assert hub.files and hub.made[0]["visibility"] == "public"


@pytest.mark.parametrize(
    ("status", "kind", "problem", "remedy"),
    [
        (401, ConfigError, "doesn't know the token", "hf auth login"),
        (403, ConfigError, "may not write to me/mine", "a token with the right to write"),
        (404, ConfigError, "has no place for me/mine", "owner's name"),
        (500, ServerError, "fails \\(500", "push again later"),
    ],
)
def test_what_the_hub_refuses_is_told_with_a_remedy_and_without_the_token(
    folder: Path, status: int, kind: type[PronghornError], problem: str, remedy: str
) -> None:
    with serving_hub(Hub(status)) as hub, pytest.raises(kind, match=problem) as error:
        push_folder(folder, "me/mine", token=TOKEN, endpoint=hub.url)
    assert remedy in error.value.remedy and TOKEN not in str(error.value)
    assert error.value.__cause__ is None and error.value.__suppress_context__


def test_without_a_token_nothing_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with serving_hub(Hub()) as hub, pytest.raises(ConfigError, match="no token for the hub: log in by `hf auth login`"):
        push_folder(folder, "me/mine", endpoint=hub.url)
    assert not hub.tokens


@pytest.mark.parametrize("name", ["me/mine/more", "a b", "me/", "", "-me/x", "me/x.git"])
def test_a_name_that_is_none_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a repository's name"):
        push_folder(folder, name, token=TOKEN, endpoint="http://127.0.0.1:9")


def test_a_folder_that_is_no_export_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="is not an exported folder: give a merged folder"):
            push_folder(folder, "me/mine", token=TOKEN)


def test_a_hub_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)  # huggingface_hub 2 doesn't bring it
    with pytest.raises(ServerError, match=r"can't be reached .*: look at the connection"):
        push_folder(folder, "me/mine", token=TOKEN, endpoint="http://127.0.0.1:9")


def test_a_file_that_holds_the_token_is_not_published(folder: Path) -> None:
    (folder / "notes.txt").write_text(f"export HF_TOKEN={TOKEN}")
    with serving_hub(Hub()) as hub, pytest.raises(ConfigError, match=r"notes\.txt holds the hub's token") as error:
        push_folder(folder, "me/mine", token=TOKEN, endpoint=hub.url)
    assert not hub.files and TOKEN not in str(error.value)


def test_a_merged_model_is_pushed_from_a_script(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64)
    model = FastLanguageModel.get_peft_model(model, r=2)
    with serving_hub(Hub()) as hub:
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.url)
        address = model.push_to_hub_merged("me/mine", tokenizer, token=TOKEN, commit_message="Of Tuesday")
    assert hub.messages == ["Of Tuesday"]
    assert address.endswith("/me/mine") and {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.files)
    assert hub.files["model.safetensors"][8:9] == b"{"
