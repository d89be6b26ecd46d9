"""Every command and every piece of Python on docs/serve.md runs, against a stub server and a stub hub."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.export.conversations import built_in
from support.hub import TOKEN, Hub, serving_hub
from support.served import Stub, serving, trained

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
COMMANDS = re.findall(r"^    (pronghorn .*)$", PAGE, re.MULTILINE)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(answering_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the page's reader has it: runs/mine with its merged folder."""
    from pronghorn.export.merge import save_merged
    from pronghorn.loading.load import load_model

    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(answering_run, folder / "runs" / "mine")
    model, tokenizer = load_model(answering_run / "adapter", max_seq_length=256)
    save_merged(model, tokenizer, folder / "runs" / "mine" / "merged")
    return folder


@pytest.mark.matrix(3)
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_runs(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    served = folder / "runs" / "mine" / ("merged" if "verify" in line and line.endswith("/merged") else "")
    with serving(Stub(trained(served))) as url:
        arguments = shlex.split(line.replace("http://127.0.0.1:8000", url))[1:]
        result = CliRunner().invoke(app, arguments, input="Who?\n", env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output + result.stderr
    expected = "A cat sat on a mat." if arguments[0] == "chat" else "The served model is the trained one."
    assert expected in result.stdout


def test_the_page_s_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PYTHON) == 2
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    scope: dict[str, Any] = {}
    with serving_hub(Hub()) as hub:
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.url)
        for text in PYTHON:
            exec(text, scope)
    assert (folder / "runs" / "mine" / "served-adapter" / "adapter_model.safetensors").is_file()
    assert "model.safetensors" in hub.files and os.environ["HF_TOKEN"] == TOKEN


def test_the_page_s_numbers_are_the_code_s() -> None:
    from pronghorn.export.comparison import LIMITS

    assert f"{len(built_in())} built-in conversations" in PAGE
    merged, f16, q8_0 = LIMITS["merged"], LIMITS["f16"], LIMITS["q8_0"]
    assert (
        f"mean {merged.mean:g} and 99.9th percentile {merged.tail:g} with {merged.same:.1%}".replace("%", " %") in PAGE
    )
    for name, limits in (("f16", f16), ("q8_0", q8_0)):
        assert f"`{name}` {limits.mean:g}, {limits.tail:g}, {limits.same:.1%}".replace("%", " %") in PAGE
    assert all(f"`{name}`" in PAGE for name in LIMITS if name != "merged")
