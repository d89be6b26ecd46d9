"""What the hub gives, where the disk has no room for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pronghorn.errors import DataError
from pronghorn.state import is_full


@contextmanager
def room_for(name: str | Path) -> Iterator[None]:
    """Tell of a full disk where a model or data set of the hub is downloaded; of a local one (a Path) nothing is.

    Raises:
        DataError: names the folder. Whatever else is raised stays as it is.
    """
    try:
        yield
    except Exception as error:
        if isinstance(name, Path) or not is_full(error):
            raise
        from huggingface_hub.constants import HF_HOME

        raise DataError(
            f"the disk of {HF_HOME} is full, where {name} is downloaded to",
            "free some space and try again, or set HF_HOME in the environment to a folder on another disk",
        ) from error
