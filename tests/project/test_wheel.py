"""What is installed is whole: the wheel, in a folder of its own, away from the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = ("--no-deps", "--disable-pip-version-check", "--no-index", "-q")
READ = """
import pronghorn
from importlib.resources import files
from pathlib import Path
assert Path(pronghorn.__file__).is_relative_to(Path.cwd()), pronghorn.__file__
for package, name in (("diagnose", "inspect.html.j2"), ("diagnose", "profile.html.j2"), ("train", "page.html.j2"),
                      ("train", "report.html.j2")):
    text = (files(f"pronghorn.{package}") / name).read_text(encoding="utf-8")
    assert "{%" in text or "{{" in text, name
assert (files("pronghorn") / "py.typed").is_file()
assert (files("pronghorn") / "export" / "conversations.jsonl").is_file()
"""


def run(folder: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_runs_outside_the_repository(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src" / "pronghorn", source / "src" / "pronghorn", ignore=shutil.ignore_patterns("__pycache__")
    )
    pip = (sys.executable, "-m", "pip")
    run(tmp_path, *pip, "wheel", *OPTIONS, "--no-build-isolation", "-w", "wheels", str(source))
    [wheel] = (tmp_path / "wheels").glob("pronghorn-*.whl")
    run(tmp_path, *pip, "install", *OPTIONS, "--target", str(installed), str(wheel))
    assert run(installed, sys.executable, "-m", "pronghorn", "--version").startswith("pronghorn 0.")
    run(installed, sys.executable, "-c", READ)
    assert "pronghorn" in {path.name for path in (installed / "bin").iterdir()}
