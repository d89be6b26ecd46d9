"""The pages and recipes that come with the package, by name. In the repository they are `docs/` and `recipes/`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import resources

from pronghorn.errors import ConfigError


def pages() -> dict[str, str]:
    """Return the texts of the pages by their names, which `pronghorn docs` takes."""
    return _texts("pronghorn", "docs", ".md")


def recipes() -> dict[str, str]:
    """Return the texts of the recipes by their names, which `pronghorn init --recipe` takes."""
    return _texts("pronghorn.recipes", "shipped", ".yaml")


def choose(found: Mapping[str, str], name: str, kind: str, listed_by: str) -> str:
    """Return the text of this name.

    Args:
        kind, listed_by: what it is, and the command that lists all, for the error.
    Raises:
        ConfigError: there is none of this name, with the nearest.
    """
    if name not in found:
        near = difflib.get_close_matches(name.replace("_", "-"), found, n=1)
        raise ConfigError(f"no {kind} is called {name!r}", f"did you mean {near[0]}?" if near else listed_by)
    return found[name]


def _texts(package: str, folder: str, suffix: str) -> dict[str, str]:
    files = sorted((resources.files(package) / folder).iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(suffix): file.read_text("utf-8") for file in files if file.name.endswith(suffix)}
