"""Files are written whole or not at all, links are not followed, and what changed on the disk is noticed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pronghorn import state
from pronghorn.errors import ConfigError, DataError


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    state.write_json(path, "s-v1", {"x": 1})
    with pytest.raises(RuntimeError), state.new_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert state.read_json(path, "s-v1", "fix it") == {"x": 1, "schema": "s-v1"}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_at_the_target_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    state.write_text(link, "new")
    assert link.is_symlink() and real.read_text() == "new"


def test_temporary_names_can_not_be_guessed_or_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    monkeypatch.setattr(state.secrets, "token_hex", lambda n: "0" * 16)
    (tmp_path / f".a.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        state.write_text(tmp_path / "a", "evil")
    assert victim.read_text() == "keep"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": "other"}', b"\xff", b"[" * 100_000])
def test_json_of_another_kind_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json.*fix it"):
        state.read_json(path, "s-v1", "fix it")


def test_a_folder_takes_its_place_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for text in ("one", "two"):
        with state.new_folder(target) as folder:
            (folder / "f").write_text(text)
    with pytest.raises(RuntimeError), state.new_folder(target) as folder:
        (folder / "f").write_text("three")
        raise RuntimeError
    assert (target / "f").read_text() == "two" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_new_folder_are_for_those_who_may_read_the_folder(tmp_path: Path, mask: int, mode: int) -> None:
    """Safetensors makes files for their owner alone, and a server is often another user."""
    before = os.umask(mask)
    try:
        with state.new_folder(tmp_path / "out") as folder:
            (folder / "f").touch(0o600)
            (folder / "link").symlink_to(tmp_path / "nothing")
    finally:
        os.umask(before)
    assert (tmp_path / "out/f").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("size", [1, 1000, 2**24 + 1])
def test_one_flipped_bit_is_noticed(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "c"
    (folder / "sub").mkdir(parents=True)
    file = folder / "sub" / "w.bin"
    file.write_bytes(bytes(size))
    state.write_manifest(folder, "m-v1", {"step": 3})
    assert state.check_manifest(folder, "m-v1", "delete it")["step"] == 3
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    state.check_manifest(folder, "m-v1", "delete it", contents=False)
    with pytest.raises(DataError, match=r"w\.bin.*delete it"):
        state.check_manifest(folder, "m-v1", "delete it")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_a_manifest_can_not_name_files_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "c").mkdir()
    entry = {"bytes": 1, "xxh3_128": "0"}
    (tmp_path / "c" / state.MANIFEST).write_text(json.dumps({"schema": "m-v1", "files": {name: entry}}))
    with pytest.raises(DataError, match="is not an entry"):
        state.check_manifest(tmp_path / "c", "m-v1", "delete it")


def test_a_missing_manifest_or_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(DataError, match="can't be read"):
        state.check_manifest(tmp_path, "m-v1", "delete it")
    state.write_manifest(tmp_path, "m-v1")
    (tmp_path / "f").unlink()
    with pytest.raises(DataError, match="missing"):
        state.check_manifest(tmp_path, "m-v1", "delete it")


def test_leftovers_go_and_what_was_put_aside_comes_back(tmp_path: Path) -> None:
    tail = "0" * 16
    (tmp_path / f".a.{tail}.tmp").write_text("x")
    (tmp_path / f".b.{tail}.tmp").mkdir()
    (tmp_path / f".c.{tail}.old").mkdir()
    (tmp_path / f".d.{tail}.old").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / ".kept").write_text("x")
    state.clear_leftovers(tmp_path, lambda folder: True)
    assert sorted(os.listdir(tmp_path)) == [".kept", "c", "d"]


KILLED = """
import pathlib, sys
from pronghorn import state
with state.new_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("half")
    (folder.parent / "scratch").mkdir()
    print("writes", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_export_left_goes_with_the_next_one_and_not_before(tmp_path: Path) -> None:
    target, pipe = tmp_path / "out", subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", KILLED, str(target)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writes\n"
        [living] = tmp_path.iterdir()
        with pytest.raises(RuntimeError), state.new_folder(target):
            raise RuntimeError
        state.clear_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == [living] and (living / "out" / "weights").read_text() == "half"
        process.kill()
    with state.new_folder(tmp_path / "other"):
        pass
    assert living.exists(), "of another target"
    with state.new_folder(target) as folder:
        (folder / "weights").write_text("whole")
    assert sorted(os.listdir(tmp_path)) == ["other", "out"] and os.listdir(target) == ["weights"]


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with (
        state.lock(tmp_path / ".lock", 0, "one", "two"),
        pytest.raises(ConfigError, match="one: two"),
        state.lock(tmp_path / ".lock", 0, "one", "two"),
    ):
        pass
