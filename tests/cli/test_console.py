"""What commands print with."""

from __future__ import annotations

import io
import sys

import pytest

from pronghorn.cli.console import starting


class Terminal(io.StringIO):
    """Text that was written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "quiet", "shown"), [(Terminal, False, True), (Terminal, True, False), (io.StringIO, False, False)]
)
def test_a_command_shows_on_a_terminal_that_it_has_begun(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], quiet: bool, shown: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", written := stream())
    with starting(quiet):
        pass
    assert ("loading libraries" in written.getvalue()) is shown
    assert shown or not written.getvalue().strip()
