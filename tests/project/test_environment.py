"""The environment is read and set in one module, and its page lists every variable."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "pronghorn"
NAME = r"[A-Z][A-Z0-9]*_[A-Z0-9_]+|RANK"


def test_one_module_touches_the_environment() -> None:
    touching = [path for path in SOURCE.rglob("*.py") if re.search(r"os\.environ|\bgetenv\b", path.read_text())]
    assert touching == [SOURCE / "environment.py"]


def test_the_page_lists_every_variable() -> None:
    page = (ROOT / "docs" / "install.md").read_text().partition("## Environment variables")[2]
    listed = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall(NAME, line)}
    doctor = {name for line in page.splitlines() if "told by" in line for name in re.findall(NAME, line)}
    read = set(re.findall(rf'"({NAME}|PYTHONPATH)"', (SOURCE / "environment.py").read_text()))
    assert read == (listed - doctor) | {"PYTHONPATH"} and len(read) > 20
    judged = "".join((SOURCE / "diagnose" / f"{name}.py").read_text() for name in ("doctor", "links"))
    assert all(f'"{name}"' in judged for name in doctor)
