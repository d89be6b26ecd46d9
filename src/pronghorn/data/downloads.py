"""What the hub gives, where the disk has no room for it, or where it can't be reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

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


def only_cached(name: str | Path) -> dict[str, Any]:
    """Return what has a model of the hub read from the cache alone, where the hub's host has no address from here: its
    client would ask six times, in half a minute, for each file that the cache lacks, the optional ones too. Nothing for
    a local model, and where a proxy looks the address up."""
    from huggingface_hub import constants

    if os.path.exists(os.path.expanduser(name)) or constants.HF_HUB_OFFLINE or getproxies():
        return {}
    host = urlsplit(constants.ENDPOINT)
    try:
        socket.getaddrinfo(host.hostname, host.port)
    except OSError:
        return {"local_files_only": True}
    return {}
