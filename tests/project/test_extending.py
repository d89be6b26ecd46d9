"""The files of docs/extending.md do what the page says, exactly as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    block.split("\n", 1)[0].removeprefix("# "): block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
}


def run(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / name).write_text(text)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "check_ibex.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_family_from_outside_is_fused_and_equals_one_document_at_a_time(tmp_path: Path) -> None:
    assert list(FILES) == ["modeling_ibex.py", "ibex_family.py", "check_ibex.py"]
    done = run(tmp_path, FILES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fused, and equal" in done.stdout


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("ibex_family.py", '"wq", "wk", "wv"', '"wq", "wv", "wk"'),
        ("ibex_family.py", 'before="ffn_norm"', 'before="attention_norm"'),
        ("modeling_ibex.py", "gate, up = self.w13(x)", "up, gate = self.w13(x)"),
    ],
)
def test_the_check_of_the_page_can_fail(tmp_path: Path, name: str, before: str, after: str) -> None:
    """A wrong description of the family is seen. Norms are alike in a fresh model, so theirs show in the gradients."""
    assert FILES[name].count(before) == 1
    done = run(tmp_path, {**FILES, name: FILES[name].replace(before, after)})
    assert done.returncode == 1 and "not close" in done.stderr, done.stdout + done.stderr
