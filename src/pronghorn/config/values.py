"""Types of a recipe's values beyond pydantic's own: paths, seeds, and words that stand for others."""

from __future__ import annotations

import errno
import math
import os
import re
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

_HELD_OUT = "to hold out nothing, or all: use a share over 0% and under 100%, or a count"
_Path = TypeVar("_Path", str, Path)


def _at_home(path: Path) -> Path:
    """Return the path with `~` as a shell would read it."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"no such home folder ({error})") from None


def _possible(path: _Path) -> _Path:
    """Refuse what the system can't look up: a path that is too long, or holds a NUL character."""
    if address := re.match(r"(https?|hf|[a-z0-9]{2,}):/+(?:huggingface\.co/)?(?:datasets/)?(.*)", str(path)):
        of_hub = f", or the hub's name (here perhaps {address[2]})" if address[1] in ("http", "https", "hf") else ""
        raise ValueError(f"an address: write a path of this machine{of_hub}")
    try:
        os.stat(path)
    except ValueError as error:
        raise ValueError(f"no path ({error})") from None
    except FileNotFoundError:
        if variable := re.search(r"\$\{?\w+\}?", str(path)):
            raise ValueError(
                f"recipes don't fill in {variable[0]}, the environment's: write what it stands for"
            ) from None
        if str(path)[0] in "“”„‘’«»":
            raise ValueError("typographic quotes belong to the value: write none, or plain ones") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"no path ({error.strerror})") from None
    return path


def _no_empty_path(value: object) -> object:
    """Refuse an empty path, which would mean the current folder."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("an empty path")
    return value


def listed(value: object) -> object:
    """Return a list, also for one text that stands for it."""
    return [value] if isinstance(value, str) else value


def listed_table(value: object) -> object:
    """Return a list of tables, also for one that stands for it, and for paths in a list."""
    if value == []:
        raise ValueError("an empty list")
    if isinstance(value, list):
        return [{"path": source} if isinstance(source, str) else source for source in value]
    return [value] if isinstance(value, dict) else value


def tools(value: object) -> object:
    """Return names as a list, `none` as an empty one."""
    return [] if value == "none" else names(value)


def data_or_share(value: object) -> object:
    """Return data as `listed_table` does, and a share (5% or 0.05) or a count of conversations as a text."""
    if isinstance(value, int | float):
        if isinstance(value, bool) or value <= 0 or (isinstance(value, float) and value >= 1):
            raise ValueError(_HELD_OUT)
        value = f"{100 * value:g}%" if value < 1 else str(value)
    if isinstance(value, str) and re.fullmatch(rf"-({SHARE})", value):
        raise ValueError(_HELD_OUT)
    if isinstance(value, str) and re.fullmatch(SHARE, value.replace(" %", "%")):
        value = value.replace(" %", "%")
        amount = float(value.rstrip("%"))
        if not 0 < amount < (100 if value.endswith("%") else math.inf):
            raise ValueError(_HELD_OUT)
    return listed_table(value)


def share(value: object) -> object:
    """Return a share as a number, also one that is written like 10%."""
    written = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value) if isinstance(value, str) else None
    return value if written is None else float(written[1]) / 100


def names(value: object) -> object:
    """Return names, given as a list or between commas."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def modules(value: object) -> object:
    """Return names of linears, given as a list or between commas; LLaMA-Factory's `all` is the default."""
    if value in ("all", "all_linear"):
        return [ALL_LINEAR]
    return names(value)


def dtype_name(value: object) -> object:
    """Return a dtype's whole name."""
    short_names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return short_names.get(value, value) if isinstance(value, str) else value


def on_or_off(value: object) -> object:
    """Return `on` and `off` as people write them, which YAML 1.1 reads as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


# strict otherwise: `true` is not a number of steps, "3" neither
File = Annotated[
    Path, Field(strict=False), BeforeValidator(_no_empty_path), AfterValidator(_at_home), AfterValidator(_possible)
]
FileOrName = Annotated[str, BeforeValidator(_no_empty_path), AfterValidator(_possible)]
SHARE = r"\d+(\.\d+)?%|\d+"
HeldOut = Annotated[str, Field(pattern=f"^({SHARE})$")]
Names = Annotated[list[str], BeforeValidator(names)]
Texts = Annotated[list[str], BeforeValidator(listed)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes

ALL_LINEAR = "all-linear"
"""The linears that the model's family adapts by default."""
