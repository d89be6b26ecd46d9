"""Text made fit to show. From outside: no character that commands a terminal or hides itself, and not too long."""

from __future__ import annotations

import reprlib
import unicodedata
from typing import Any

_JOINERS = "\u200c\u200d"
"""Letters and emoji are drawn wrong without them."""
_UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Cs", "Co")
"""Unicode's categories of control, format (direction marks among them), separator, surrogate and private characters."""


def visible(text: str) -> str:
    """Return the text with control, direction and other unseen characters written as in Python: `\\x1b`, `\\u202e`.

    Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(_written(character) for character in text)


def short(value: Any) -> str:
    """Return `repr(value)` without the middle of what is long."""
    return _REPR.repr(value)


def clip(text: str, most: int) -> str:
    """Return the text, or its beginning and end where it has more than `most` characters."""
    if len(text) <= most:
        return text
    head, tail = 2 * most // 3, most // 3
    return f"{text[:head]} … ({len(text) - head - tail:,} characters left out) … {text[-tail:]}"


def counted(count: int, what: str, verb: str = "") -> str:
    """Return "1 document", "1,024 documents" or "2 batches"; with the verb of several its right form: "1 row has"."""
    several = "es" if what.endswith(("ch", "ss")) else "s"
    return f"{count:,} {what}{'' if count == 1 else several}{verb and ' '}{does(count, verb)}"


def does(count: int, verb: str) -> str:
    """Return the verb of so many, given that of several: "has" or "have", "loses" or "lose"."""
    irregular = {"are": "is", "were": "was", "have": "has"}
    return verb if count != 1 or not verb else irregular.get(verb, f"{verb}s")


def _written(character: str) -> str:
    """Return a character, or its escape if it can't be seen."""
    unseen = unicodedata.category(character) in _UNSEEN and character not in _JOINERS and character not in "\n\t"
    return character.encode("unicode_escape").decode() if unseen else character


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def duration(seconds: float) -> str:
    """Return seconds as people read them: 8.2 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
