"""Licence files of a base go with its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from pronghorn import FastLanguageModel
from pronghorn.config.recipe import Recipe
from pronghorn.diagnose.export_run import export_run
from pronghorn.export.fp8_checkpoint import write_fp8_checkpoint
from pronghorn.export.licences import copy_licences
from pronghorn.export.merge import save_merged
from pronghorn.train.run import run
from support.tiny import tiny_model

TAKEN = {"LICENSE", "Notice.txt", "USE_POLICY.md", "USAGE_POLICY", "LICENSE-MODEL", "THIRD_PARTY_NOTICES.md", "COPYING"}
LEFT = {"README.md", "licensed.py", "unlicense.json", "model_card.md", "terms.safetensors"}


def fill(folder: Path) -> Path:
    for name in TAKEN | LEFT:
        (folder / name).write_text(name)
    return folder


def files(folder: Path) -> set[str]:
    """Names of the base's that are there; an export has a README.md of its own."""
    return {name for name in TAKEN | LEFT if (folder / name).exists() and (folder / name).read_text() == name}


@pytest.fixture
def base(stories: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    shutil.copytree(stories, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    return fill(folder)


def test_every_export_of_base_weights_has_them(base: Path, tmp_path: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(base), max_seq_length=64)
    merged = model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    model.save_pretrained_gguf(tmp_path / "gguf", tokenizer)
    export_run(merged, "gguf", tmp_path / "export", "f16")
    folders = [merged, write_fp8_checkpoint(merged, tmp_path / "fp8"), tmp_path / "gguf", tmp_path / "export"]
    assert [files(folder) for folder in folders] == [TAKEN] * 4


@pytest.mark.parametrize(("method", "kept"), [("full", TAKEN), ("lora", set())])
def test_a_run_that_trained_the_whole_model_has_them(base: Path, tmp_path: Path, method: str, kept: set[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "once upon", "completion": " a time there was"}\n')
    table = {
        "model": {"name": str(base), "max_seq_length": 64},
        "data": {"train": tmp_path / "rows.jsonl"},
        "adapter": {"method": method},
        "train": {"output": tmp_path / "run", "max_steps": 1},
        "report": {"html": False},
    }
    run(Recipe.model_validate(table), Console(quiet=True))
    assert files(tmp_path / "run" / ("model" if method == "full" else "adapter")) == kept


def test_of_a_hub_s_model_the_cached_ones_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folders = {}
    for commit, name in (("a" * 40, "LICENSE"), ("b" * 40, "NOTICE")):
        folders[commit] = tmp_path / "hub" / "models--owner--name" / "snapshots" / commit
        folders[commit].mkdir(parents=True)
        (folders[commit] / "config.json").write_text("{}")
        (folders[commit] / name).write_text(name)
    model = tiny_model("llama")
    model.config._commit_hash = "a" * 40
    for name, found in (("owner/name", {"LICENSE"}), ("owner/other", set()), ("", set()), ("/gone/for/ever", set())):
        model.name_or_path = name
        target = tmp_path / f"to {name.replace('/', ' ')}"
        target.mkdir()
        copy_licences(model, target)
        assert {file.name for file in target.iterdir()} == found
    assert not list(save_merged(model, None, tmp_path / "made").glob("LICENSE"))
