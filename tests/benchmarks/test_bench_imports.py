"""What the benchmarks import is there, inside functions too, which run on a GPU or with another library only."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: str(file.relative_to(FOLDER)))
def test_imports_of_the_package_and_the_benchmarks(file: Path) -> None:
    own = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("pronghorn", "benchmarks")
    ]
    for node in own:
        try:
            module = importlib.import_module(str(node.module))
        except ModuleNotFoundError as error:
            assert str(error.name).partition(".")[0] not in ("pronghorn", "benchmarks"), f"line {node.lineno}: {error}"
            continue  # a package that isn't installed here
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name):
                importlib.import_module(f"{node.module}.{name}")  # a module of its own, or the failure
