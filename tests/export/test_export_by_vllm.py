"""`pronghorn export --vllm PYTHON`: what is written is served and compared before it counts; here by a stand-in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import pronghorn
from pronghorn.cli.main import app
from pronghorn.diagnose.export_run import export_run
from pronghorn.errors import ConfigError, ServerError, TrainingError
from pronghorn.export.comparison import Cause
from pronghorn.export.engines.http import Server

FAKE = Path(__file__).parents[1] / "support" / "fake_vllm.py"


def python(folder: Path, fault: str = "none") -> Path:
    """An interpreter that has the stand-in for vLLM."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" {fault} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a server answers is asked again after a twentieth of a second."""
    often = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 20), monotonic=time.monotonic)
    monkeypatch.setattr("pronghorn.export.engines.vllm.time", often)


@pytest.mark.parametrize("to", [pytest.param("merged", marks=pytest.mark.slow), "served-adapter"])
def test_an_export_is_served_and_compared(answering_run: Path, tmp_path: Path, to: str) -> None:
    line = ["export", str(answering_run), "--to", to, "--output", str(tmp_path / "out"), "--vllm"]
    done = CliRunner().invoke(app, [*line, str(python(tmp_path))], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output + done.stderr
    served = 2 if to == "merged" else 1
    assert done.output.count("The served model is the trained one.") == served
    assert "stub 1.0, float32" in done.output
    assert re.search(r"Next vllm serve .* --dtype float32", done.output), "as it was compared"
    assert (
        len(
            re.findall(
                r"\nloss +\d\.\d{4} .*the trained model's is \d\.\d{4}",
                done.output,
            )
        )
        == served
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert re.search(r"by stub 1.0, float32, on \d+ held-out documents?, prompts too", card)
    assert len(re.findall(r"Loss on \d+ held-out documents?, prompts too: ", card)) == served


@pytest.mark.slow
def test_a_server_that_leaves_the_adapter_out_is_caught(answering_run: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=re.escape(Cause.BASE.value)):
        export_run(answering_run, "adapter", tmp_path / "out", "q8_0", vllm=python(tmp_path, "base"))
    assert not (tmp_path / "out").exists()


def test_a_server_that_does_not_start_is_told(answering_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"vLLM doesn't serve .*: No module named vllm"):
        export_run(answering_run, "merged", tmp_path / "out", "q8_0", vllm=python(tmp_path, "fails"))
    said: list[str] = []
    with pytest.raises(ConfigError, match="is not an interpreter"):
        export_run(answering_run, "merged", tmp_path / "out", "q8_0", said.append, vllm=tmp_path / "none")
    assert not said, "told before anything is loaded"
    assert not (tmp_path / "out").exists()


SERVES = """
import sys
from pathlib import Path
from pronghorn.export.engines.vllm import serve_vllm

with serve_vllm(Path(sys.argv[1]), sys.argv[2]) as engine:
    print(engine.server.url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_server_ends_with_whoever_started_it(answering_run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVES, str(python(tmp_path)), str(answering_run / "adapter")]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(Path(pronghorn.__file__).parents[1])}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        server = Server(process.stdout.readline().strip(), timeout=5)
        assert server.ask("/v1/models")["data"]
        process.kill()
    until = time.monotonic() + 30
    with pytest.raises(ServerError, match="nothing answers"):
        while time.monotonic() < until:
            server.ask("/v1/models")
            time.sleep(0.2)


def test_formats_that_vllm_does_not_read_are_refused(answering_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--vllm with --to gguf: use --to merged, adapter, served-adapter"):
        export_run(answering_run, "gguf", tmp_path / "out", "q8_0", vllm=python(tmp_path))
    with pytest.raises(ConfigError, match="--to 'vllm' is not a format: use merged, or served-adapter"):
        export_run(answering_run, "vllm", tmp_path / "out", "q8_0")
