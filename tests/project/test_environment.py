"""The environment is read and set in one module, and its page lists every variable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pronghorn.environment import check_distributed
from pronghorn.errors import ConfigError

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


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 and WORLD_SIZE=2, whose processes are 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and WORLD_SIZE=2"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc' is not a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is above 65,535"),
    ],
)
def test_a_place_that_no_group_has(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for ever for a process of that number, or end in a traceback."""
    for name, value in {"MASTER_ADDR": "localhost", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        check_distributed()
