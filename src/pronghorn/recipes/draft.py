"""A recipe in the making: what each key became, why, and what has no place in it; and its text with comments."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pronghorn.config.habits import NO_KEYS
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError

WIDTH = 44
"""Column at which comments begin."""


@dataclass
class Draft:
    """Collect a recipe's values while the keys of another configuration are gone through."""

    given: dict[str, Any]
    """The other configuration's keys that were not looked at yet."""
    folder: Path = Path()
    """Where the other configuration's file lies."""
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """By our key."""
    lost: dict[str, str] = field(default_factory=dict)
    """Their keys that have no equivalent, and what to do."""
    needless: dict[str, str] = field(default_factory=dict)
    """Their keys that nothing has to be written for, and why."""
    names: dict[str, str] = field(default_factory=dict)
    """Our keys to theirs, as far as `copy` was told."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of one of their keys, which is done with then."""
        value = self.given.pop(key, None)
        return default if value is None else value

    def asked(self, key: str) -> Any:
        """Take the value of one of their keys if it asks for something; what asks for nothing is left to `explain`."""
        return self.take(key) if self.given.get(key) else None

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set one of our keys, `section.name`."""
        section, _, name = key.partition(".")
        self.recipe.setdefault(section, {})[name] = value
        if comment:
            self.comments[key] = comment

    def copy(self, names: Mapping[str, str]) -> None:
        """Take over each of their keys that means the same as one of ours: theirs to ours."""
        self.names |= {ours: name for name, ours in names.items()}
        for name, ours in names.items():
            if (value := self.take(name)) is not None:
                self.put(ours, value, name)

    def explain(self, lost: Mapping[str, str], needless: Mapping[str, str], unless: Container[str] = ()) -> None:
        """Tell of the keys that are left what becomes of them; false ones ask for nothing, `unless` they are true there
        by default."""
        for name, value in list(self.given.items()):
            if value is False and name in unless:
                self.lost[name] = f"false: {lost[name]}"
            elif name in needless or value is False or value in ("none", "no", [], {}):
                self.needless[name] = needless.get(name, "it asks for nothing")
            else:
                self.lost[name] = lost.get(name) or NO_KEYS.get(name, "no equivalent: leave it out")
            del self.given[name]

    def check(self) -> None:
        """Move what a recipe can't hold to `lost`, so that what stays is valid.

        Raises:
            ConfigError: a key without which there is no recipe is missing or can't be used.
        """
        while True:
            try:
                Recipe.model_validate(self.recipe)
                return
            except ValidationError as error:
                first = error.errors()[0]
                section, name = (*map(str, first["loc"]), "")[:2]
                value = self.recipe.get(section, {}).pop(name, None)
                key = f"{section}.{name}".rstrip(".")
                if value is None:
                    remedy = f"add {self.names.get(key, 'it')} to the file, and convert again"
                    raise ConfigError(f"the recipe would lack {key}", remedy) from None
                source_key = self.comments.pop(key, key)
                fields = Recipe.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
                if (is_key := name in fields) and fields[name].is_required():
                    ours = [each for each in error.errors() if each["loc"][:2] == first["loc"][:2]]
                    cause = next((each for each in ours if each["type"] == "value_error"), first)
                    why = cause["msg"].removeprefix("Value error, ")
                    problem = f"{source_key}: {cause['input']!r:.200} can't be {key}: {why}"
                    raise ConfigError(problem, "change it there, and convert again") from None
                reason = (
                    "pronghorn docs recipe has its choices"
                    if first["type"] == "literal_error"
                    else first["msg"].lower()
                )
                what = f"{key} does not take {value!r}: {reason}" if is_key else "no equivalent yet"
                stays = f"; the default ({fields[name].default}) stays" if is_key else ""
                self.lost[source_key] = what + stays

    def text(self, head: Iterable[str]) -> str:
        """Return the recipe as YAML: comments beside the keys, and what was left out at the end."""
        lines = [f"# {line}".rstrip() for line in head]
        for section in Recipe.model_fields:
            if values := self.recipe.get(section):
                lines += ["", f"{section}:"]
                lines += [self._line(section, name, value) for name, value in values.items()]
        for title, keys in (("Has no equivalent here:", self.lost), ("Needs no key here:", self.needless)):
            if keys:
                lines += ["", f"# {title}", *(f"#   {name}: {why}" for name, why in keys.items())]
        return "\n".join(lines) + "\n"

    def _line(self, section: str, name: str, value: Any) -> str:
        """Return one key's line, with its comment."""
        written = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
        line = f"  {name}: {written.removesuffix(chr(10)).removesuffix('...').rstrip()}"
        comment = self.comments.get(f"{section}.{name}")
        return f"{line:<{WIDTH}}  # {comment}" if comment else line
