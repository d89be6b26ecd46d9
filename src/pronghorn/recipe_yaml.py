"""YAML as recipes are written in it: no key twice, 1e-3 is a number, errors with file and line."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from pronghorn.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key set twice (the last would win silently)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key, line = loader.construct_object(key_node), key_node.start_mark.line + 1
        if not isinstance(key, Hashable):
            raise ConfigError(f"{loader.name} line {line}: {key!r} as a key", "write keys as plain words")
        if key in seen:
            raise ConfigError(f"{loader.name} line {line}: key {key!r} is set twice", "delete one of the two")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(  # YAML 1.1 reads 1e-3 as text; people mean the number
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse(text: str, source: str) -> Any:
    """The value of a YAML text; whatever is wrong with it is a ConfigError that names `source` and line."""
    try:
        loader = _Loader(text)
        loader.name = source
        return loader.get_single_data()
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{source}{where}: not YAML ({reason})", "mend it, or quote the value") from None


def override_key(table: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into the table; the value is YAML."""
    key, equals, value = override.partition("=")
    section, dot, name = key.partition(".")
    if not equals or not dot or not name:
        raise ConfigError(f"override {override!r} is not section.key=value", "write e.g. train.max_steps=3")
    if table.setdefault(section, {}) is None:
        table[section] = {}
    if not isinstance(table[section], dict):
        raise ConfigError(f"override {override!r}: {section} is no section", "write e.g. train.max_steps=3")
    table[section][name] = parse(value, f"override {override!r}")
