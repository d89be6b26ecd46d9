"""HTML pages that need nothing but themselves: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

from pronghorn import state
from pronghorn.errors import ConfigError
from pronghorn.text import visible


def write_page(path: Path, template: Path, **values: Any) -> Path:
    """Render a template, which may extend `page.html.j2` beside this file, and return the path it was written to.

    Raises:
        ConfigError: no file can be written there.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,  # but our own markup
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return write_text(path, environment.get_template(template.name).render(**values))


def write_text(path: Path, text: str) -> Path:
    """Write the whole file or nothing, and the folders around it; ConfigError where none can be written."""
    check_writable(path)
    try:
        return state.write_text(path, text)
    except OSError as error:
        remedy = state.remedy_of(error, "fix its folder and the rights there, or name another file")
        raise ConfigError(f"{path} can't be written ({error.strerror})", remedy) from error


def check_page(path: Path | None) -> None:
    """Refuse, before what takes its time, to write a page where nothing can be written, or over a file that is none."""
    if path is None:
        return
    check_writable(path)
    if path.exists():
        with path.open("rb") as file:
            if not file.read(15).lower() == b"<!doctype html>":
                raise ConfigError(f"{path} already exists and is not an HTML page", "name another file")


def check_writable(path: Path) -> None:
    """Refuse a folder, and a file in a folder where none can be made (ConfigError)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
    except OSError as error:
        remedy = state.remedy_of(error, "name a file, in a folder that you may write to")
        raise ConfigError(f"{path} can't be written ({error.strerror})", remedy) from error
