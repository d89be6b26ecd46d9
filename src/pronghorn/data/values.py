"""Values of a row, parsed and checked, and as errors show them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pronghorn.errors import DataError

DEPTH = 100
"""The most brackets of JSON that may be open at a time: deeper values end in RecursionErrors, here or in a template."""


class RefusedJSON(ValueError):
    """JSON that a row may not hold: a key twice in one object, brackets deeper than DEPTH, too long a number."""


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RefusedJSON(f"the key {twice[:40]!r} twice in one object")
    return table


_DECODER = json.JSONDecoder(object_pairs_hook=_no_key_twice)


def load_json(text: str) -> Any:
    """Parse one value of JSON.

    Raises:
        JSONDecodeError: the text isn't JSON. RefusedJSON: it holds what a row may not.
    """
    start = len(text) - len(text.lstrip(" \t\r\n"))
    value, end = scan_json(text, start)
    if text[end:].strip(" \t\r\n"):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def scan_json(text: str, start: int) -> tuple[Any, int]:
    """Parse the value of JSON that begins at `start`, and return it with its end.

    Raises:
        JSONDecodeError, RefusedJSON: as `load_json`.
    """
    too_deep = RefusedJSON(f"more than {DEPTH} brackets open at a time")
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise too_deep from None
    except (json.JSONDecodeError, RefusedJSON):
        raise
    except ValueError as error:  # Python reads no integer of thousands of digits
        raise RefusedJSON(f"a number that is too long to read ({error})") from None
    if text.count("[", start, end) + text.count("{", start, end) > DEPTH:
        level, depth = [value], 0
        while level := [each for each in level if isinstance(each, dict | list)]:
            depth += 1
            if depth > DEPTH:
                raise too_deep
            level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return value, end


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system says about a path that can't be read into a DataError."""
    try:
        yield
    except OSError as error:
        name = str(path) if len(str(path)) <= 300 else f"{str(path)[:300]}…"
        raise DataError(
            f"{name} can't be read ({error.strerror or error})", "mend the path, its rights or the disk"
        ) from error


def string(value: Any, name: str, at: str) -> str:
    """`value`, if it is a string that can be encoded; else DataError. `at` says where it stands."""
    if not isinstance(value, str):
        raise DataError(f"{at}: {name} is {show(value)}, not a string", f"give {name} as a string")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{at}: {name} holds half a surrogate pair, which is no text", "mend its \\u escapes")
    return value


def not_empty(value: str, name: str, at: str) -> str:
    """`value`, if it is more than white space; else DataError."""
    if not value.strip():
        raise DataError(f"{at}: an empty {name}", "fill it in or delete the row")
    return value


def parsed(value: Any, name: str, at: str) -> Any:
    """`value`, or what it says where it is a string of JSON; DataError where that is malformed."""
    if not isinstance(value, str):
        return value
    string(value, name, at)
    try:
        return load_json(value)
    except ValueError as error:
        raise DataError(f"{at}: {name} {show(value)} is not valid JSON ({error})", f"write {name} as JSON") from error


def keys(value: Any) -> str:
    """The keys as errors list them: 'prompt', 'completion'."""
    return ", ".join(map(repr, value)) or "(none)"


def show(value: Any) -> str:
    """A value with its type, shortened: str 'hello'."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
