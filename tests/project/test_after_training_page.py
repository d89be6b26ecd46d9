"""Every command on docs/after-training.md runs, in the page's order; vLLM is a stand-in with a model behind it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pronghorn.cli.main import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "after-training.md").read_text()
COMMANDS = re.findall(r"^    (?:echo (?P<asked>\".*\") \| )?pronghorn (?P<line>.*)$", PAGE, re.MULTILINE)
VLLM = "vllm/bin/python"


@pytest.fixture(scope="module")
def folder(answering_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the page's reader has it: runs/mine, and an environment with vLLM."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(answering_run, folder / "runs" / "mine")
    python = folder / VLLM
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests/support/fake_vllm.py"}" none "$@"\n')
    python.chmod(0o755)
    return folder


def test_the_page_has_these_commands() -> None:
    verbs = [line.split()[0] for _, line in COMMANDS]
    assert verbs.count("chat") == 2 and verbs.count("export") == 4
    assert sum(f"--vllm {VLLM}" in line for _, line in COMMANDS) == 1
    formats = re.findall(r"^\| `([\w-]+)` \| .* \| .* \|$", PAGE.partition("`--to`")[2], re.MULTILINE)
    assert formats[:7] == ["merged", "adapter", "served-adapter", "fp8", "gguf", "gguf-lora", "ollama"]


@pytest.mark.slow
def test_the_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.chdir(folder)
    for asked, line in COMMANDS:
        words = shlex.split(line.replace("q8_0", "f16"))  # a model of 260,000 weights doesn't bear 8 bits
        words += ["--quantization", "f16"] if "ollama" in words else []
        result = CliRunner().invoke(app, words, input=f"{asked or 'Who?'}\n", env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert result.exit_code == 0, (line, result.output + result.stderr)
        if words[0] == "chat":
            assert "A cat sat on a mat." in result.stdout
            continue
        assert "The served model is the trained one." in result.stdout and "Written to" in result.stdout
        if "--vllm" in words:
            assert "stub 1.0, float32" in result.stdout
    assert (folder / "runs/mine/for-ollama/Modelfile").is_file()
