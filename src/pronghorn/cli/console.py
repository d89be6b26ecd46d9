"""The console that every command prints with."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from pronghorn.environment import main_process
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

    def on_broken_pipe(self) -> None:
        """Be as quiet as if the terminal had hung up, when whoever read the output is gone, as `tee` is after a Ctrl-C:
        a training saves and stops, or goes on if `nohup` began it. Commands that SIGHUP would end, end here.
        """
        signals_end = signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        if signals_end and not self.stderr:  # without errors the command still has its exit code
            super().on_broken_pipe()
        self._fall_silent()
        if not signals_end:
            signal.raise_signal(signal.SIGHUP)

    def _check_buffer(self) -> None:
        """Write what was printed; show nothing more on a terminal that is gone. SIGHUP told those who shall end."""
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._fall_silent()

    def _fall_silent(self) -> None:
        """Show nothing more; what is left in the file's buffer goes nowhere, or the program's end would fail by it."""
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())

    def _shown(self, text: str) -> str:
        return text if self.encoding == "utf-8" else text.encode(self.encoding, "replace").decode(self.encoding)


def starting() -> Status:
    """Show in a terminal that a command has begun, while it imports libraries for some seconds. Of several processes
    the first one does."""
    return Console(stderr=True, quiet=not main_process()).status("loading libraries")
