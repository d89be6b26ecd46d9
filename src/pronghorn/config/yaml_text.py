"""YAML as recipes are written in it: bounded, no key twice, 1e-3 is a number, errors with file and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any

import yaml

from pronghorn.errors import ConfigError
from pronghorn.text import short

LARGEST_FILE = 2**17
"""Characters of a recipe."""
MOST_VALUES = 20_000
"""Values of a recipe, those that aliases repeat counted as often as they stand there."""
_EDIT = "fix it, or quote the value"


class _Loader(yaml.SafeLoader):
    """YAML in which nothing is read otherwise than it looks, and nothing grows without bounds."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Refuse a key set twice, of which the last would win silently."""
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise ConfigError(f"{_place(loader, key_node)}: {short(key)} as a key", "write keys as plain words")
        if key in seen:
            raise ConfigError(f"{_place(loader, key_node)}: key {short(key)} is set twice", "delete one of the two")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Refuse what YAML 1.1 reads as base 8 (010) or 60 (1:00), and integers of more than 64 bits."""
    text = str(node.value)
    if ":" in text or re.fullmatch(r"[-+]?0[0-7_]+", text):
        what = "base 60 (hours and minutes)" if ":" in text else "base 8"
        raise ConfigError(
            f"{_place(loader, node)}: {short(text)} is a number of {what} in YAML",
            "write it in base 10, without leading zeros, or quote it if it is a text",
        )
    if node.tag.endswith(":float"):
        return loader.construct_yaml_float(node)
    if len(text) > 80 or not -(2**63) <= (number := loader.construct_yaml_int(node)) < 2**63:
        raise ConfigError(f"{_place(loader, node)}: {short(text)} has more than 64 bits", "write a smaller number")
    return number


_Loader.yaml_implicit_resolvers = {  # a date is a text: none of a recipe's keys takes one
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_implicit_resolver(  # YAML 1.1 reads 1e-3 as text; people mean the number
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse(text: str, source: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ConfigError: whatever is wrong with it; names `source` and line.
    """
    if len(text) > LARGEST_FILE:
        raise ConfigError(f"{source} has more than {LARGEST_FILE:,} characters", "give a recipe, not its data")
    if unseen := re.search(r"^[ \t]*[\u00a0\u2000-\u200b\u3000]", text, re.MULTILINE):
        line = text.count("\n", 0, unseen.end()) + 1
        raise ConfigError(
            f"{source} line {line}: a space that is not a plain one, as web pages have", "indent by plain spaces"
        )
    try:
        loader = _Loader(text)
        loader.name = source
        node = loader.get_single_node()
        if node is None:
            return None
        if (values := _values(node, {})) > MOST_VALUES:
            raise ConfigError(
                f"{source} holds {values:.2g} values, with aliases (*name) written out; at most {MOST_VALUES:,}",
                "give a recipe, not its data",
            )
        return loader.construct_document(node)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{source}: values are nested too deeply, or hold themselves", _EDIT) from None
    except (yaml.YAMLError, ValueError, AttributeError, IndexError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        remedy = "indent with spaces, not tabs" if r"'\t'" in str(reason) else _EDIT
        if "found another document" in str(reason):
            remedy = "keep one recipe a file, without a line of ---"
        if "mapping values" in str(reason) or "expected <block end>" in str(reason):
            remedy = "indent a section's keys alike, by two spaces, and quote a value that holds a colon"
        raise ConfigError(f"{source}{where}: not YAML ({reason})", remedy) from None


def _values(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """Count the values that stand in a node once every alias is written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node not in counted:
        inner = node.value if isinstance(node, yaml.SequenceNode) else [each for pair in node.value for each in pair]
        counted[node] = 1 + sum(_values(each, counted) for each in inner)
    return counted[node]


def _place(loader: _Loader, node: yaml.Node) -> str:
    """Return the file and line of a node."""
    return f"{loader.name} line {node.start_mark.line + 1}"


def override_key(
    table: dict[str, Any], override: str, meant: Callable[[str, str], str | None] = lambda *_: None
) -> None:
    """Put `section.key=value` into the table; the value is YAML.

    Args:
        meant: returns what to write instead of a key without its section and this value, or None.
    """
    key, equals, value = override.partition("=")
    section, dot, name = key.strip().partition(".")
    shown = f"override {short(override)}"
    if not equals or not dot or not name:
        remedy = "write e.g. train.max_steps=3"
        if key.strip().endswith((".yaml", ".yml")):
            remedy = "one recipe a command; a change is written e.g. train.max_steps=3"
        elif equals and not dot:
            remedy = meant(section, value) or remedy
        raise ConfigError(f"{shown} is not section.key=value", remedy)
    if table.setdefault(section, {}) is None:
        table[section] = {}
    if not isinstance(table[section], dict):
        raise ConfigError(f"{shown}: {section} is not a section", "write e.g. train.max_steps=3")
    table[section][name] = parse(value, shown)
    if comment := _comment(value):
        raise ConfigError(f"{shown}: YAML leaves out {short(comment)}", f"quote the value: '{key.strip()}=\"…\"'")


def _comment(value: str) -> str:
    """Return the comment that ends a value, which can be read. In an override it was meant as a part of it."""
    if "#" not in value:  # reading it twice takes long where it is long
        return ""
    ends = [token.end_mark.index for token in yaml.scan(value) if not isinstance(token, yaml.BlockEndToken)]
    rest = value[max(ends[:-1]) :].strip()  # the last token is the stream's end
    return rest if rest.startswith("#") else ""
