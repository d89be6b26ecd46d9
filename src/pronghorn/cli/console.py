"""The console that every command prints with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from pronghorn.text import visible


class Console(rich.console.Console):
    """A console on which text never commands the terminal, whoever wrote it: file names, rows, templates, answers. What
    the terminal's encoding lacks becomes `?`: no run ends for a character that can't be shown.

    Everything that is printed passes `render`. Colours and cursor movements of our own are no part of the text there.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"emoji": False, **options})  # `:cat:` in a file's name stays as it is
        if self.width < 1:
            self.width = 80  # COLUMNS=0, as some terminals without a size have it: nothing would be shown

    def render_str(self, text: str, **options: Any) -> Text:
        """Make the text visible before its width is measured."""
        return super().render_str(visible(text), **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        """Make visible what was not a string when it was printed."""
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else segment._replace(text=self._shown(visible(segment.text)))

    def _shown(self, text: str) -> str:
        return text if self.encoding == "utf-8" else text.encode(self.encoding, "replace").decode(self.encoding)


def starting(quiet: bool = False) -> Status:
    """Show in a terminal that a command has begun, while it imports libraries for some seconds.

    Args:
        quiet: show nothing, as all processes but the first do.
    """
    return Console(stderr=True, quiet=quiet).status("loading libraries")
