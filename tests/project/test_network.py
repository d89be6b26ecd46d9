"""A run on local files contacts nobody, and says what it would contact otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pronghorn.diagnose.doctor import network_findings
from pronghorn.environment import stay_quiet

NO_NETWORK = """
import json, os, socket, sys

def refuse(*arguments, **options):
    with open(os.environ["ATTEMPTS"], "a") as file:
        file.write(json.dumps(repr(arguments[-2:])) + "\\n")
    raise OSError("sockets are forbidden")

class Forbidden(socket.socket):
    def connect(self, address):
        return super().connect(address) if self.family == socket.AF_UNIX else refuse(address)

    connect_ex = connect

socket.socket = Forbidden
socket.getaddrinfo = socket.gethostbyname = refuse
"""


def attempts(folder: Path, stories: Path, *arguments: str, **environment: str) -> list[str]:
    """What a command tried to reach, in a process of its own and those that it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    (folder / "rows.jsonl").write_text('{"text": "One day a cat sat on a mat and slept."}\n' * 30)
    recipe = {
        "model": {"name": str(stories), "max_seq_length": 128},
        "adapter": {"new_tokens": ["<think>"]},
        "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "rows.jsonl")},
        "train": {"output": str(folder / "out"), "max_steps": 2, "eval_steps": 1, "save_steps": 1},
        "report": {"sample_prompts": ["One day"], "sample_tokens": 4},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    hub = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
    inherited = {key: value for key, value in os.environ.items() if key not in (*hub, "CI")}
    more = {
        "ATTEMPTS": str(folder / "attempts"),
        "HF_HOME": str(folder / "hf"),
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2] / "src")]),
    }
    command = [sys.executable, "-m", "pronghorn", *(argument.format(folder=folder) for argument in arguments)]
    done = subprocess.run(command, env=inherited | more | environment, capture_output=True, text=True, input="Who?\n")
    assert done.returncode == 0, done.stderr
    path = folder / "attempts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_local_run_contacts_nobody(tmp_path: Path, stories: Path) -> None:
    assert attempts(tmp_path / "quiet", stories, "train", "{folder}/recipe.yaml") == []
    assert (tmp_path / "quiet" / "out" / "run.json").is_file()


@pytest.mark.slow
def test_who_wants_telemetry_has_it(tmp_path: Path, stories: Path) -> None:
    """So the test above can fail: the same run tries to reach the Hub once it is allowed to."""
    assert attempts(tmp_path / "telling", stories, "train", "{folder}/recipe.yaml", HF_HUB_DISABLE_TELEMETRY="0")


def test_telemetry_is_off_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, wanted in ((None, "1"), ("0", "0"), ("1", "1")):
        monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
        if given is not None:
            monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", given)
        stay_quiet()
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == wanted


def test_doctor_says_what_would_be_contacted() -> None:
    def told(**environment: str) -> str:
        return "; ".join(f"{finding.part}: {finding.found}" for finding in network_findings(environment))

    hub = "Network: https://huggingface.co, for models and data that aren't local"
    assert told(HF_HUB_DISABLE_TELEMETRY="1") == f"{hub}; TRL's telemetry: off (HF_HUB_DISABLE_TELEMETRY)"
    assert "TRL's telemetry: on: sent to https://huggingface.co" in told(HF_HUB_DISABLE_TELEMETRY="0")
    assert "off" in told(DO_NOT_TRACK="true") and "https://mirror" in told(HF_ENDPOINT="https://mirror")
    assert told(HF_HUB_OFFLINE="1") == "Network: offline by HF_HUB_OFFLINE: nothing is contacted"
