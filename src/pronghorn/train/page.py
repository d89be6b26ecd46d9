"""HTML pages that need nothing but themselves: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.errors import ConfigError


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
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return write_text(path, environment.get_template(template.name).render(**values))


def write_text(path: Path, text: str) -> Path:
    """Write a file and the folders around it, and return its path; ConfigError where none can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written ({error.strerror})", "give the path of a file") from error
    return path
