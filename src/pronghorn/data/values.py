"""Values of a row, checked, and as errors show them."""

import json
from typing import Any

from pronghorn.errors import DataError


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
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{at}: {name} {show(value)} is not valid JSON ({error})", f"write {name} as JSON") from error


def keys(value: Any) -> str:
    """The keys as errors list them: 'prompt', 'completion'."""
    return ", ".join(map(repr, value)) or "(none)"


def show(value: Any) -> str:
    """A value with its type, shortened: str 'hello'."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
