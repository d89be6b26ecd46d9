"""docs/python-api.md is what the public names say of themselves."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pronghorn

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# Python API

This page lists everything that `pronghorn` exports. Models are transformers' and PEFT's own objects: what those
libraries do with a model works on ours, too. The [README](../README.md#in-python) has a whole script. If you come from
Unsloth or TRL, see [moving here](migrate.md).
"""
FIRST = ("FastLanguageModel", "SFTTrainer", "attach", "Handle", "Plan", "Recipe")
"""In this order, with their methods; of the other names a line each says it all."""
OF_TRAINERS = ("train", "evaluate", "load_weights")
"""What users call of a trainer, whose other methods are stock's."""


def signature(name: str, thing: Any) -> str:
    """Return how a thing is called, without types, which the docstring tells."""
    given = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(thing).parameters.values()
    ]
    shown = inspect.Signature([each for each in given if each.name not in ("self", "cls")])
    return textwrap.fill(f"{name}{shown}", 110, subsequent_indent=" " * 4, break_long_words=False)


def entry(title: str, line: str, thing: Any) -> Iterator[str]:
    """Yield a thing's heading, how it is called, and what it says of itself."""
    yield from (f"\n{title}\n", "```text", line, "", inspect.getdoc(thing) or "", "```")


def methods(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public methods that a class, or one of ours that it extends, defines and describes."""
    ours = [each for each in kind.__mro__ if each.__module__.startswith("pronghorn.")]
    found: dict[str, Any] = {}
    for each in ours:
        found |= {name: value for name, value in vars(each).items() if name not in found}
    for name, value in found.items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(function) and not name.startswith("_") and function.__doc__:
            yield name, function


def api_page() -> str:
    """Return the page."""
    lines = [HEAD.rstrip()]
    others = [name for name in pronghorn.__all__ if name not in FIRST and not name.startswith("__")]
    for name in (*FIRST, *others):
        thing = getattr(pronghorn, name)
        lines += entry(f"## {name}", signature(name, thing), thing)
        if inspect.isclass(thing) and name in FIRST:
            for method, function in methods(thing):
                if name == "SFTTrainer" and method not in OF_TRAINERS:
                    continue
                lines += entry(f"### {name}.{method}", signature(method, function), function)
    return "\n".join(lines) + "\n"


def test_the_page_is_what_the_names_say() -> None:
    """To renew it: python tests/project/test_api_page.py > docs/python-api.md"""
    assert (ROOT / "docs" / "python-api.md").read_text() == api_page()


if __name__ == "__main__":
    print(api_page(), end="")
