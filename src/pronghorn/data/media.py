"""Images, videos and sounds in data and batches, which are refused: models with towers are trained on text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pronghorn.errors import UnsupportedError

MEDIA = ("image", "pixel_values", "video", "audio", "input_audio", "input_features")
"""What names of columns, parts of messages and inputs of models begin with that hold such."""
TEXT_ONLY = "training is text only for now"
REMEDY = "leave out the rows and parts that need images, videos or sounds, or train with TRL alone"


def media_in(names: Iterable[Any]) -> list[str]:
    """Return those of the names that are of images, videos or sounds."""
    return sorted(name for name in names if isinstance(name, str) and name.startswith(MEDIA))


def parts_of(row: Any) -> list[Any]:
    """Return the types of the parts of all messages in a row's columns."""
    turns = (turn for value in row.values() if isinstance(value, list) for turn in value if isinstance(turn, dict))
    contents = (turn.get("content") for turn in turns)
    return [part.get("type") for content in contents if isinstance(content, list) for part in content]


def refuse_media(where: str, names: Iterable[Any]) -> None:
    """Refuse names of images, videos or sounds.

    Raises:
        UnsupportedError: says where they are.
    """
    if found := media_in(names):
        raise UnsupportedError(f"{where} has {', '.join(dict.fromkeys(found))}: {TEXT_ONLY}", REMEDY)
